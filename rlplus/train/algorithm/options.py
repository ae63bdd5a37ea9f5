"""Options of recipes, the parts of an algorithm outside its loss: a union of sections, chosen by `name`.

`Refill` and `Shaping` can be combined with any of them. The recipes themselves are in `rlplus.train.recipe`; the
options are here so that a configuration can be checked without torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from rlplus.common.errors import hint
from rlplus.common.lazy import import_function
from rlplus.common.section import Count, Fraction, NonNegative, Positive, Section
from rlplus.train.algorithm.distillation_options import Distill, SelfDistill
from rlplus.train.algorithm.recipe_base import Cost, HeadKind, RecipeOptions, RunSettings

Finite = Annotated[float, Field(allow_inf_nan=False)]
Exponent = Annotated[float, Field(ge=-4, le=4)]  # the entropy of 2^18 tokens is 12.5, of which e^50 fits fp32
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Plain(RecipeOptions):
    """One draw of prompts, advantages of groups, one update for each mini-batch."""

    name: Literal["plain"] = "plain"


class Interleaved(RecipeOptions):
    """Updates on rollouts, and sometimes one on demonstrations of prompts that no rollout solved (ReLIFT)."""

    in_place: ClassVar[bool] = False

    name: Literal["interleaved"] = "interleaved"
    batch: Count = 128
    """Demonstrations in an update on them."""

    @property
    def unsolved_only(self) -> bool:
        return True

    @property
    def cost(self) -> Cost:
        return Cost(updates=1, batch=self.batch)


class Gate(RecipeOptions):
    """Demonstrations only for prompts that the policy rarely solves (SuperRL, HPT)."""

    in_place: ClassVar[bool] = False

    name: Literal["gate"] = "gate"
    solved: NonNegative = 0
    """A prompt's demonstration is trained on if at most this many of its rollouts were solved."""
    keep: bool = False
    """Whether the rollouts of such a prompt are trained on, too."""

    @property
    def unsolved_only(self) -> bool:
        return self.solved == 0


class _Prefixed(RecipeOptions):
    """Responses that begin with a part of the prompt's demonstration."""

    in_place: ClassVar[bool] = False

    @property
    def cost(self) -> Cost:
        return Cost(own_demonstrations=False)

    def problems(self, config: RunSettings) -> Iterator[str]:
        limit = config.rollout.max_response_length
        if config.max_demonstration_length > limit:
            yield (
                "want data.max_demonstration_length at most rollout.max_response_length, so that a token is sampled; "
                f"got {config.max_demonstration_length} and {limit}"
            )
        if config.rollout.environment is not None:
            yield "it does not support rollout.environment"


class Prefix(_Prefixed):
    """Responses that begin with the first tokens of the prompt's demonstration; the rest is sampled (UFT, Prefix-RFT).

    In step t, from 1 on, p(t) falls from `high` to `low` over `steps` steps. Of the schedules that have it only
    "window" goes on with prefixes then.
    """

    name: Literal["prefix"] = "prefix"
    schedule: Literal["binomial", "random", "window", "linear", "cosine", "fixed"] = "binomial"
    """The share of a demonstration that begins a response. "linear", "cosine": p(t). "binomial": k of `segments` equal
    parts, k ~ Binomial(segments, p(t)), p by cosine. "random": uniform between `low` and `high`, in all steps.
    "window": uniform between p(t), by cosine, and `high`; after `steps` steps as "random". "fixed": in all steps,
    evenly spaced from `high` to `low` over the members; `high` for a single member. "binomial", "random" and "window"
    draw once for all members."""
    low: Fraction = 0.05
    """Least share."""
    high: Fraction = 0.95
    """Largest share."""
    steps: Count = 300
    """Steps until p(t) has fallen to `low`."""
    segments: Count = 5
    """Parts of a demonstration, for "binomial"."""
    members: Count | None = None
    """Rollouts of a group that have a prefix; null = all."""
    trained: bool = True
    """Whether a prefix has the loss of demonstrated tokens; false: it is context only, as a prompt."""

    @property
    def trains_demonstrations(self) -> bool:
        return self.trained

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"want low <= high; got {self.low:g} and {self.high:g}")
        for name, readers in (("steps", ("binomial", "window", "linear", "cosine")), ("segments", ("binomial",))):
            if self.schedule not in readers and getattr(self, name) != Prefix.model_fields[name].default:
                raise ValueError(f"{name} belongs to schedule {' or '.join(readers)}; got {self.schedule}")
        return self

    def problems(self, config: RunSettings) -> Iterator[str]:
        yield from super().problems(config)
        group = config.rollout.group_size
        if self.members is not None and self.members > group:
            yield f"want members at most rollout.group_size {group}; got {self.members}"


