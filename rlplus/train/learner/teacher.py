"""Distillation: a frozen teacher, and the update of a policy by its divergence from it over the whole vocabulary."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.loss import Objective, PolicyLoss, linear_divergence, linear_logprob, token_loss
from rlplus.train.data import MicroBatch, load_tokenizer
from rlplus.train.learner.adapters import without_adapters
from rlplus.train.learner.moving_average import MovingAverage
from rlplus.train.learner.packed_model import PackedModel, check_both_ways
from rlplus.train.learner.policy import Policy
from rlplus.train.learner.pretrained import existing_model, load_model, positions, weights_fingerprint

KEY = "algorithm.recipe.teacher"
STATISTICS = Objective("reinforce", "nll", gamma=0.0)  # whose surrogates clip nothing

# Arguments of `linear_divergence` that begin with teacher_; the head's are the policy's where they are missing, unless
# the teacher's likeliest tokens stand for all of them.
Teach = Callable[[MicroBatch], dict[str, Any]]


class Teacher:
    """A frozen model with the policy's tokens, of which every rank holds a whole copy; it never samples.

    path: its Hugging Face folder or hub name. model_path: the policy's, for its tokenizer. ValueError for a model that
    cannot teach the policy. Collective.
    """

    def __init__(self, path: str, policy: Policy, model_path: str) -> None:
        part, longest = policy.config.model, policy.config.max_sample_length
        model_config = existing_model(path, part.trust_remote_code, key=KEY)
        _check_tokens(path, load_tokenizer(part, model_path).get_vocab(), load_tokenizer(part, path).get_vocab())
        if (places := positions(model_config)) is not None and longest > places:
            raise ValueError(
                f"{KEY}: want a model with {longest} positions, for prompt and response; {path} has {places}"
            )
        self.name = path
        self.policy, self.rows = policy, policy.model_config.get_text_config(decoder=True).vocab_size
        lm = load_model(part, path, model_config)
        if (rows := len(lm.get_output_embeddings().weight)) < self.rows:
            raise ValueError(f"{KEY}: want a head with at least the policy's {self.rows} rows; {path} has {rows}")
        self.model = PackedModel(lm, None).to(policy.device).eval().requires_grad_(False)
        check_both_ways(self.model, self.model, policy.device, self.rows, 1, part.attention)
        self.fingerprint = weights_fingerprint(path)

    @torch.no_grad()
    def logprob(self, batch: MicroBatch) -> Tensor:
        """log p (N,) of the batch's targets at the policy's temperature."""
        logprob: Tensor = self._ask(batch, partial(linear_logprob, **self.policy.head_options(batch)))[0]
        return logprob

    @torch.no_grad()
    def head(self, batch: MicroBatch) -> dict[str, Any]:
        """A `Teach`: the inputs of the teacher's head for the batch's tokens."""
        given: dict[str, Any] = self._ask(batch, _teachers)
        return given

    def _ask(self, batch: MicroBatch, op: Callable[..., Any]) -> Any:
        """`op` of hidden states and the head's first rows; those behind the policy's are no token of the tokenizer."""

        def on_rows(hidden: Tensor, weight: Tensor, *, bias: Tensor | None, **transform: Any) -> Any:
            return op(hidden, weight[: self.rows], bias=None if bias is None else bias[: self.rows], **transform)

        return self.model(batch, on_rows)


class SelfTeacher:
    """The policy as its own teacher, which sees the prompts of the teacher.

    weights: the "policy"'s own; or "initial", those that it began as, or their "average" since then, which moves by
    `rate` at each `average.update()`. The latter two are in `policy.reference`; with adapters they are the policy
    without these, or with averages of these.
    """

    name, fingerprint = "the policy", None

    def __init__(
        self, policy: Policy, weights: Literal["policy", "initial", "average"] = "policy", rate: float = 0.0
    ) -> None:
        self.policy, self.weights = policy, weights
        self.average = MovingAverage(policy, rate) if weights == "average" else None

    def logprob(self, batch: MicroBatch) -> Tensor:
        """log p (N,) of the batch's targets at the policy's temperature."""
        if self._copied:
            return self.policy.logprob(_seen(batch), reference=True)
        with self._adapted():
            return self.policy.logprob(_seen(batch))

    @torch.no_grad()
    def head(self, batch: MicroBatch) -> dict[str, Any]:
        """A `Teach`: hidden states, and the head where it is not the policy's."""
        policy, batch = self.policy, _seen(batch)
        if self._copied and policy.reference is not None:
            given: dict[str, Any] = policy.reference(batch, _teachers)
            return given
        with self._adapted():
            return {"teacher_hidden": policy.engine(batch, lambda hidden, *_, **__: hidden)}

    @property
    def _copied(self) -> bool:
        return self.weights != "policy" and self.policy.reference is not None

    def _adapted(self) -> AbstractContextManager[None]:
        """The policy as the teacher, but for a copy."""
        if self.average is not None:
            return self.average.as_adapters()
        return without_adapters(self.policy.engine.module) if self.weights == "initial" else nullcontext()


