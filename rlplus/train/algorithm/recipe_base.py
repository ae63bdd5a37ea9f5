"""The base class of the options of recipes, and the settings of a run that they may read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from rlplus.common.section import Section

if TYPE_CHECKING:
    from rlplus.train.algorithm.presets import Algorithm

HeadKind = Literal["language", "value"]


class Cost(NamedTuple):
    """The work of a step beyond the plain recipe's, as `rlplus plan` counts it."""

    own_demonstrations: bool = True  # samples of their own; otherwise responses begin with parts of them
    updates: int = 0  # the policy's, at most, besides the ones on rollouts
    batch: int = 0  # samples in each of these
    learner_updates: int | None = None  # each learner's; None = as many as the policy's
    learner_passes: int = 0  # forward passes over a step's samples, besides the learners' updates
    references: int = 0  # copies of the first model that learners need


class _Algorithm(Protocol):
    preset: str
    objective: dict[str, Any]

    def resolve(self) -> "Algorithm": ...


class _Data(Protocol):
    demonstration: str | None
    teacher_topk: str | None


class _Model(Protocol):
    @property
    def lora(self) -> object: ...


class _Rollout(Protocol):
    group_size: int
    max_response_length: int
    temperature: float
    top_k: int
    function: str | None

    @property
    def environment(self) -> object: ...


class _Train(Protocol):
    prompts_per_step: int
    overlap: int
    sequence_parallel: int
    shard_head: bool

    @property
    def backend(self) -> str: ...
    @property
    def zero_stage(self) -> int: ...


class RunSettings(Protocol):
    """The configuration as `problems` gets it. A recipe that reads a further setting adds it here."""

    @property
    def algorithm(self) -> _Algorithm: ...
    @property
    def data(self) -> _Data: ...
    @property
    def model(self) -> _Model: ...
    @property
    def rollout(self) -> _Rollout: ...
    @property
    def train(self) -> _Train: ...
    @property
    def max_demonstration_length(self) -> int: ...


class RecipeOptions(Section):
    """Base class of the options, with what a configuration must know of a recipe without importing it.

    in_place: whether a demonstration of the data replaces a rollout of its group.
    replays: whether demonstrations are the policy's own rollouts of earlier steps, not the data's.
    learners: the models that the recipe trains alongside the policy, by name. Each has the policy's body and the head
    of the "language" model, or a "value" head of width 1.
    own_advantages: whether advantages do not come from rewards by `algorithm.advantage`.
    weighs_tokens: whether the loss of each token is weighed by what the policy says of it before the update: one more
    forward pass.
    """

    in_place: ClassVar[bool] = True
    replays: ClassVar[bool] = False
    learners: ClassVar[Mapping[str, HeadKind]] = {}
    own_advantages: ClassVar[bool] = False
    weighs_tokens: ClassVar[bool] = False

    name: str

    @property
    def own_loss(self) -> str:
        """The loss of rollouts if it is not the objective's; else empty."""
        return ""

    @property
    def teacher_model(self) -> str | None:
        """The folder or hub name of a frozen model beside the policy."""
        return None

    @property
    def teacher_server(self) -> str | None:
        """The address of a server with a frozen teacher."""
        return None

    @property
    def stored_teacher(self) -> str | None:
        """The folder with a frozen teacher's head and its hidden states."""
        return None

    @property
    def topk(self) -> int:
        """Number of a teacher's likeliest tokens, from such a server or the data, for a loss of its own; 0 = none."""
        return 0

    @property
    def copied_teacher(self) -> bool:
        """Whether the teacher begins as the model that the run starts from, and is not the policy as it is now."""
        return False

    @property
    def averaged_teacher(self) -> bool:
        """Whether this teacher follows the policy, by an average that a checkpoint has."""
        return False

    @property
    def demonstration_prompt(self) -> str:
        """The form of a prompt that shows a teacher the demonstration, or another response; empty without."""
        return ""

    @property
    def shows_responses(self) -> bool:
        """Whether this prompt shows another response of the group. Otherwise the demonstration has to be known."""
        return False

    @property
    def no_update(self) -> str:
        """Why a step may have no token with a gradient."""
        return "the rewards in each group are equal"

    @property
    def trains_demonstrations(self) -> bool:
        """Whether what is demonstrated has a loss."""
        return True

    @property
    def unsolved_only(self) -> bool:
        """Whether only prompts that no rollout solved have demonstrations."""
        return False

    def problems(self, config: RunSettings) -> Iterator[str]:
        """Reasons why a run cannot use the recipe with its other settings."""
        yield from ()

    def refusals(self, examples: Sequence[Any]) -> Iterator[str]:
        """Reasons why a run cannot train on these prompts. examples: a list of `rlplus.train.data.Example`."""
        yield from ()

    @property
    def cost(self) -> Cost:
        """The work that a plan adds to the plain recipe's."""
        return Cost()
