"""Options of recipes, the parts of an algorithm outside its loss, as frozen dataclasses.

One class of options per recipe; `Refill` and `Shaping` can be combined with any of them. The recipes themselves are in
`rlplus.recipe`; the options are here so that a configuration can be checked without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard, get_args

from rlplus.loss.objective import is_number

Head = Literal["language", "value"]
Schedule = Literal["binomial", "random", "linear", "cosine", "fixed"]


@dataclass(frozen=True)
class RecipeOptions:
    """Base class of the options, with the properties of a recipe that no option changes.

    in_place: whether a demonstration of the data replaces a rollout of its group.
    replays: whether demonstrations are the policy's own rollouts of earlier steps, not the data's.
    learners: the models that the recipe trains alongside the policy, by name. Each has the policy's body and the head
    of the "language" model, or a "value" head of width 1.
    """

    in_place: ClassVar[bool] = True
    replays: ClassVar[bool] = False
    learners: ClassVar[Mapping[str, Head]] = {}


@dataclass(frozen=True)
class Plain(RecipeOptions):
    """One draw of prompts, advantages of groups, one update for each mini-batch."""


@dataclass(frozen=True)
class Interleaved(RecipeOptions):
    """Updates on rollouts, and sometimes one on demonstrations of prompts that no rollout solved (ReLIFT).

    batch   demonstrations per such update
    Raises ValueError for a value that does not fit.
    """

    in_place: ClassVar[bool] = False
    batch: int = 128

    def __post_init__(self) -> None:
        _check_integer("batch", self.batch, 1)


@dataclass(frozen=True)
class Gate(RecipeOptions):
    """Demonstrations only for prompts that the policy rarely solves (SuperRL, HPT).

    solved   a prompt's demonstration is trained on if at most this many of its rollouts were solved
    keep     whether its rollouts are trained on, too
    Raises ValueError for values that do not fit.
    """

    in_place: ClassVar[bool] = False
    solved: int = 0
    keep: bool = False

    def __post_init__(self) -> None:
        _check_integer("solved", self.solved, 0)
        if not isinstance(self.keep, bool):
            raise ValueError(f"want recipe.keep true or false; got {self.keep!r}")


@dataclass(frozen=True)
class Prefix(RecipeOptions):
    """Responses that begin with the first tokens of the prompt's demonstration; the rest is sampled (UFT, Prefix-RFT).

    schedule   the share of a demonstration that begins a response. In step t, from 1 on, p(t) falls from `high` to
               `low` over `steps` steps; later there is no prefix.
               "linear", "cosine": p(t). "binomial": k of `segments` equal parts, k ~ Binomial(segments, p(t)), p by
               cosine. "random": uniform between `low` and `high`, in all steps. "fixed": likewise in all steps, evenly
               spaced from `high` to `low` over the members; `high` for a single member
    low, high, steps, segments
    members    how many rollouts of a group have a prefix; None = all. "binomial" and "random" draw once for all of them
    Raises ValueError for values that do not fit.
    """

    in_place: ClassVar[bool] = False
    schedule: Schedule = "binomial"
    low: float = 0.05
    high: float = 0.95
    steps: int = 300
    segments: int = 5
    members: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"want recipe.schedule one of {', '.join(get_args(Schedule))}; got {self.schedule!r}")
        if not (_is_share(self.low) and _is_share(self.high) and self.low <= self.high):
            raise ValueError(f"want 0 <= recipe.low <= recipe.high <= 1; got {self.low!r} and {self.high!r}")
        _check_integer("steps", self.steps, 1)
        _check_integer("segments", self.segments, 1)
        for name, readers in (("steps", ("binomial", "linear", "cosine")), ("segments", ("binomial",))):
            if self.schedule not in readers and getattr(self, name) != getattr(Prefix, name):
                raise ValueError(f"recipe.{name} belongs to schedule {' or '.join(readers)}; got {self.schedule}")
        if self.members is not None:
            _check_integer("members", self.members, 1)


@dataclass(frozen=True)
class Replay(RecipeOptions):
    """Correct rollouts of earlier steps as members of groups, in the place of demonstrations (ExGRPO).

    share   of a step's prompts, at most, that are earlier ones, which were solved in part
    start   both keeping and replaying begin after the first step of which more than this share was correct
    Raises ValueError for values that do not fit.
    """

    in_place: ClassVar[bool] = False
    replays: ClassVar[bool] = True
    share: float = 0.5
    start: float = 0.35

    def __post_init__(self) -> None:
        for name in ("share", "start"):
            if not _is_share(value := getattr(self, name)):
                raise ValueError(f"want recipe.{name} a number in [0, 1]; got {value!r}")


@dataclass(frozen=True)
class Critic(RecipeOptions):
    """PPO: a value model of the policy's size estimates the value of each state; every token has its own advantage.

    gamma, gae_lambda   parameters of generalized advantage estimation; with 1 and 1, A_t = reward - V_t
    whiten              scale advantages to mean 0 and variance 1 over the tokens of the batch
    stopped_only        give a response that was cut at the length limit the reward 0
    critic_updates      optimizer steps of the value model per step, each on an equal part of the step's samples
    value_clip          how far a value may move from its value at the start of the step before its loss is clipped
    lr, warmup_steps    of the value model's optimizer. After the warm-up its lr is constant: train.lr_schedule,
                        lr_min_ratio and warmup_ratio do not apply. Its other settings are those of `train`
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
    """PRIME: a second language model is trained to predict outcomes, which are rewards in [0, 1].

    A token's reward is its logprob under that model minus the reference's. It is trained on each step's samples, in
    the policy's mini-batches.

    update                    when it is trained: "after" it has scored the samples, as in PRIME's own code, or
                              "before", as in verl's recipe. A step that fails after this training cannot be redone
    beta                      in its loss, beta times the sum of a response's scores is the logit of a right answer
    lr, warmup_steps, grad_clip, weight_decay
                              of its optimizer, whose lr is constant after the warm-up; other settings as in `train`
    Raises ValueError for a value that does not fit.
    """

    learners: ClassVar[Mapping[str, Head]] = {"process": "language"}

    update: Literal["after", "before"] = "after"
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
        wanted["update"] = ("after or before", self.update in ("after", "before"))
        _check(self, wanted)