def _seen(batch: MicroBatch) -> MicroBatch:
    """The micro-batch as the teacher sees it; a rank's dummy, which counts for nothing, is seen as it is."""
    return batch if batch.teacher is None else batch.teacher


def _teachers(hidden: Tensor, weight: Tensor, **rest: Any) -> dict[str, Any]:
    return {f"teacher_{name}": value for name, value in {"hidden": hidden, "weight": weight, **rest}.items()}


def _check_tokens(path: str, own: dict[str, int], teachers: dict[str, int]) -> None:
    """ValueError unless both tokenizers have the same tokens."""
    if differing := own.items() ^ teachers.items():
        number, token = min((number, token) for token, number in differing)
        raise ValueError(
            f"{KEY}: want a teacher whose tokenizer has the policy's tokens; the one of {path} differs in "
            f"{len({token for token, _ in differing})}, the first is {token!r} ({number})"
        )


def divergence_of(
    policy: Policy, teach: Teach, kind: dict[str, Any]
) -> Callable[[MicroBatch], Callable[..., PolicyLoss]]:
    """The divergence, for `Learner.backward`. kind: the arguments of `linear_divergence` that say which.

    Statistics have the sum of the tokens' divergences, too. Five GEMMs of the head: the divergence's four, two if its
    backward pass is sampled, and one for the logprobs of the tokens, which show whether the engine ran the policy.
    """
    return partial(_loss_op, policy, teach, kind)


def _loss_op(policy: Policy, teach: Teach, kind: dict[str, Any], batch: MicroBatch) -> Callable[..., PolicyLoss]:
    options, constants, given = policy.head_options(batch), policy.constants(batch, STATISTICS), teach(batch)
    common = {name: options[name] for name in ("temperature", "max_scratch_mb")} | policy.backward_options()
    lacking = ("cpp", "triton") if "teacher_topk" in given else ("cpp",)  # which have no such divergence
    common["backend"] = "torch" if policy.backend in lacking else policy.backend
    weight = batch.token_weight * dist.get_world_size()  # DeepSpeed averages gradients over ranks

    def op(hidden: Tensor, head_weight: Tensor, **head: Any) -> PolicyLoss:
        with torch.no_grad():
            logprob, entropy = linear_logprob(hidden, head_weight, **head, **options)
        teacher = given if "teacher_topk" in given else _teachers(hidden, head_weight, **head) | given
        out = linear_divergence(hidden, head_weight, **head, **teacher, token_weight=weight, **kind, **common)
        total = out.divergence.masked_fill(batch.token_weight == 0, 0.0).sum()
        stats = token_loss(logprob, entropy, constants, STATISTICS).stats
        each = (weight * out.divergence.detach()).masked_fill(weight == 0, 0.0)
        stats |= {"loss_internal": each.masked_fill(batch.external, 0.0).sum()}
        stats |= {"loss_external": each.masked_fill(~batch.external, 0.0).sum(), "divergence": total}
        return PolicyLoss(out.loss, logprob, entropy, stats)

    return op
