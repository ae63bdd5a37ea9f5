"""The numbers of an update by their definitions, in the dtype of a plain model, one sequence at a time.

Nothing of the trainer is used here: only samples, `rlplus.loss` and the model's own forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlplus.common.kept_sets import KeptSets
from rlplus.loss import (
    Objective,
    TokenConstants,
    batch_advantages,
    group_advantages,
    policy_loss,
    token_weights,
)
from rlplus.train.algorithm import Algorithm
from rlplus.train.config import Config
from rlplus.train.data import Sample, per_token


@dataclass(frozen=True)
class Constants:
    """The constants of the loss of a sample's T response tokens: everything but the policy.

    advantage, weight, entropy_weight (T,) float64; external, trained (T,) bool; engine, behavior, ref: logprobs (T,)
    float64, NaN where unknown.
    """

    sample: Sample
    advantage: Tensor
    weight: Tensor
    entropy_weight: Tensor
    external: Tensor
    trained: Tensor
    engine: Tensor
    behavior: Tensor

    def has_loss(self, objective: Objective) -> bool:
        """Whether any token can have a gradient."""
        if objective.kl_coef or objective.entropy_coef:
            return bool(self.trained.any())
        tokens = zip(self.trained.tolist(), self.external.tolist(), self.advantage.tolist(), strict=True)
        return any(on and (objective.external_gradient(A) if external else A != 0) for on, external, A in tokens)


def advantages(samples: Sequence[Sample], algorithm: Algorithm, limit: int) -> list[float]:
    """One advantage per sample of a step, from the grader's rewards. limit: a response's tokens at most."""
    rewards = torch.tensor([_reward(s, algorithm, limit) for s in samples], dtype=torch.float64)
    groups = torch.tensor([s.group for s in samples], dtype=torch.int64)
    demonstrations = torch.tensor([s.demonstration for s in samples], dtype=torch.bool)
    include = ~demonstrations if algorithm.demonstrations_apart else None
    if algorithm.advantage == "group":
        return group_advantages(rewards, groups, normalize_std=algorithm.normalize_std, include=include).tolist()
    tokens = torch.tensor([sum(per_token(s.trained, len(s.response))) for s in samples], dtype=torch.int64)
    estimator = algorithm.advantage
    k = algorithm.advantage_k
    return batch_advantages(rewards, groups, estimator, include=include, tokens=tokens, k=k).tolist()


def _reward(sample: Sample, algorithm: Algorithm, limit: int) -> float:
    reward = sample.reward
    if algorithm.shaping is not None:
        assert sample.grade is not None, "want the grader's reward of a shaped one"
        length = 0 if sample.demonstration else len(sample.response)
        reward = algorithm.shaping.reward(sample.grade, length, limit)
    return reward + sum(sample.token_reward or ())


def constants_of(
    samples: Sequence[Sample], advantage: Sequence[float | Sequence[float]], algorithm: Algorithm, config: Config
) -> list[Constants]:
    """The constants of all samples of an update; the weights' denominators count these samples."""
    counts = [len(s.response) for s in samples]

    def each(name: str, dtype: torch.dtype = torch.bool) -> list[Tensor]:
        values = (getattr(s, name) for s in samples)
        known = (float("nan") if value is None else value for value in values)
        flat = [*chain(*(per_token(value, n) for value, n in zip(known, counts, strict=True)))]
        return list(torch.tensor(flat, dtype=dtype).split(counts))

    external = each("external")
    trained = each("trained")
    weight = _weights(external, trained, algorithm, config)
    entropy_weight = weight
    if algorithm.reduction == "official":  # its bonus is a mean over response tokens
        entropy_weight = [on.double() / float(sum(t.sum() for t in trained)) for on in trained]
    engine = each("engine_logprob", torch.float64)
    behavior = each("behavior_logprob", torch.float64)
    given = [torch.tensor([*per_token(A, n)], dtype=torch.float64) for A, n in zip(advantage, counts, strict=True)]
    columns = (samples, given, weight, entropy_weight, external, trained, engine, behavior)
    return [Constants(*row) for row in zip(*columns, strict=True)]


def _weights(
    external: Sequence[Tensor], trained: Sequence[Tensor], algorithm: Algorithm, config: Config
) -> list[Tensor]:
    on = torch.cat([*trained])
    shown = torch.cat([*external])
    counts = [len(t) for t in trained]
    sequences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    parts = [(on, algorithm.reduction)]
    if algorithm.separate_denominators:
        parts = [
            (on & ~shown, algorithm.reduction),
            (on & shown, algorithm.external_reduction or algorithm.reduction),
        ]
    limit = config.rollout.max_response_length
    weight = sum(token_weights(mask, kind, max_length=limit, sequence_ids=sequences).double() for mask, kind in parts)
    assert isinstance(weight, Tensor)
    return list(weight.split(counts))