PLAIN = Plain()

RECIPES: dict[str, type[RecipeOptions]] = {
    "plain": Plain,
    "interleaved": Interleaved,
    "gate": Gate,
    "prefix": Prefix,
    "critic": Critic,
    "process-reward": ProcessReward,
    "replay": Replay,
}


def recipe_name(options: RecipeOptions) -> str:
    """The name in `RECIPES` of the recipe that has these options."""
    return next(name for name, kind in RECIPES.items() if kind is type(options))


def _check_integer(name: str, value: object, least: int) -> None:
    if not _is_integer(value) or value < least:
        raise ValueError(f"want recipe.{name} an integer >= {least}; got {value!r}")


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


@dataclass(frozen=True)
class Refill:
    """Drop groups outside the bounds and draw more prompts until `prompts_per_step` groups are left.

    low, high   a group is kept if its rollouts' rewards are not all equal and their mean is in [low, high]. DAPO's
                dynamic sampling (arXiv 2503.14476, eq. 11) has 0 and 1, PRIME's filter (arXiv 2502.01456) .2 and .8
    max_draws   at most so many draws
    fill        if these are not enough, the first of the dropped groups fill the step, as in verl's recipe of PRIME;
                else the run stops, as in DAPO's code. (PRIME's own code draws without limit, and keeps what is left
                over for the next step)
    Raises ValueError for values that do not fit.
    """

    low: float = 0.0
    high: float = 1.0
    max_draws: int = 10
    fill: bool = False

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high) and self.low <= self.high):
            raise ValueError(f"want refill.low <= refill.high, finite numbers; got {self.low!r} and {self.high!r}")
        if not is_number(self.max_draws) or self.max_draws < 1 or not isinstance(self.max_draws, int):
            raise ValueError(f"want refill.max_draws an integer >= 1; got {self.max_draws!r}")
        if not isinstance(self.fill, bool):
            raise ValueError(f"want refill.fill true or false; got {self.fill!r}")

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards is kept."""
        return len(set(rewards)) > 1 and self.low <= sum(rewards) / len(rewards) <= self.high


@dataclass(frozen=True)
class Shaping:
    """Changes to the grader's reward before advantages are computed. Metrics and `Refill` use the unchanged reward.

    wrong      the reward of a wrong answer: r becomes wrong + (1 - wrong) r
    overlong   DAPO's soft penalty (arXiv 2503.14476, eq. 13) on rollouts that end in the last part of the length limit,
               of which this is the share: it falls linearly from 0 to -1 at the limit. 0 = off
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
        """The shaped reward of a response of `length` tokens, with a length limit of `limit`."""
        shaped = self.wrong + (1 - self.wrong) * reward
        buffer = self.overlong * limit
        return shaped + min((limit - buffer - length) / buffer, 0.0) if buffer else shaped


def _check(options: RecipeOptions, wanted: Mapping[str, tuple[str, bool]]) -> None:
    """ValueError for the first invalid option. wanted: for each option what it should be, and whether it is."""
    for name, (what, fits) in wanted.items():
        if not fits:
            raise ValueError(f"want recipe.{name} {what}; got {getattr(options, name)!r}")


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
