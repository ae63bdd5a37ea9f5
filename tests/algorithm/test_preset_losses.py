"""Each published algorithm from rewards to the gradient, against its formula in float64: no package code in that."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_runs import run_config

from rlplus import policy_loss
from rlplus.common.agree import initialize_distributed
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import make_micro_batches
from rlplus.train.recipe import set_advantages
from rlplus.train.reward.scorer import shape

LIMIT, VOCABULARY = 10, 7
TokenLoss = Callable[[SimpleNamespace], Tensor]


def clip(low: float, high: float, dual: float = inf) -> TokenLoss:
    """PPO's, with the advantage `A` and the ratio `r`."""

    def loss(t: SimpleNamespace) -> Tensor:
        gain = torch.minimum(t.r * t.A, t.r.clamp(1 - low, 1 + high) * t.A)
        return -(gain if t.A >= 0 else gain.clamp(min=dual * t.A))

    return loss


def ratio(t: SimpleNamespace) -> Tensor:
    return -t.A * t.r


def times(weight: Callable[[SimpleNamespace], Tensor]) -> TokenLoss:
    return lambda t: -t.A * weight(t)


def explored(weight: Callable[[SimpleNamespace], Tensor]) -> TokenLoss:
    return lambda t: -t.A * weight(t) * (1 - t.p.detach()).sqrt()


def mis(t: SimpleNamespace) -> Tensor:
    """2 p / (p_omega + p_old), with p_omega = (1 + p_old) / 2."""
    return 2 * t.p / ((1 + t.p_old) / 2 + t.p_old)


def nll(t: SimpleNamespace) -> Tensor:
    return -t.logprob


@dataclass(frozen=True)
class Formula:
    """rollout, demonstration: the loss of a token. reduction: see `weight_of`; std: advantages are divided by it.

    entropy: coefficient of a bonus that is weighed as the loss is; bonus: of a mean over all tokens. shaped:
    rewards of -1 and 1 and a penalty on the last fifth of the longest response. apart: demonstrations count in no
    statistics.
    """

    rollout: TokenLoss | None
    demonstration: TokenLoss | None
    reduction: str
    std: bool = True
    kl: float = 0.0
    entropy: float = 0.0
    bonus: float = 0.0
    shaped: bool = False
    apart: bool = False


def official(rollout: TokenLoss, demonstration: TokenLoss | None, **changes: Any) -> Formula:
    return Formula(rollout, demonstration, "official", std=False, bonus=1e-3, **changes)


EXTERNAL: dict[str, TokenLoss] = {
    "": explored(mis),
    "-no-eba": times(mis),
    "-no-mis": explored(lambda t: t.p),
    "-proxy": times(lambda t: t.p / t.p_old),
    "-omega": times(lambda t: t.p),
    "-bayes": times(lambda t: t.p / ((1 + t.p_old) / 2)),
}
FORMULAS = {
    **{f"rlplus{name}": Formula(ratio, external, "token") for name, external in EXTERNAL.items()},
    **{f"rlplus-official{name}": official(ratio, external) for name, external in EXTERNAL.items()},
    "luffy": official(ratio, times(lambda t: t.p / (t.p + 0.1))),
    "grpo": Formula(clip(0.2, 0.2), None, "sequence"),
    "grpo-official": official(clip(0.2, 0.2), None),
    "grpo-sft": official(ratio, nll, apart=True),
    "dr-grpo": Formula(clip(0.2, 0.2), None, "constant", std=False),
    "pope": Formula(clip(0.2, 0.2), None, "sequence", std=False),
    "dapo": Formula(clip(0.2, 0.28, dual=10.0), None, "token", shaped=True),
    "simplerl": Formula(clip(0.2, 0.2), None, "token", kl=1e-4, entropy=1e-3),
    "sft": Formula(None, nll, "token"),
    "dft": Formula(None, lambda t: -t.p.detach() * t.logprob, "token"),
}


# ---- an update: groups of rollouts and a demonstration, and what the policies say of each response token


@cache
def update(preset: str) -> list[Sample]:
    """Four groups, one of them solved by all and one by none. Every response token has an id of its own."""
    formula, generator = FORMULAS[preset], torch.Generator().manual_seed(0)
    samples, ids = [], iter(range(10**6))
    for group in range(4):
        for member in range(5):
            external = member == 4
            length = int(torch.randint(1, LIMIT + 1, (), generator=generator))
            response = [next(ids) for _ in range(length)]
            right = external or group == 3 or 0 < group > member
            if formula.demonstration if external else formula.rollout:
                samples.append(Sample([0], response, group, external, False, None, reward=float(right)))
    return samples


