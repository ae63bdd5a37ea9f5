"""On-policy self-distillation: the policy that sees a demonstration, or a correct response, is the teacher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from rlplus.algorithm import SelfDistill
from rlplus.config import Config
from rlplus.data import Sample, load_tokenizer, with_response
from rlplus.learner import SelfTeacher
from rlplus.loss import PolicyLoss
from rlplus.recipe.plain import Batch, Update
from rlplus.recipe.teaching import DistillRecipe


class SelfDistillRecipe(DistillRecipe):
    """The teacher's prompt shows the data's demonstration (OPSD, arXiv 2601.18734; SDFT, arXiv 2601.19897).

    Or it shows a correct response of the group (SDPO, arXiv 2601.20802), and samples without one are not trained on.
    """

    options: SelfDistill  # type: ignore[assignment]
    teacher: SelfTeacher

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._shown: dict[str, tuple[float, float]] = {}

    def build(self, model_path: str, model_config: PretrainedConfig, pad_id: int) -> None:
        self.teacher = SelfTeacher(self.policy, self.options.teacher, self.options.teacher_update_rate)
        self.pad_id = pad_id
        self.end_id = load_tokenizer(self.config.model, model_path).eos_token_id

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        """The step's batch with the prompts of the teacher; without samples that would see no other's response."""
        batch = super().collect(draw)
        if self.options.shows == "response":
            shown = [*self._with_responses(batch)]
            self._shown = {"distill/shown": (len(shown), len(batch.samples))}
            batch.samples = shown
            return batch
        for sample in batch.samples:
            sample.teacher_prompt = batch.examples[sample.group].teacher_prompt
        return batch

    def _with_responses(self, batch: Batch) -> Iterator[Sample]:
        """The samples whose groups have another that can be shown; their teacher's prompts have the first such."""
        groups: dict[int, list[Sample]] = {}
        for sample in batch.samples:
            if sample.reward >= self.options.shown_reward:
                groups.setdefault(sample.group, []).append(sample)
        for sample in batch.samples:
            if other := next((one for one in groups.get(sample.group, ()) if one is not sample), None):
                prompt, response = batch.examples[sample.group].teacher_prompt, [*other.response]
                assert prompt is not None, "want the prompts of a teacher"
                if response[-1:] == [self.end_id]:
                    del response[-1]
                sample.teacher_prompt = with_response(prompt, response)
                yield sample

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
        if self.teacher.average is not None and state is not None:
            self.teacher.average.restore(state)
