"""The sections of a run's configuration and every check that needs nothing but the configuration.

Lengths are in tokens, times in seconds. Relative paths start at the current directory, wherever the YAML file is; `~`
is the home folder. Types are strict: nothing is converted except an integer where a float is wanted.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from rlplus.config.algorithm import AlgorithmConfig
from rlplus.config.base import (
    MANY,
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
from rlplus.config.data import DataConfig
from rlplus.config.ignored import ignored_keys
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


class RewardConfig(Section):
    """Exactly one of `kind` and `function` ("module:name", called with the response's text and the answer).

    `pattern`: one group; the last match in the text is what exact_match compares. `require_think`: only the text after
    the last `</think>` counts, and a response without one is worth 0. `workers`: processes per rank. `timeout_s`: the
    CPU time that one may spend on a response, in seconds, children included; ten times that by the wall clock.
    `memory_mb`: limit of a worker's address space. `on_failure`: when the grader fails twice on a response (timeout,
    crash), leave it out of the loss and of its group's statistics ("mask"), take its reward for 0 ("zero") or end the
    run ("error").
    """

    kind: Literal["exact_match", "math_verify"] | None = None
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    pattern: Pattern | None = None
    require_think: bool = False
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    timeout_s: Seconds = 10.0
    memory_mb: Annotated[int, Field(ge=256, le=2**40)] = 2048
    on_failure: Literal["mask", "zero", "error"] = "mask"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind is None) == (self.function is None):
            raise ValueError(f"want exactly one of kind and function; got {'neither' if self.kind is None else 'both'}")
        if self.pattern is not None and self.kind != "exact_match":
            raise ValueError("pattern belongs to kind exact_match, and would be ignored here: leave it out")
        return self


class CheckpointConfig(Section):
    """`every`: steps between two checkpoints, 0 = only at the end. `keep`: how many are kept."""

    every: NonNegative = 50
    keep: Count = 2


class EvaluationConfig(Section):
    """`every`: steps between two evaluations, 0 = none in training. `data`: the problems, as for training.

    `samples`: of each row, at `temperature`, for every pass@`k`. Rows with the same benchmark, prompt and answer are
    one problem, whose samples add up.
    """

    data: DataConfig | None = None
    every: NonNegative = 0
    samples: Moderate = 32
    k: list[Count] = [1]
    temperature: Temperature = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"want at least one k, and none above samples; got k {self.k}, samples {self.samples}")
        if self.every and self.data is None:
            raise ValueError(f"every is {self.every} but there is no data: give evaluation.data")
        return self


class Config(Section):
    """One run. `output_dir` receives the metrics, checkpoints and the final model."""

    output_dir: PathText
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def needs_engine(self) -> bool:
        """Whether a training samples: for its steps, or for an evaluation between them."""
        return self.algorithm.resolve().demonstrations != "only" or self.evaluation.every > 0

    @property
    def max_demonstration_length(self) -> int:
        """Longest demonstration, its end token counted."""
        return self.data.max_demonstration_length or self.rollout.max_response_length

    @property
    def max_sample_length(self) -> int:
        """Longest prompt and response, or prompt and demonstration, that the trainer can meet."""
        demonstrations = self.algorithm.resolve().demonstrations != "none"
        longest = max(self.rollout.max_response_length, self.max_demonstration_length if demonstrations else 0)
        return self.data.max_prompt_length + longest

    @property
    def max_generation_length(self) -> int:
        """Longest prompt and response that the rollout engine can meet, evaluation included."""
        data = [self.data] if self.evaluation.data is None else [self.data, self.evaluation.data]
        return max(part.max_prompt_length for part in data) + self.rollout.max_response_length

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        algorithm = self.algorithm.resolve()
        if algorithm.demonstrations != "none" and self.data.demonstration is None:
            problems.append(f"algorithm.preset {self.algorithm.preset} uses demonstrations: want data.demonstration")
        if algorithm.demonstrations in ("group", "apart") and self.rollout.group_size < 2:
            problems.append(
                f"algorithm.preset {self.algorithm.preset} gives one place of each group to a demonstration: "
                f"want rollout.group_size >= 2; got {self.rollout.group_size}"
            )
        if self.train.overlap and self.rollout.mode == "colocated":
            problems.append(
                "train.overlap generates while the policy trains: want rollout.mode process or server; got colocated"
            )
        if self.rollout.mode == "colocated" and self.rollout.tensor_parallel_size > 1 and self.evaluation.every:
            problems.append(
                "evaluation.every: ranks evaluate at their own pace, but a colocated engine with "
                f"rollout.tensor_parallel_size {self.rollout.tensor_parallel_size} needs several at once; evaluate "
                "afterwards, or want rollout.mode process"
            )
        if self.train.overlap and algorithm.objective.mismatch_cap is not None:
            problems.append(
                "algorithm.objective.mismatch_cap: no use with train.overlap, whose old policy is the engine's"
            )
        if algorithm.ratio_level == "sequence" and algorithm.objective.internal not in ("clip", "ratio"):
            problems.append(
                "algorithm.ratio_level sequence: want algorithm.objective.internal clip or ratio, which are functions "
                f"of the ratio alone; got {algorithm.objective.internal}"
            )
        if self.train.overlap and self.train.sequence_parallel > 1:
            problems.append(
                f"train.overlap does not support train.sequence_parallel > 1; got {self.train.sequence_parallel}"
            )
        if self.train.sequence_parallel > 1 and self.model.attention == "eager":
            problems.append("train.sequence_parallel wants model.attention sdpa or flash_attention_2; got eager")
        problems += self._size_problems()
        evaluated = self.data if self.evaluation.data is None else self.evaluation.data
        if evaluated.response_prefix != self.data.response_prefix:
            problems.append(
                "evaluation.data.response_prefix: want data.response_prefix, with which every response is graded, "
                f"{self.data.response_prefix!r}; got {evaluated.response_prefix!r}"
            )
        problems += ignored_keys(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _size_problems(self) -> Iterator[str]:
        """Samples that are too long for a micro-batch or the model, or too many for a step."""
        parallel, budget = self.train.sequence_parallel, self.train.tokens_per_micro_batch
        if self.max_sample_length > budget * parallel:
            ranks = f" on each of {parallel} ranks" if parallel > 1 else ""
            yield (
                f"the longest prompt and response have {self.max_sample_length} tokens together: "
                f"want train.tokens_per_micro_batch at least that; got {budget}{ranks}"
            )
        longest = max(self.max_sample_length, self.max_generation_length)
        scratch = self.model.scratch
        if scratch is not None and longest > scratch.max_position_embeddings:
            yield (
                f"the longest prompt and response have {longest} tokens together: "
                f"want model.scratch.max_position_embeddings at least that; got {scratch.max_position_embeddings}"
            )
        prompts, group = self.train.prompts_per_step, self.rollout.group_size
        if prompts * group > MANY:
            yield f"want train.prompts_per_step times rollout.group_size at most {MANY}; got {prompts} times {group}"

    def to_yaml(self) -> str:
        """Every value, defaults included; `load_config` reads it back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
