"""The sections of a run's configuration, each with the checks that need no other section.

Lengths are in tokens, times in seconds. Relative paths start at the current directory, wherever the YAML file is; `~`
is the home folder. Types are strict: nothing is converted except an integer where a float is wanted.
"""

import re
from math import isfinite
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from rlplus.config.algorithm import AlgorithmConfig
from rlplus.config.base import (
    Count,
    Moderate,
    NonNegative,
    PathText,
    Pattern,
    Positive,
    Seconds,
    Section,
    Temperature,
    Text,
)
from rlplus.config.benchmarks import BENCHMARKS
from rlplus.config.data import DataConfig
from rlplus.config.rollout import RolloutConfig
from rlplus.config.train import TrainConfig


class ScratchModel(Section):
    """A Qwen2 with random weights and a byte-level tokenizer, made on the spot.

    hidden_size, layers, heads, intermediate_size, initializer_range (standard deviation of the weights),
    max_position_embeddings: as in Qwen2's own configuration.
    """

    hidden_size: Moderate = 64
    layers: Annotated[int, Field(ge=1, le=1000)] = 2
    heads: Moderate = 2
    intermediate_size: Moderate = 192
    initializer_range: Positive = 0.12  # at 64 wide, the usual 0.02 learns nothing within minutes
    max_position_embeddings: Count = 4096

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"want hidden_size a multiple of 2 * heads (rotary embeddings turn pairs); "
                f"got hidden_size {self.hidden_size}, heads {self.heads}"
            )
        return self


class LoraConfig(Section):
    """Train adapters of low rank instead of the weights: each chosen W becomes W + alpha / rank * B A.

    `target_modules`: names of linear layers, or "all-linear" for all but the head. The rollout engine and the exported
    model get the merged weights.
    """

    rank: Moderate = 16
    alpha: Positive = 32.0
    target_modules: Literal["all-linear"] | list[Text] = "all-linear"


class ModelConfig(Section):
    """One of `path` (a folder, or a name on the Hugging Face hub) and `scratch` (random weights).

    attention               the implementation, by transformers' name
    dtype                   of the weights; the optimiser's are fp32
    gradient_checkpointing  keep only the layers' inputs, and run each layer again in the backward pass
    liger                   Liger's RMSNorm, rotary embedding and SwiGLU in place of the model's own; needs CUDA and
                            liger-kernel
    lora                    train adapters instead of the weights
    trust_remote_code       run the code that comes with the model
    chat_template           a Jinja template, as text or as a file's name, in place of the tokenizer's; it is exported
                            with the model. None = the tokenizer's
    overrides               fields of the Hugging Face configuration
    """

    path: PathText | None = None
    scratch: ScratchModel | None = None
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    liger: bool = False
    lora: LoraConfig | None = None
    trust_remote_code: bool = False
    chat_template: Text | None = None
    overrides: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError(f"want exactly one of path and scratch; got {'neither' if self.path is None else 'both'}")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention flash_attention_2 computes in half precision: want dtype bfloat16; got float32")
        return self


_FUNCTION = re.compile(r"[\w.]+:\w+")
MathKind = Literal["math_verify", "math_verify_strict", "oat"]
RewardKind = Literal["exact_match", "choice", "code"] | MathKind
_KINDS = ("exact_match", "choice", "code", *get_args(MathKind))


