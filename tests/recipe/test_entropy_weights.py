"""The entropy-weighted recipe: its two losses of demonstrations in float64, its laws, and that a run resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from recipe_cases import drawn_batch, resumed, tokens_of
from teachers import gradients
from torch import Tensor
from trainer_runs import run_config
from transformers import AutoModelForCausalLM
from update_cases import packed

from rlplus.tools.verify import verify_run
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample
from rlplus.train.recipe import Batch, Update
from rlplus.train.recipe.entropy_weights import EntropyWeightsRecipe
from rlplus.train.recipe.plain import demonstration
from rlplus.train.trainer import Run, open_run, train

LIMIT = 8  # trainer_runs' longest response


def srft(folder: Path, output: str = "run", **algorithm: Any) -> Config:
    return run_config(folder, output, algorithm={"preset": "srft"} | algorithm, train={"tokens_per_micro_batch": 24})


def drawn() -> Batch:
    """Three groups of rollouts, the second of which were all right, each with its demonstration."""
    batch = drawn_batch([[0, 1, 0], [1, 1, 1], [0, 0, 0]])
    batch.examples[0] = replace(batch.examples[0], demonstration=(7, 8, 9, 10, 11))
    for i, sample in enumerate(batch.samples):
        sample.response = [*sample.response, *range(20, 20 + i % 4)]
    batch.samples += [demonstration(example, group) for group, example in enumerate(batch.examples)]
    return batch


def prepared(run: Run, moved: bool) -> tuple[Update, list[MicroBatch]]:
    """A credited update; moved: since the samples were drawn the policy has."""
    recipe, batch = run.recipe, drawn()
    recipe.credit(batch)
    (update,) = recipe.updates(batch)
    batches = packed(run, update.samples, algorithm=update.algorithm)
    for micro in batches:
        if moved:
            micro.old_logprob = run.policy.logprob(micro) + drift(micro.target)
    return update, batches


def drift(tokens: Tensor) -> Tensor:
    """How far the policy's logprobs of these tokens have fallen."""
    return 0.3 * tokens.sin()


CASES: dict[str, dict[str, Any]] = {
    "preset": {},
    "tokens": {"recipe": {"level": "token", "positive": 0.3, "positive_exponent": -0.5, "supervised_exponent": 1.0}},
    "paper": {"objective": {"external": "omega", "entropy_coef": 0.0}, "reduction": "token", "normalize_std": False},
    "advantages": {
        "objective": {"internal": "ratio", "external": "mis", "external_coef": 0.4, "gamma": 0.5, "entropy_coef": 0.0},
        "recipe": {"signs": False, "supervised": 2.0},
    },
}


@pytest.mark.parametrize("name", quick.only(("preset", "advantages"), CASES))
@pytest.mark.parametrize("moved", [False, True])
def test_an_update_is_the_sum_of_its_losses_in_float64(tmp_path: Path, name: str, moved: bool) -> None:
    """arXiv 2506.19767, eq. 7 to 13, a sequence at a time: gradient, loss and the mean weights."""
    with open_run(srft(tmp_path, **CASES[name])) as run:
        update, batches = prepared(run, moved)
        assert len([batch for batch in batches if not batch.forward_only]) >= 2
        value, got = gradients(run, update, batches)
        algorithm, o = run.recipe.algorithm, run.recipe.options
        lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        weights: dict[str, list[float]] = {"positive": [], "supervised": []}
        tokens = sum(len(s.response) for s in update.samples)
        shown = sum(len(s.response) for s in update.samples if s.demonstration)
        for sample in update.samples:
            logp, entropy = tokens_of(lm, sample)
            A = advantage_of(sample, update.samples, algorithm.normalize_std)
            before = logp.detach() + moved * drift(torch.tensor(sample.response))
            m = 1 / tokens if algorithm.reduction == "token" else 1 / (8 * LIMIT)
            H = entropy.detach() if o.level == "token" else entropy.detach().mean().expand_as(entropy)
            if sample.demonstration:
                weight = o.supervised * (o.supervised_exponent * H).exp()
                weights["supervised"] += weight.tolist()
                total = total - m * A * reinforced(algorithm, logp, before).sum() - (weight * logp).sum() / shown
            else:
                A = (1.0 if sample.reward else -1.0) if o.signs else A
                weight = o.positive * (o.positive_exponent * H).exp() if A > 0 else torch.ones_like(H)
                weights["positive"] += weight.tolist() if A > 0 else []
                gain = logp if o.signs else (logp - before).exp()
                total = total - m * A * (weight * gain).sum()
            total = total - algorithm.objective.entropy_coef * entropy.sum() / tokens
        total.backward()
        assert value == pytest.approx(float(total.detach()), rel=1e-4)
        assert run.recipe.metrics() == {
            f"weights/{kind}": (pytest.approx(sum(values), rel=1e-5), len(values)) for kind, values in weights.items()
        }
        for parameter, p in lm.named_parameters():
            bound = {"rtol": 1e-4, "atol": 2e-6 * float(p.grad.abs().max())}
            torch.testing.assert_close(got[parameter].double(), p.grad, msg=parameter, **bound)


