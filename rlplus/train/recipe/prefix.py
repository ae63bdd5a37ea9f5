"""The prefix recipe: responses start with a part of the prompt's demonstration (UFT, Prefix-RFT, RL-PLUS)."""

from collections.abc import Callable, Sequence
from math import cos, pi
from random import Random
from typing import Any

from rlplus.train.algorithm import Prefix
from rlplus.train.config import Config
from rlplus.train.data import Example, Sample, per_token
from rlplus.train.recipe.plain import Ask, Batch, Recipe


class PrefixRecipe(Recipe):
    """Rollouts whose first tokens are demonstrated: external tokens of a response that is graded as a whole.

    All tokens of a response have its advantage. A prefix excludes at least the demonstration's end token, so that
    something is sampled. Random draws depend on seed, step and prompt alone; a step of this recipe is one draw.

    UFT (arXiv 2505.16984) is the preset `uft`. It splits a demonstration between sentences, this recipe between
    tokens; its KL term does not cover the prefix, ours does. Prefix-RFT (arXiv 2507.01679, appendix A.2) is the preset
    `prefix-rft`. The official RL-PLUS code has linear, random and fixed too, and two more that are not implemented
    here: a random share per member, and shares in windows of steps.
    """

    options: Prefix

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.steps = 0
        self._share = (0.0, 0)

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        self.steps += 1
        self._share = (0.0, 0)
        return super().collect(draw)

    def ask(self, examples: Sequence[Example]) -> list[Ask]:
        size = self.config.rollout.group_size
        asks = []
        shown, tokens = self._share
        for example in examples:
            text = (example.demonstration or ())[:-1]
            prefixes = [text[: round(share * len(text))] for share in self._shares(example, len(text))]
            asks.append(Ask(size, False, prefixes))
            shown += sum(map(len, prefixes))
            tokens += len(text) * len(prefixes)
        self._share = (shown, tokens)
        return asks

    def _shares(self, example: Example, tokens: int) -> list[float]:
        """Each member's share of a demonstration of that many tokens to start with, in this step."""
        o = self.options
        t = self.steps
        members = o.members or self.config.rollout.group_size
        random = Random(f"{self.config.train.seed} {t} {example.index}")
        falling = o.schedule in ("binomial", "linear", "cosine")
        if falling and t > o.steps:
            return [0.0] * members
        if o.schedule == "fixed":
            return [o.high - (o.high - o.low) * i / max(1, members - 1) for i in range(members)]
        if o.schedule == "random":
            return [random.uniform(o.low, o.high)] * members
        if o.schedule == "linear":
            return [o.high - (o.high - o.low) * t / o.steps] * members
        p = o.low + (o.high - o.low) * (1 + cos(pi * min(t, o.steps) / o.steps)) / 2
        if o.schedule == "window":
            return [random.uniform(p, o.high)] * members
        if o.schedule == "cosine":
            return [p] * members
        segments = min(o.segments, tokens) or 1
        return [sum(random.random() < p for _ in range(segments)) / segments] * members

    def credit(self, batch: Batch) -> None:
        if not self.options.trained:
            leave_out_prefixes(batch.samples)
        super().credit(batch)

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {"prefix/share": self._share}

    def state(self) -> Any:
        return self.steps

    def restore(self, state: Any) -> None:
        self.steps = state

    def redistributed(self, states: Sequence[Any]) -> Any:
        return states[0]


def leave_out_prefixes(samples: Sequence[Sample]) -> None:
    """Take the demonstrated tokens of these samples out of what is trained on."""
    for sample in samples:
        tokens = len(sample.response)
        kinds = zip(per_token(sample.trained, tokens), per_token(sample.external, tokens), strict=True)
        sample.trained = [on and not shown for on, shown in kinds]