def policy(preset: str) -> SimpleNamespace:
    """Logits (ids, V) and, of the token with that id, logprob, entropy, and logprobs of other policies; float64."""
    generator = torch.Generator().manual_seed(1)
    ids = 1 + max(max(sample.response) for sample in update(preset))
    logits = torch.randn(ids, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.randint(0, VOCABULARY, (ids, 1), generator=generator)
    logp = logits.log_softmax(-1)
    logprob = logp.gather(1, chosen)[:, 0]
    gap = torch.randn(ids, generator=generator, dtype=torch.float64) * 0.3
    gap[::5] *= 10  # some ratios are above the dual clip
    return SimpleNamespace(
        logits=logits,
        logprob=logprob,
        entropy=-(logp.exp() * logp).sum(-1),
        old=(logprob - gap).detach().clamp(max=0),
        reference=(logprob.detach() + torch.randn(ids, generator=generator, dtype=torch.float64)).clamp(max=0),
    )


def closed_form(preset: str, off_policy: bool) -> tuple[list[float], Tensor, Tensor]:
    """The samples' advantages, the terms of the loss, and its gradient with respect to the logits."""
    formula, samples, now = FORMULAS[preset], update(preset), policy(preset)
    advantages, terms = [], []
    tokens = sum(len(sample.response) for sample in samples)
    for sample in samples:
        members = [s for s in samples if s.group == sample.group and not (formula.apart and s.external)]
        rewards = torch.tensor([reward(formula, s) for s in members], dtype=torch.float64)
        advantage = reward(formula, sample) - rewards.mean() if len(members) > 1 else rewards[0]
        if formula.std and len(members) > 1 and rewards.std() > 0:
            advantage = advantage / (rewards.std() + 1e-6)
        advantages.append(float(advantage))
        weight = weight_of(preset, sample)
        for token in sample.response:
            logprob = now.logprob[token]
            old = now.old[token] if off_policy else logprob.detach()
            t = SimpleNamespace(logprob=logprob, p=logprob.exp(), p_old=old.exp(), r=(logprob - old).exp())
            t.A = advantages[-1]
            surrogate = formula.demonstration if sample.external else formula.rollout
            assert surrogate is not None
            d = now.reference[token] - logprob
            k3 = d.exp() - d - 1
            terms += [weight * surrogate(t), weight * formula.kl * k3]
            terms.append(-(weight * formula.entropy + formula.bonus / tokens) * now.entropy[token])
    loss = torch.stack(terms)
    return advantages, loss.detach(), torch.autograd.grad(loss.sum(), now.logits)[0]


def reward(formula: Formula, sample: Sample) -> float:
    if not formula.shaped:
        return sample.reward
    return 2 * sample.reward - 1 + min(0.0, (0.8 * LIMIT - len(sample.response)) / (0.2 * LIMIT))


def weight_of(preset: str, sample: Sample) -> float:
    """The factor of a token's loss; demonstrations apart have a separate mean."""
    formula, samples = FORMULAS[preset], update(preset)
    if formula.apart and sample.external:
        return 1 / sum(len(s.response) for s in samples if s.external)
    return {
        "token": 1 / sum(len(s.response) for s in samples),
        "sequence": 1 / (len(samples) * len(sample.response)),
        "constant": 1 / (len(samples) * LIMIT),
        "official": 1 / (8 * LIMIT),
    }[formula.reduction]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    initialize_distributed()
    rollout = {"max_response_length": LIMIT}
    return run_config(tmp_path_factory.mktemp("presets"), rollout=rollout)


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("preset", FORMULAS)
def test_advantages_loss_and_gradient(config: Config, preset: str, off_policy: bool) -> None:
    """To what float32 leaves of an advantage and a weight."""
    algorithm, now = ALGORITHMS[preset], policy(preset)
    samples = [replace(sample) for sample in update(preset)]
    if algorithm.shaping is not None:
        shape(samples, algorithm.shaping, LIMIT)
    set_advantages(samples, algorithm)
    advantages, terms, gradient = closed_form(preset, off_policy)
    assert [sample.advantage for sample in samples] == pytest.approx(advantages, abs=1e-12)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in make_micro_batches(samples, algorithm, config, 0, torch.device("cpu")):
        token = batch.target
        part, _ = policy_loss(
            now.logprob[token],
            old_logprob=now.old[token] if off_policy else None,
            advantage=batch.advantage.double(),
            token_weight=batch.token_weight.double(),
            external=batch.external,
            entropy=now.entropy[token],
            entropy_weight=None if batch.entropy_weight is None else batch.entropy_weight.double(),
            ref_logprob=now.reference[token],
            objective=algorithm.objective,
        )
        loss = loss + part
    eps = torch.finfo(torch.float32).eps
    assert float((loss.detach() - terms.sum()).abs()) <= 2 * eps * float(terms.abs().sum())
    (got,) = torch.autograd.grad(loss, now.logits)
    largest = float(gradient.abs().max())
    assert largest > 0
    torch.testing.assert_close(got, gradient, rtol=2 * eps, atol=2 * eps * largest)