class PrefixSearch(_Prefixed):
    """Prompts that too few rollouts solve are sampled again in the step, behind a part of their demonstration (BREAD).

    Bisection over the number of parts looks for a prefix with which more than `above` and less than `below` of the
    rollouts are right (reward above 0). The last group that was sampled is trained on; its prefix is context only.
    """

    name: Literal["prefix-search"] = "prefix-search"
    parts: Annotated[int, Field(ge=2)] = 10
    """Equal parts of a demonstration, in tokens; a prefix has at least one and not all. A search samples a group at
    most log2(parts) times, rounded up."""
    above: Fraction = 0.0
    """A group is sampled again if at most this share of its rollouts is right."""
    below: Fraction = 1.0
    """A group behind a prefix is sampled again, with a shorter one, if at least this share of its rollouts is right."""

    @property
    def trains_demonstrations(self) -> bool:
        return False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.above >= self.below:
            raise ValueError(f"want above < below; got {self.above:g} and {self.below:g}")
        return self

    def problems(self, config: RunSettings) -> Iterator[str]:
        yield from super().problems(config)
        size = config.rollout.group_size
        if not any(self.above < right / size < self.below for right in range(1, size)):
            yield (
                "no number of right rollouts of a group is inside above and below: want a rollout.group_size of at "
                f"least 2 and wider bounds; got {size}, {self.above:g} and {self.below:g}"
            )


class EntropyWeights(RecipeOptions):
    """Demonstrations are reinforced and imitated at once; entropies H of the policy weigh success and imitation (SRFT).

    Sampled tokens with a positive advantage have the weight positive * exp(positive_exponent * H). Demonstrated tokens
    have, besides the objective's loss, the loss -log p with the weight supervised * exp(supervised_exponent * H), as a
    mean over the update's demonstrated tokens. No gradient goes through weights.
    """

    weighs_tokens: ClassVar[bool] = True

    name: Literal["entropy-weights"] = "entropy-weights"
    signs: bool = True
    """The advantage of a rollout is 1 with a reward above 0, else -1; false: as the group's, like a demonstration's."""
    level: Literal["token", "sequence"] = "sequence"
    """H: the policy's entropy at the "token", or its mean over the response, the "sequence"."""
    positive: Positive = 0.1
    """Factor of the weight of positive advantages."""
    positive_exponent: Exponent = 1.0
    """Factor of H in that weight; 0 = the same weight for all."""
    supervised: Weight = 0.5
    """Factor of the weight of -log p; 0 = no such loss."""
    supervised_exponent: Exponent = -1.0
    """Factor of H in that weight; 0 = the same weight for all."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.supervised and self.supervised_exponent != type(self).model_fields["supervised_exponent"].default:
            raise ValueError("supervised_exponent has no effect with supervised 0")
        return self

    def problems(self, config: RunSettings) -> Iterator[str]:
        algorithm = config.algorithm.resolve()
        if not (algorithm.generates and algorithm.demonstrates):
            yield f"want a preset with rollouts and demonstrations; got {config.algorithm.preset}"
        if algorithm.external_schedule is not None:
            yield "it does not support algorithm.external_schedule"
        if algorithm.external_top_entropy < 1:
            yield "it weighs every demonstrated token by an entropy: want algorithm.external_top_entropy 1"
        if config.train.overlap:
            yield "it does not support train.overlap"


class Replay(RecipeOptions):
    """Correct rollouts of earlier steps as members of groups, in the place of demonstrations (ExGRPO)."""

    in_place: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    name: Literal["replay"] = "replay"
    share: Fraction = 0.5
    """Largest share of a step's prompts that are earlier ones, which were solved in part."""
    start: Fraction = 0.35
    """Both keeping and replaying begin after the first step of which more than this share was correct."""

    def problems(self, config: RunSettings) -> Iterator[str]:
        algorithm = config.algorithm.resolve()
        if algorithm.demonstrates and algorithm.objective.external == "none":
            yield "want a loss of what is replayed, algorithm.objective.external; got none"
        if algorithm.refill is not None:
            yield "it chooses the prompts of a step once: want algorithm.refill null"
        for key in ("function", "environment"):
            if getattr(config.rollout, key) is not None:
                yield f"it does not support rollout.{key}"


class Critic(RecipeOptions):
    """PPO: a value model of the policy's size estimates the value of each state; every token has its own advantage.

    With gamma and gae_lambda 1, A_t = reward - V_t. The value model's lr is constant after the warm-up:
    train.lr_schedule, lr_min_ratio and warmup_ratio do not apply. Its optimizer's other settings are `train`'s.
    """

    learners: ClassVar[Mapping[str, HeadKind]] = {"critic": "value"}
    own_advantages: ClassVar[bool] = True

    name: Literal["critic"] = "critic"
    gamma: Fraction = 1.0
    """Discount of generalized advantage estimation."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalized advantage estimation."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the tokens of the batch."""
    stopped_only: bool = True
    """Give a response that was cut at the length limit the reward 0, whatever reward.cut_off says; in training only."""
    critic_updates: Count = 12
    """Optimizer steps of the value model per step, each on an equal part of the step's samples."""
    value_clip: Positive = 0.2
    """Distance from a value's start in the step at which its loss is clipped."""
    lr: Positive = 5e-6
    """Learning rate of the value model."""
    warmup_steps: NonNegative = 50
    """Its steps of linear warm-up."""

    def problems(self, config: RunSettings) -> Iterator[str]:
        samples = config.train.prompts_per_step * config.rollout.group_size
        if self.critic_updates > samples:
            yield f"want critic_updates at most the {samples} samples of a step; got {self.critic_updates}"

    @property
    def cost(self) -> Cost:
        return Cost(learner_updates=self.critic_updates, learner_passes=1)  # the pass for values


