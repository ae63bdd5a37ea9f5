"""The settings that a recipe's options may read of a run; `rlplus.train.config`, a layer above, has them."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlplus.train.algorithm.presets import Algorithm


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
