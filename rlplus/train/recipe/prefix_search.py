"""The recipe of searched prefixes: unsolved prompts are sampled again behind one that helps (BREAD)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlplus.train.algorithm import PrefixSearch
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.recipe.plain import Ask, Batch, Recipe
from rlplus.train.recipe.prefix import leave_out_prefixes


@dataclass
class Search:
    """The search for one prompt's prefix, in equal parts of `text`, its demonstration without the end token.

    short, long: numbers of parts with which too few and too many rollouts were right; all parts count as too many.
    tried: number of parts before the group's rollouts now.
    """

    text: Sequence[int]
    parts: int
    short: int
    long: int
    tried: int

    @property
    def prefix(self) -> Sequence[int]:
        return self.text[: round(self.tried * len(self.text) / self.parts)]


class PrefixSearchRecipe(Recipe):
    """Rollouts of a prompt that too few of them solve are replaced by others, which begin with demonstrated tokens.

    Bisection looks for a prefix with which the share of right rollouts is inside the bounds. The group of the last
    prefix that was tried is trained on, without the prefix's tokens. The search is over within a step: it ends with the
    first group inside the bounds, or when no number of parts is left, after log2(parts) groups rounded up.

    BREAD (arXiv 2506.17211) is the preset `bread`; its code was not at hand. It splits demonstrations into sentences or
    paragraphs, this recipe into equal numbers of tokens.
    """

    options: PrefixSearch

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._searches: dict[int, Search] = {}  # those that go on; keys: groups of the draw
        self._begin()

    def _begin(self) -> None:
        self._prompts = self._unsolved = self._found = self._tries = 0
        self._reward = self._share = (0.0, 0)

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        self._begin()
        return super().collect(draw)

    def again(self, batch: Batch, tries: int) -> Mapping[int, Ask]:
        shares = _shares_right(batch.samples)
        if not tries:
            self._start(batch, shares)
        low = self.options.above
        high = self.options.below
        asks = {}
        for group, search in list(self._searches.items()):
            share = shares.get(group)
            if share is None or low < share < high:  # None: the grader failed on all
                self._end(group, found=share is not None)
                continue
            if share <= low:
                search.short = search.tried
            else:
                search.long = search.tried
            middle = (search.short + search.long) // 2
            if middle in (search.short, search.long):
                self._end(group, found=False)
                continue
            search.tried = middle
            self._tries += 1
            size = self.config.rollout.group_size
            asks[group] = Ask(size, False, [search.prefix] * size)
        return asks

    def _start(self, batch: Batch, shares: Mapping[int, float]) -> None:
        """Begin a search for every prompt with a demonstration that too few rollouts solved."""
        graded = [sample.reward for sample in batch.samples if not sample.masked]
        self._reward = self._reward[0] + sum(graded), self._reward[1] + len(graded)
        self._prompts += len(batch.examples)
        self._searches = {}
        for group, example in enumerate(batch.examples):
            text = (example.demonstration or ())[:-1]
            if text and group in shares and shares[group] <= self.options.above:
                parts = min(self.options.parts, len(text))
                self._searches[group] = Search(text, parts, short=0, long=parts, tried=0)
        self._unsolved += len(self._searches)

    def _end(self, group: int, found: bool) -> None:
        search = self._searches.pop(group)
        self._found += found
        shown, tokens = self._share
        self._share = shown + len(search.prefix), tokens + len(search.text)

    def credit(self, batch: Batch) -> None:
        leave_out_prefixes(batch.samples)
        super().credit(batch)

    def metrics(self) -> dict[str, tuple[float, float]]:
        return {
            "prefix/share": self._share,
            "prefix/unsolved": (self._unsolved, self._prompts),
            "prefix/found": (self._found, self._unsolved),
            "prefix/tries": (self._tries, self._unsolved),
            "reward/without_prefix": self._reward,
        }


def _shares_right(samples: Sequence[Sample]) -> dict[int, float]:
    """The share of each group's graded rollouts with a reward above 0; groups without any are left out."""
    right: dict[int, list[bool]] = {}
    for sample in samples:
        if not sample.masked:
            right.setdefault(sample.group, []).append(sample.reward > 0)
    return {group: sum(each) / len(each) for group, each in right.items()}
