"""The prompts that a run draws from: its data, without the demonstrations that its own reward refuses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlplus.train.config import Config
from rlplus.train.data import Example, PromptSampler, variants
from rlplus.train.reward import DemonstrationReport, RewardOrStatus, Scorer, grade_demonstrations, keep_passed


@dataclass(frozen=True)
class Prompts:
    """The prompts that a run draws from.

    examples: those that it trains on. variants: for each prompt, the examples that stand for it, see
    `rlplus.train.data.variants`. verdicts: on the demonstrations that were loaded, in order, and `graded` their counts;
    empty and None where the algorithm takes none.
    """

    examples: list[Example]
    variants: list[list[int]]
    verdicts: list[RewardOrStatus]
    graded: DemonstrationReport | None

    def refusals(self, config: Config) -> Iterator[str]:
        """Reasons for which a run with this configuration refuses them."""
        if self.graded is not None and self.graded.dropped_share > (allowed := config.data.max_dropped_share):
            yield f"{self.graded.summary()}; want at most data.max_dropped_share={allowed:g} dropped"
        yield from config.algorithm.resolve().recipe.refusals(self.examples)
        try:
            PromptSampler(len(self.variants), config.train.prompts_per_step, config.train.seed)
        except ValueError as error:
            yield str(error)


def select_prompts(
    config: Config,
    examples: Sequence[Example],
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
    verdicts: Sequence[RewardOrStatus] = (),
) -> Prompts:
    """The prompts in loaded examples. Collective.

    verdicts: an earlier grading's; without any the demonstrations are graded, where the algorithm takes them.
    """
    algorithm = config.algorithm.resolve()
    kept = list(examples)
    graded = None
    if algorithm.needs_demonstrations:
        verdicts = verdicts or grade_demonstrations(examples, scorer, decode)
        kept, graded = keep_passed(examples, verdicts)
    shows = algorithm.recipe.demonstration_prompt and not algorithm.recipe.shows_responses
    if not algorithm.generates or shows:
        kept = [example for example in kept if example.demonstration is not None]
    return Prompts(kept, variants(kept, config.data.demonstration_choice), list(verdicts), graded)
