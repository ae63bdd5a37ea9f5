"""The order in which prompts are used, and the examples that stand for each."""

from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random

from rlplus.train.data.examples import Example


class PromptSampler:
    """Endless batches of indices 0..n-1: every epoch is a new seeded shuffle, and a batch may run into the next one.

    The order depends on n and seed only: the state is one counter, and a resumed run draws the same as an uninterrupted
    one. variants[i]: alternatives to index i; one of them, chosen by seed and counter, is returned.
    """

    def __init__(self, n: int, batch: int, seed: int, variants: Sequence[Sequence[int]] | None = None) -> None:
        if not 1 <= batch <= n:
            raise ValueError(f"want a batch (prompts_per_step) between 1 and the number of prompts, {n}; got {batch}")
        self.n = n
        self.batch = batch
        self.seed = seed
        self.variants = [[i] for i in range(n)] if variants is None else variants
        self.drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> list[int]:
        """The next `batch` indices."""
        indices = [self._at(self.drawn + i) for i in range(self.batch)]
        self.drawn += self.batch
        return indices

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self.n)
        if self._order[0] != epoch:
            order = list(range(self.n))
            Random(f"{self.seed}:{epoch}").shuffle(order)  # a text seed is hashed: neighbouring seeds are unrelated
            self._order = (epoch, order)
        variants = self.variants[self._order[1][offset]]
        return variants[0] if len(variants) == 1 else Random(f"{self.seed}:{position}:variant").choice(variants)

    def state(self) -> dict[str, int]:
        return {"n": self.n, "seed": self.seed, "drawn": self.drawn}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from `state`; the batch size may differ. ValueError if it has another n or seed."""
        here = self.state()
        if state.keys() != here.keys() or any(state[key] != here[key] for key in ("n", "seed")):
            raise ValueError(f"want the state of a sampler with n {self.n} and seed {self.seed}; got {state}")
        if state["drawn"] < 0:
            raise ValueError(f"want drawn >= 0; got {state}")
        self.drawn = state["drawn"]


def variants(examples: Sequence[Example], choice: str) -> list[list[int]]:
    """The examples that stand for each row: all with a demonstration, or one without.

    choice: which of several: one, the "first", "shortest" (in tokens) or "likeliest" (by the mean `behavior_logprob`);
    "random": all. The examples of a row are next to each other.
    """
    scores: dict[str, Callable[[Example], float]] = {
        "first": lambda e: 0.0,
        "shortest": lambda e: len(e.demonstration or ()),
        "likeliest": lambda e: -sum(e.behavior_logprob or ()) / max(1, len(e.behavior_logprob or ())),
    }
    chosen = []
    for _, group in groupby(range(len(examples)), lambda i: examples[i].index):
        row = list(group)
        shown = [i for i in row if examples[i].demonstration is not None] or row[:1]
        chosen.append(shown if choice == "random" else [min(shown, key=lambda i: scores[choice](examples[i]))])
    return chosen
