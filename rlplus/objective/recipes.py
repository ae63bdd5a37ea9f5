"""What an algorithm does in a step beyond its objective: the options of each recipe, a frozen dataclass of its own.

`rlplus.recipe` has what they do. Options stand apart from it so that a configuration is checked without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal

Head = Literal["language", "value"]


@dataclass(frozen=True)
class RecipeOptions:
    """What is fixed for all options of a recipe.

    learners: the models that it trains beside the policy, by name. Each has the policy's body; its head is that of the
    "language" model, or a "value" of width 1.
    """

    learners: ClassVar[Mapping[str, Head]] = {}


@dataclass(frozen=True)
class Plain(RecipeOptions):
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


@dataclass(frozen=True)
class Critic(RecipeOptions):
    """PPO: a value model of the policy's size says what each state is worth, and an advantage is one of a token.

    gamma, gae_lambda   of generalized advantage estimation; with 1 and 1, A_t = reward - V_t
    whiten              advantages have mean 0 and variance 1 over the tokens of the batch
    stopped_only        a response that was cut at the length limit has the reward 0
    critic_updates      optimizer steps of the value model per step, each on an equal part of the step's samples
    value_clip          how far a value may move from that of the step's beginning before its loss is clipped
    lr, warmup_steps    of the value model's optimizer; its other options are those of `train`
    Raises ValueError for a value that does not fit.
    """

    learners: ClassVar[Mapping[str, Head]] = {"critic": "value"}

    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten: bool = True
    stopped_only: bool = True
    critic_updates: int = 12
    value_clip: float = 0.2
    lr: float = 5e-6
    warmup_steps: int = 50

    def __post_init__(self) -> None:
        wanted = {
            "gamma": ("a number in [0, 1]", is_number(self.gamma) and 0 <= self.gamma <= 1),
            "gae_lambda": ("a number in [0, 1]", is_number(self.gae_lambda) and 0 <= self.gae_lambda <= 1),
            "whiten": ("true or false", isinstance(self.whiten, bool)),
            "stopped_only": ("true or false", isinstance(self.stopped_only, bool)),
            "critic_updates": ("an integer >= 1", _is_integer(self.critic_updates) and self.critic_updates >= 1),
            "value_clip": ("a finite number > 0", _is_positive(self.value_clip)),
            "lr": ("a finite number > 0", _is_positive(self.lr)),
            "warmup_steps": ("an integer >= 0", _is_integer(self.warmup_steps) and self.warmup_steps >= 0),
        }
        _check(self, wanted)


@dataclass(frozen=True)
class ProcessReward(RecipeOptions):
    """PRIME: a second language model learns the outcomes, and its logprobs less the reference's are rewards of tokens.

    It scores the step's samples as the step before left it, and learns after that. It has the policy's mini-batches.

    beta                      of its loss: beta times the sum of a response's scores is the logit of a right answer
    lr, warmup_steps, grad_clip, weight_decay
                              of its optimizer; the other options are those of `train`
    Raises ValueError for a value that does not fit.
    """

    learners: ClassVar[Mapping[str, Head]] = {"process": "language"}

    beta: float = 0.05
    lr: float = 1e-6
    warmup_steps: int = 0
    grad_clip: float = 10.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        positive = "a finite number > 0"
        wanted = {name: (positive, _is_positive(getattr(self, name))) for name in ("beta", "lr", "grad_clip")}
        wanted["warmup_steps"] = ("an integer >= 0", _is_integer(self.warmup_steps) and self.warmup_steps >= 0)
        wanted["weight_decay"] = ("a finite number >= 0", is_number(self.weight_decay) and self.weight_decay >= 0)
        _check(self, wanted)


PLAIN = Plain()

RECIPES: dict[str, type[RecipeOptions]] = {"plain": Plain, "critic": Critic, "process-reward": ProcessReward}


def recipe_name(options: RecipeOptions) -> str:
    """The name in `RECIPES` of the recipe that has these options."""
    return next(name for name, kind in RECIPES.items() if kind is type(options))


def is_number(value: object) -> bool:
    """Whether it is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check(options: RecipeOptions, wanted: Mapping[str, tuple[str, bool]]) -> None:
    """ValueError for the first option that does not fit. wanted: what each should be, and whether it is."""
    for name, (what, fits) in wanted.items():
        if not fits:
            raise ValueError(f"want recipe.{name} {what}; got {getattr(options, name)!r}")


def _is_positive(value: float) -> bool:
    return is_number(value) and value > 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