class ProcessReward(RecipeOptions):
    """PRIME: a second language model is trained to predict outcomes, which are rewards in [0, 1].

    A token's reward is its logprob under that model minus the reference's. It is trained on each step's samples, in
    the policy's mini-batches. Its lr is constant after the warm-up; `train` has its other settings.
    """

    learners: ClassVar[Mapping[str, HeadKind]] = {"process": "language"}
    own_advantages: ClassVar[bool] = True

    name: Literal["process-reward"] = "process-reward"
    update: Literal["after", "before"] = "after"
    """When it is trained: "after" it has scored the samples, as in PRIME's own code, or "before", as in verl's recipe.
    A step that fails after this training cannot be redone."""
    beta: Positive = 0.05
    """Factor in its loss: beta times the sum of a response's scores is the logit of a right answer."""
    lr: Positive = 1e-6
    """Its learning rate."""
    warmup_steps: NonNegative = 0
    """Its steps of linear warm-up."""
    grad_clip: Positive = 10.0
    """Its gradient's largest norm; a larger one is scaled down."""
    weight_decay: Weight = 0.0
    """AdamW's weight decay for it."""

    def problems(self, config: RunSettings) -> Iterator[str]:
        algorithm = config.algorithm.resolve()
        if algorithm.shaping is not None:
            yield "it learns outcomes in [0, 1]: want algorithm.shaping null"
        if algorithm.reward_kl_coef and algorithm.generates:
            yield "it does not support algorithm.reward_kl_coef"

    @property
    def cost(self) -> Cost:
        return Cost(learner_passes=3, references=1)  # scores, the reference's logprobs for these and for the updates


PLAIN = Plain()
AnyRecipe = (
    Plain
    | Interleaved
    | Gate
    | Prefix
    | PrefixSearch
    | EntropyWeights
    | Critic
    | ProcessReward
    | Replay
    | Distill
    | SelfDistill
)
RECIPES: dict[str, type[RecipeOptions]] = {kind.model_fields["name"].default: kind for kind in get_args(AnyRecipe)}


def recipe_options(name: object) -> type[RecipeOptions]:
    """The options of the recipe with that name: one of `RECIPES`, "file.py:Class" or "module:Class". ValueError."""
    text = str(name)
    if text in RECIPES:
        return RECIPES[text]
    if ":" not in text:
        raise ValueError(f"want one of {', '.join(RECIPES)}, or file.py:Class; got {name!r}{hint(text, RECIPES)}")
    try:
        recipe = import_function(text)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"want file.py:Class or module:Class of a recipe; got {text}: {error}") from error
    options = getattr(recipe, "Options", None)
    if not (isinstance(options, type) and issubclass(options, RecipeOptions)):
        raise ValueError(f"want a subclass of rlplus.train.recipe.Recipe; {text} is {recipe!r}")
    return options


class Refill(Section):
    """Drop groups outside the bounds and draw more prompts until `prompts_per_step` groups are left.

    A group is kept if its rollouts' rewards are not all equal and their mean is in [low, high]. DAPO's dynamic sampling
    (arXiv 2503.14476, eq. 11) has 0 and 1, PRIME's filter (arXiv 2502.01456) .2 and .8.
    """

    low: Finite = 0.0
    """Least mean reward of a group that is kept."""
    high: Finite = 1.0
    """Largest mean reward of a group that is kept."""
    max_draws: Count = 10
    """Draws of a step, at most."""
    fill: bool = False
    """If these are not enough, whether the first of the dropped groups fill the step, as in verl's recipe of PRIME;
    else the run stops, as in DAPO's code. (PRIME's own code draws without limit, and keeps what is left over for the
    next step.)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"want low <= high; got {self.low:g} and {self.high:g}")
        return self

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards is kept."""
        return len(set(rewards)) > 1 and self.low <= sum(rewards) / len(rewards) <= self.high


class Shaping(Section):
    """Changes to the grader's reward before advantages are computed. Metrics and `Refill` use the unchanged reward."""

    wrong: Annotated[float, Field(lt=1, allow_inf_nan=False)] = 0.0
    """The reward of a wrong answer: r becomes wrong + (1 - wrong) r."""
    overlong: Fraction = 0.0
    """DAPO's soft penalty (arXiv 2503.14476, eq. 13) on rollouts that end in the last part of the length limit, of
    which this is the share: it falls linearly from 0 to -1 at the limit. 0 = off."""

    def reward(self, reward: float, length: int, limit: int) -> float:
        """The shaped reward of a response of `length` tokens, with a length limit of `limit`."""
        shaped = self.wrong + (1 - self.wrong) * reward
        buffer = self.overlong * limit
        return shaped + min((limit - buffer - length) / buffer, 0.0) if buffer else shaped
