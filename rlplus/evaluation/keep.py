"""The samples of an evaluation, kept to be read: a file per benchmark and rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlplus.data import Example, KeptSample, keeping, token_texts
from rlplus.evaluation.results import Evaluation
from rlplus.reward import Score
from rlplus.rollout import Completion, RolloutEngine


@dataclass(frozen=True)
class KeptFiles:
    """Files whose names begin with `start`. step: of the training whose weights are evaluated."""

    start: Path
    tokenizer: PreTrainedTokenizerBase
    decode: Callable[[Sequence[int]], str]
    step: int | None = None

    def answer(
        self, question: Callable[..., Evaluation], benchmark: str, end: str, engine: RolloutEngine
    ) -> Evaluation:
        """`question(engine)`, its samples kept in a file; asked again, by another engine, it is written again."""
        with keeping(self.start.with_name(self.start.name + end)) as write:

            def keep(
                examples: Sequence[Example],
                n: Sequence[int],
                completions: Sequence[Completion],
                scores: Sequence[Score],
            ) -> None:
                problems = [example for example, count in zip(examples, n, strict=True) for _ in range(count)]
                answers = zip(problems, completions, scores, strict=True)
                write([self._kept(benchmark, *answer) for answer in answers])

            return question(engine, keep=keep)

    def _kept(self, benchmark: str, problem: Example, completion: Completion, score: Score) -> KeptSample:
        return KeptSample(
            step=self.step,
            problem=problem.index,
            benchmark=benchmark,
            prompt=self.tokenizer.decode(list(problem.prompt)),
            response=self.decode(completion.tokens),
            reward=None if isnan(score.value) else score.value,
            status=score.status,
            truncated=completion.truncated,
            tokens=token_texts(self.tokenizer, completion.tokens),
            external=[False] * len(completion.tokens),
            logprob=completion.logprob,
        )
