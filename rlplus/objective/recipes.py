"""What an algorithm does in a step beyond its objective, as frozen dataclasses of options.

Every recipe has a class of options here; `Refill` and `Shaping` go with each of them. `rlplus.recipe` has what they do.
Options stand apart from it so that a configuration is checked without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Plain:
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


PLAIN = Plain()
RecipeOptions = Plain

RECIPES: dict[str, type[RecipeOptions]] = {"plain": Plain}


@dataclass(frozen=True)
class Refill:
    """Leave out groups that teach nothing, and draw prompts until there are `prompts_per_step` others.

    low, high   a group is kept if its rollouts' rewards are not all equal and their mean lies in [low, high]. DAPO's
                dynamic sampling (arXiv 2503.14476, eq. 11) has 0 and 1, PRIME's filter (arXiv 2502.01456) .2 and .8
    max_draws   the run stops where so many draws do not suffice
    Raises ValueError for values that do not fit.
    """

    low: float = 0.0
    high: float = 1.0
    max_draws: int = 10

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high) and self.low <= self.high):
            raise ValueError(f"want refill.low <= refill.high, finite numbers; got {self.low!r} and {self.high!r}")
        if not is_number(self.max_draws) or self.max_draws < 1 or not isinstance(self.max_draws, int):
            raise ValueError(f"want refill.max_draws an integer >= 1; got {self.max_draws!r}")

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Whether a group is kept whose rollouts the grader gave these rewards."""
        return len(set(rewards)) > 1 and self.low <= sum(rewards) / len(rewards) <= self.high


@dataclass(frozen=True)
class Shaping:
    """What the advantages are computed from in place of the grader's reward. Metrics and `Refill` have the grader's.

    wrong      the reward of a wrong answer: r becomes wrong + (1 - wrong) r
    overlong   DAPO's soft penalty (arXiv 2503.14476, eq. 13) on rollouts in this last share of the length limit: from 0
               at its beginning it falls linearly to -1 at the limit. 0 = off
    Raises ValueError for values that do not fit.
    """

    wrong: float = 0.0
    overlong: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.wrong) or self.wrong >= 1:
            raise ValueError(f"want shaping.wrong a finite number < 1; got {self.wrong!r}")
        if not is_number(self.overlong) or not 0 <= self.overlong <= 1:
            raise ValueError(f"want shaping.overlong a number in [0, 1]; got {self.overlong!r}")

    def reward(self, reward: float, length: int, limit: int) -> float:
        """The shaped reward of a response of `length` tokens, which may have `limit`."""
        shaped = self.wrong + (1 - self.wrong) * reward
        buffer = self.overlong * limit
        return shaped + min((limit - buffer - length) / buffer, 0.0) if buffer else shaped


def is_number(value: object) -> bool:
    """Whether it is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
