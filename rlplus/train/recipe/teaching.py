"""Distillation: rollouts of the policy or demonstrations, and a teacher in the place of rewards."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from rlplus.loss import PolicyLoss
from rlplus.train.algorithm import Distill
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, per_token
from rlplus.train.learner import (
    GivenTeacher,
    SelfTeacher,
    ServedTeacher,
    StoredTeacher,
    Teacher,
    by_sample,
    divergence_of,
)
from rlplus.train.recipe.plain import Batch, Recipe, Update


class DistillRecipe(Recipe):
    """A divergence from the teacher is the loss, or the teacher's logprobs give each sampled token its advantage.

    GKD (arXiv 2306.13649) with student data only has the first, Thinking Machines' on-policy distillation the second.
    The teacher is a frozen model, here or on a server; or, for demonstrations, its states or likeliest tokens are kept.
    """

    options: Distill
    teacher: Teacher | ServedTeacher | StoredTeacher | GivenTeacher | SelfTeacher

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._divergence = [0.0, 0.0]  # sum over the step's tokens on this rank, and their number

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        options = self.options
        self.pad_id = pad_id
        if options.teacher_url is not None:
            self.teacher = ServedTeacher(options.teacher_url, options.topk, self.policy, model_path)
            return
        if options.teacher_states is not None:
            self.teacher = StoredTeacher(options.teacher_states, self.policy, model_path)
            return
        frozen = options.teacher
        self.teacher = GivenTeacher() if frozen is None else Teacher(frozen, self.policy, model_path)

    def credit(self, batch: Batch) -> None:
        """Advantages of sampled tokens, log p_teacher - log p; with a divergence every token counts alike, 1."""
        self._divergence = [0.0, 0.0]
        if self.options.own_loss:
            for sample in batch.samples:
                sample.advantage = 1.0
            if isinstance(self.teacher, ServedTeacher):
                self.teacher.show(batch.samples)
            return
        samples = batch.samples
        policy = self.policy
        assert not isinstance(self.teacher, GivenTeacher | StoredTeacher), "want a checked configuration"

        def asked(compute: Callable[[MicroBatch], Tensor]) -> list[Tensor]:
            return by_sample(samples, compute, self.config, self.pad_id, policy.device)

        own = asked(policy.logprob)
        teacher = self.teacher
        teachers = teacher.logprobs(samples) if isinstance(teacher, ServedTeacher) else asked(teacher.logprob)
        for sample, logprob, taught in zip(samples, own, teachers, strict=True):
            sample.advantage = (taught.double() - logprob.double()).tolist()
            trained = [A for A, on in zip(sample.advantage, per_token(sample.trained, len(logprob)), strict=True) if on]
            self._add(-sum(trained), len(trained))

    def accumulate(
        self, update: Update, batches: Sequence[MicroBatch], before_each: Callable[[], None] | None = None
    ) -> list[PolicyLoss]:
        if not (kind := self.options.own_loss):
            return super().accumulate(update, batches, before_each)
        which = {"kind": kind, "beta": self.options.beta if kind == "jsd" else None}
        outputs = self.policy.backward(batches, divergence_of(self.policy, self.teacher.head, which), before_each)
        self._add(*(float(sum(out.stats[name] for out in outputs)) for name in ("divergence", "tokens")))
        return outputs

    def _add(self, total: float, tokens: float) -> None:
        self._divergence = [self._divergence[0] + total, self._divergence[1] + tokens]

    def metrics(self) -> dict[str, tuple[float, float]]:
        total, tokens = self._divergence
        return {"distill/divergence": (total, tokens)}

    def state(self) -> Any:
        return self.teacher.fingerprint

    def redistributed(self, states: Sequence[Any]) -> Any:
        return states[0]

    def restore(self, state: Any) -> None:
        if state != self.teacher.fingerprint:
            other = f"{self.teacher.name} has other weights"
            if isinstance(self.teacher, ServedTeacher):
                other = f"{self.teacher.name} is {self.teacher.fingerprint}, not {state}"
            raise ValueError(f"algorithm.recipe: want the teacher that the run began with; {other}")