def logprob_and_entropy(lm: PreTrainedModel, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """(T,) each, of the response's tokens; the softmax is in the model's dtype, at least fp32, over the kept tokens."""
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    logits = lm(input_ids=ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if sample.kept is not None:
        z = z.masked_fill(_dropped(sample.kept, z.shape[1]), -torch.inf)
    logp = z.log_softmax(-1)
    terms = logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)
    return logp.gather(1, torch.tensor([*sample.response])[:, None]).squeeze(1), -terms.sum(-1)


def _dropped(kept: KeptSets, vocabulary: int) -> Tensor:
    """(T, V) bool: the tokens that the sampler did not keep."""
    counts = torch.tensor([*kept.counts])
    dropped = (counts > 0)[:, None].repeat(1, vocabulary)
    dropped[torch.arange(len(counts)).repeat_interleave(counts), torch.tensor([*kept.tokens])] = False
    return dropped


class Own(NamedTuple):
    """The trainer's values of a sequence's T response tokens, each (T,) or None, which its loss depends on.

    logprob, entropy: of the update's forward pass. before: logprobs of a pass before it, if there was one. ref: under
    the frozen reference. kept: whether `top_entropy` or `external_top_entropy` left a token its surrogate.
    """

    logprob: Tensor
    entropy: Tensor
    before: Tensor | None = None
    ref: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The loss of sequences. off_policy: their old_logprob is the engine's, of older policies (`Config.stale`).

    A demonstrated token without one has the policy's own.
    """

    algorithm: Algorithm
    knows_behavior: bool
    off_policy: bool

    def __call__(self, logprob: Tensor, entropy: Tensor, c: Constants, own: Own) -> tuple[Tensor, float]:
        """-> the loss () of a sequence, differentiable in logprob and entropy, and the sum of its absolute terms.

        It is evaluated at the trainer's values, so its slopes are the trainer's on either side of a bound, and it
        differs from the trainer's loss by the rounding of the loss's own arithmetic, in which no model's is left.
        """
        logprob = _moved(logprob, own.logprob)
        entropy = _moved(entropy, own.entropy)
        constants = self._constants(c, own)
        parts = [
            self._at(logprob.detach(), entropy.detach(), _where(on, constants))[1]
            for on in (c.advantage < 0, c.advantage >= 0)  # in each of which no two terms cancel
        ]
        terms = (abs(float(x)) for stats in parts for name, x in stats.items() if name.startswith("loss_"))
        return self._at(logprob, entropy, constants)[0], sum(terms)

    def _at(self, logprob: Tensor, entropy: Tensor, constants: TokenConstants) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(logprob, entropy=entropy, objective=self.algorithm.objective, **constants._asdict())

    def _constants(self, c: Constants, own: Own) -> TokenConstants:
        a = self.algorithm
        cap = self.algorithm.objective.mismatch_cap
        sampled = c.trained & ~c.external
        now = own.logprob.double()
        given = None if own.before is None else own.before.double()
        before = now if given is None else given
        old = None
        engine = None
        if self.off_policy:
            old = c.engine.where(~c.engine.isnan(), before)
        elif a.ratio_level == "sequence" or a.mismatch_level != "token":
            old = given
        if cap is not None:
            gap = (now if old is None else old) - c.engine
            if a.mismatch_level != "token":
                gap = (gap[sampled].mean() if a.mismatch_level == "geometric" else gap[sampled].sum()).expand_as(gap)
            engine = gap
        if a.ratio_level == "sequence" and old is not None:
            ratio = (before - old)[sampled].mean()
            old = torch.where(c.external, old, before - ratio)  # exp(logprob - old) is the sequence's ratio
        if engine is not None:
            engine = ((now if old is None else old) - engine).masked_fill(c.external, torch.nan)
        return TokenConstants(
            c.advantage,
            c.weight,
            c.external,
            old_logprob=old,
            behavior_logprob=c.behavior if self.knows_behavior else None,
            ref_logprob=own.ref if own.ref is None else own.ref.double(),
            engine_logprob=engine,
            entropy_weight=c.entropy_weight,
        )


def _moved(value: Tensor, to: Tensor) -> Tensor:
    """`to`, in float64, with the gradient of `value`."""
    return value.double() + (to.double() - value.detach().double())


def _where(on: Tensor, constants: TokenConstants) -> TokenConstants:
    """The constants with weights for these tokens alone."""
    bonus = constants.entropy_weight
    return constants._replace(
        token_weight=constants.token_weight.where(on, 0.0),
        entropy_weight=None if bonus is None else bonus.where(on, 0.0),
    )


class Computed(NamedTuple):
    """Results of one sequence, in float64.

    logprob, entropy (T,): the model's. loss: at the trainer's values, and its `terms`: the sum of their absolute values
    and of the logprobs', with one more for differences of them, times the slopes. gradients: by parameter.
    """

    logprob: Tensor
    entropy: Tensor
    loss: float
    terms: float
    gradients: dict[str, Tensor]


def compute(lm: PreTrainedModel, c: Constants, own: Own, loss: Loss, temperature: float) -> Computed:
    """The loss of a sequence under the model, and the gradients of its parameters."""
    logprob, entropy = logprob_and_entropy(lm, c.sample, temperature)
    total, terms = loss(logprob, entropy, c, own)
    parameters = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    inputs = [logprob, *parameters.values()]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    slope, *grads = (torch.zeros_like(x) if g is None else g.double() for x, g in zip(inputs, found, strict=True))
    terms += float((slope.abs() * (1 + own.logprob.abs())).sum())
    gradients = dict(zip(parameters, grads, strict=True))
    return Computed(logprob.detach().double(), entropy.detach().double(), total.item(), terms, gradients)