def advantage_of(sample: Sample, samples: list[Sample], std: bool) -> float:
    rewards = torch.tensor([s.reward for s in samples if s.group == sample.group], dtype=torch.float64)
    if len(set(rewards.tolist())) == 1:
        return 0.0
    return float((sample.reward - rewards.mean()) / (rewards.std() + 1e-6 if std else 1.0))


def reinforced(algorithm: Any, logp: Tensor, before: Tensor) -> Tensor:
    """The importance weight of demonstrated tokens."""
    o, p = algorithm.objective, logp.exp()
    g = {
        "shaped": lambda: p / (p + 0.1),
        "omega": lambda: p,
        "mis": lambda: 2 * p / ((1 + before.exp()) / 2 + before.exp()),
    }[o.external]()
    explored = (1 - p.detach()).sqrt() if o.gamma else torch.ones_like(p)
    return o.external_coef * explored * g


def test_without_weights_it_is_luffy(tmp_path: Path) -> None:
    """Factors of 1 and 0: loss, statistics and gradient of the plain recipe with the same objective."""
    found = []
    without = {"signs": False, "positive": 1.0, "positive_exponent": 0.0, "supervised": 0.0}
    for i, recipe in enumerate((without, {"name": "plain"})):
        with open_run(srft(tmp_path, str(i), recipe=recipe, objective={"internal": "ratio"})) as run:
            update, batches = prepared(run, moved=True)
            outputs = run.recipe.accumulate(update, batches)
            stats = {name: float(sum(out.stats[name] for out in outputs)) for name in outputs[0].stats}
            run.policy.engine.optimizer.zero_grad()
            found.append((*gradients(run, update, batches), stats))
    (loss, own, own_stats), (want, plain, stats) = found
    assert loss == pytest.approx(want, rel=1e-5)
    assert own_stats == pytest.approx(stats, rel=1e-5, abs=1e-7)
    for name, gradient in plain.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


def test_a_demonstration_is_imitated_though_all_rollouts_were_right(tmp_path: Path) -> None:
    """Without an advantage, and without an entropy bonus that would keep it in any case."""
    with open_run(srft(tmp_path, objective={"entropy_coef": 0.0})) as run:
        update, _ = prepared(run, moved=False)
        right = [s for s in update.samples if s.group == 1]
        assert [s.advantage for s in right] == [1.0, 1.0, 1.0, 0.0]
        only = Update(right[3:], update.algorithm)
        (batch,) = packed(run, only.samples, algorithm=only.algorithm)
        assert not batch.forward_only
        value, got = gradients(run, only, [batch])
        assert value > 0
        assert max(float(gradient.abs().max()) for gradient in got.values()) > 1e-4


@pytest.mark.parametrize(
    ("algorithm", "train", "problem"),
    [
        ({"preset": "grpo"}, {}, "want a preset with rollouts and demonstrations; got grpo"),
        ({"preset": "sft"}, {}, "want a preset with rollouts and demonstrations; got sft"),
        ({"external_schedule": {"shape": "gradient-norm"}}, {}, "it does not support algorithm.external_schedule"),
        ({"external_top_entropy": 0.5}, {}, "it weighs every demonstrated token by an entropy"),
        ({}, {"overlap": 1}, "it does not support train.overlap"),
    ],
)
def test_what_it_cannot_be_used_with(tmp_path: Path, algorithm: Any, train: Any, problem: str) -> None:
    algorithm = {"preset": "srft", "recipe": {"name": "entropy-weights"}} | algorithm
    rollout = {"engine": "transformers", "mode": "process"} if train else {"engine": "transformers"}
    with pytest.raises(ValueError, match=f"algorithm.recipe entropy-weights: {problem}"):
        run_config(tmp_path, algorithm=algorithm, train=train, rollout=rollout)


def test_an_exponent_of_nothing_is_refused(tmp_path: Path) -> None:
    recipe = {"name": "entropy-weights", "supervised": 0, "supervised_exponent": 1}
    with pytest.raises(ValueError, match="supervised_exponent has no effect with supervised 0"):
        run_config(tmp_path, algorithm={"preset": "srft", "recipe": recipe})


def test_a_step_is_not_verified_with_other_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want a run whose tokens its objective alone weighs; .* entropy-weights"):
        verify_run(train(run_config(tmp_path, algorithm={"preset": "srft"}, train={"steps": 1})))


def test_a_run_weighs_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = resumed(tmp_path, monkeypatch, {"preset": "srft"}, EntropyWeightsRecipe, steps=8)
    for row in rows:
        assert 0 < row["weights/supervised"] < 0.5 * 0.1  # an untrained model's entropy is near log 258
        assert row["actor/loss_external"] > 0
        assert ("weights/positive" in row) == (row["batch/solve_none"] < 1)