class RewardConfig(Section):
    """Exactly one of `kind` and `function`.

    kind           exact_match: equal texts. math_verify: equal values. math_verify_strict: of these only a plain value
                   in the last box, so that 3+4 is not 7. oat: as oat's grader. choice: the letter of multiple choice.
                   code: a program that passes tests, in a sandbox
    function       "module:name", called with the response's text and the answer, and by name with those of data.columns
                   that it has parameters for. Also a list, or a mapping to weights, of functions and kinds: the reward
                   is the weighted sum
    pattern        one group; the last match in the text is what exact_match compares
    require_think  only the text after the last `</think>` counts, and a response without one is worth 0
    workers        processes per rank
    timeout_s      the CPU time that one may spend on a response, in seconds, children included; ten times that by the
                   wall clock. A program of kind code has half of it, and is then wrong
    memory_mb      limit of a worker's address space
    sandbox        of kind code: auto takes the first of bubblewrap and namespaces that works. limits, which must be
                   asked for, limits time, memory, processes and output, but neither files nor network
    on_failure     when the grader fails twice on a response (timeout, crash), leave it out of the loss and of its
                   group's statistics ("mask"), take its reward for 0 ("zero") or end the run ("error")
    """

    kind: RewardKind | None = None
    function: str | list[str] | dict[str, float] | None = None
    pattern: Pattern | None = None
    require_think: bool = False
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    timeout_s: Seconds = 10.0
    memory_mb: Annotated[int, Field(ge=256, le=2**40)] = 2048
    sandbox: Literal["auto", "bubblewrap", "namespaces", "limits"] = "auto"
    on_failure: Literal["mask", "zero", "error"] = "mask"

    @property
    def names(self) -> list[str]:
        """Of all that grades: kinds, and functions as "module:name"."""
        named = self.kind or self.function or ""
        return [named] if isinstance(named, str) else list(named)

    @property
    def description(self) -> str:
        """The names, with their weights where there are several."""
        if not isinstance(self.function, dict):
            return " + ".join(self.names)
        return " + ".join(f"{weight:g} {name}" for name, weight in self.function.items())

    @field_validator("function", mode="before")
    @classmethod
    def _check_function(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) or value is None else value
        weights = list(value.values()) if isinstance(value, dict) else []
        kinds = () if isinstance(value, str) else _KINDS  # alone, a kind has a key of its own
        if value is not None and not (
            isinstance(names, list | dict)
            and names
            and all(isinstance(name, str) and (name in kinds or _FUNCTION.fullmatch(name)) for name in names)
            and all(type(weight) in (int, float) and isfinite(weight) for weight in weights)
        ):
            wanted = 'want "module:name", a list of these and of kinds, or a mapping of these to weights'
            raise ValueError(f"{wanted}; got {value!r}")
        return dict(zip(value, map(float, weights), strict=True)) if weights else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind is None) == (self.function is None):
            raise ValueError(f"want exactly one of kind and function; got {'neither' if self.kind is None else 'both'}")
        if self.pattern is not None and "exact_match" not in self.names:
            raise ValueError("pattern belongs to kind exact_match, and would be ignored here: leave it out")
        return self


class CheckpointConfig(Section):
    """`every`: steps between two checkpoints, 0 = only at the end. `keep`: how many are kept."""

    every: NonNegative = 50
    keep: Count = 2


class EvaluationConfig(Section):
    """`every`: steps between two evaluations, 0 = none in training. `data`: the problems, as for training.

    `benchmarks`: names of known ones (rlplus/config/benchmarks.py), each with its own grader; they come from the hub,
    or, where data.path is given, are the rows of these files that data.benchmark gives their name. `math_grader`: of
    the mathematical ones. `samples`: of each row, at `temperature`, for every pass@`k`. Rows with the same benchmark,
    prompt and answer are one problem, whose samples add up.
    """

    data: DataConfig | None = None
    benchmarks: list[str] = []
    math_grader: MathKind = "math_verify"
    every: NonNegative = 0
    samples: Moderate = 32
    k: list[Count] = [1]
    temperature: Temperature = 1.0

    @model_validator(mode="before")
    @classmethod
    def _benchmarks_have_data(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("benchmarks") and value.get("data") is None:
            return value | {"data": {}}
        return value

    @field_validator("benchmarks")
    @classmethod
    def _check_benchmarks(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in BENCHMARKS:
                raise ValueError(f"want names from {', '.join(BENCHMARKS)}; got {name!r}")
        return names

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"want at least one k, and none above samples; got k {self.k}, samples {self.samples}")
        if self.every and self.data is None:
            raise ValueError(f"every is {self.every} but there is no data: give evaluation.data")
        if self.data is not None and not self.data.paths and not self.benchmarks:
            raise ValueError("data has no path: want one, or benchmarks, which have sources of their own")
        if self.data is not None and self.data.paths and len(self.benchmarks) > 1 and self.data.benchmark is None:
            raise ValueError("want data.benchmark, the column that says of which benchmark a row is; got none")
        return self


class Sections(Section):
    """One run, whose sections may still contradict each other."""

    output_dir: PathText
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
