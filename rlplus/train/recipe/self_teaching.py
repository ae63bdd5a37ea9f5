"""On-policy self-distillation: the policy that sees a demonstration, or a correct response, is the teacher."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from rlplus.loss import PolicyLoss
from rlplus.train.algorithm import SelfDistill
from rlplus.train.config import Config
from rlplus.train.data import Sample, with_response
from rlplus.train.learner import SelfTeacher
from rlplus.train.recipe.plain import Batch, Update
from rlplus.train.recipe.teaching import DistillRecipe


class SelfDistillRecipe(DistillRecipe):
    """The teacher's prompt shows the data's demonstration (OPSD, arXiv 2601.18734; SDFT, arXiv 2601.19897).

    Or it shows a correct response of the group (SDPO, arXiv 2601.20802), and samples without one have no update.
    """

    options: SelfDistill  # type: ignore[assignment]
    teacher: SelfTeacher

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._shown: dict[str, tuple[float, float]] = {}

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        self.teacher = SelfTeacher(self.policy, self.options.teacher, self.options.teacher_update_rate)
        self.pad_id = pad_id

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """The step's batch with the prompts of the teacher, where it has one."""
        batch = super().collect(draw)
        if self.options.shows_responses:
            self._show_responses(batch)
            self._shown = {"distill/shown": (len(_taught(batch).samples), len(batch.samples))}
            return batch
        for sample in batch.samples:
            sample.teacher_prompt = batch.examples[sample.group].teacher_prompt
        return batch

    def _show_responses(self, batch: Batch) -> None:
        """Set the prompts of the samples whose groups have another one that can be shown, the first such."""
        groups: dict[int, list[Sample]] = {}
        for sample in batch.samples:
            if sample.reward >= self.options.shown_reward:
                groups.setdefault(sample.group, []).append(sample)
        for sample in batch.samples:
            if other := next((one for one in groups.get(sample.group, ()) if one is not sample), None):
                prompt = batch.examples[sample.group].teacher_prompt
                response = [*other.response]
                assert prompt is not None, "want the prompts of a teacher"
                if response and response[-1] in self.ends:
                    del response[-1]
                sample.teacher_prompt = with_response(prompt, response)

    def credit(self, batch: Batch) -> None:
        super().credit(_taught(batch))

    def updates(self, batch: Batch) -> list[Update]:
        return super().updates(_taught(batch))

    def saw(self, update: Update, outputs: Sequence[PolicyLoss], grad_norm: float | None) -> None:
        if self.teacher.average is not None:
            self.teacher.average.update()

    def metrics(self) -> dict[str, tuple[float, float]]:
        return super().metrics() | self._shown

    def state(self) -> Any:
        return None if self.teacher.average is None else self.teacher.average.parts

    def redistributed(self, states: Sequence[Mapping[str, Tensor]]) -> Any:
        return None if self.teacher.average is None else self.teacher.average.redistributed(states)

    def restore(self, state: Mapping[str, Tensor] | None) -> None:
        if self.teacher.average is not None:
            assert state is not None, "want the average that the checkpoint has"
            self.teacher.average.restore(state)


def _taught(batch: Batch) -> Batch:
    """The samples with a teacher's prompt."""
    return replace(batch, samples=[sample for sample in batch.samples if sample.teacher_prompt is not None])
