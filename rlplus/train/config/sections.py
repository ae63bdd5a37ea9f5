"""The sections of a run's configuration, each with the checks that need no other section.

Lengths are in tokens, times in seconds. Relative paths start at the current directory, wherever the YAML file is; `~`
is the home folder. Types are strict: nothing is converted except an integer where a float is wanted.
"""

import re
from math import isfinite
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from rlplus.common.errors import hint
from rlplus.common.section import (
    GREEDY,
    REFERENCE,
    Count,
    Moderate,
    NonNegative,
    PathText,
    Pattern,
    Positive,
    Reference,
    Seconds,
    Section,
    TemperatureOrGreedy,
    Text,
)
from rlplus.train.config.algorithm_section import AlgorithmConfig
from rlplus.train.config.benchmarks import BENCHMARKS
from rlplus.train.config.data_section import DataConfig
from rlplus.train.config.rollout_section import RolloutConfig
from rlplus.train.config.train_section import TrainConfig


class ScratchModel(Section):
    """A Qwen2 with random weights and a byte-level tokenizer, made on the spot; sizes as in Qwen2's configuration."""

    hidden_size: Moderate = 64
    """Width of the hidden states, a multiple of 2 * heads."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of layers."""
    heads: Moderate = 2
    """Attention heads."""
    intermediate_size: Moderate = 192
    """Width inside the MLPs."""
    initializer_range: Positive = 0.12  # the usual 0.02 learns nothing within minutes at a width of 64
    """Standard deviation of the weights."""
    max_position_embeddings: Count = 4096
    """Longest sequence."""

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

    The exported model gets the merged weights, and the rollout engine what `rollout.lora` says.
    """

    rank: Moderate = 16
    """Rank of B A."""
    alpha: Positive = 32.0
    """Scale of B A, see above."""
    target_modules: Literal["all-linear"] | list[Text] = "all-linear"
    """Names of linear layers, or "all-linear" for all but the head."""
    quantization: Literal["nf4"] | None = None
    """Type of the frozen weights of all linear layers but the head. nf4: about 4.13 bits each (QLoRA, by bitsandbytes),
    with ZeRO 1 and 2; None = model.dtype."""


class ModelConfig(Section):
    """One of `path` and `scratch`, and how it is run."""

    path: PathText | None = None
    """A folder, or a name on the Hugging Face hub."""
    scratch: ScratchModel | None = None
    """Random weights, in place of path."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """The implementation, by transformers' name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights; the optimizer's are fp32."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs, and run each layer again in the backward pass."""
    liger: bool = False
    """Liger's RMSNorm, rotary embedding and SwiGLU in place of the model's own; needs CUDA and liger-kernel."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights."""
    trust_remote_code: bool = False
    """Run the code that comes with the model."""
    chat_template: Text | None = None
    """A Jinja template, as text or as a file's name, in place of the tokenizer's; it is exported with the model. None =
    the tokenizer's."""
    end_tokens: Annotated[list[Text | NonNegative], Field(min_length=1)] | None = None
    """Tokens that end a response, as texts or ids. Demonstrations end in the first, if the chat template's and the
    tokenizer's are not among them. None = those that chat template, generation_config.json and tokenizer name."""
    overrides: dict[str, Any] = {}
    """Fields of the Hugging Face configuration."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError(f"want exactly one of path and scratch; got {'neither' if self.path is None else 'both'}")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention flash_attention_2 computes in half precision: want dtype bfloat16; got float32")
        return self


MathKind = Literal["math_verify", "math_verify_box", "math_verify_strict", "oat"]
RewardKind = Literal["exact_match", "choice", "code", MathKind]
_KINDS = get_args(RewardKind)


class RewardConfig(Section):
    """Grader of responses: exactly one of `kind` and `function`."""

    kind: RewardKind | None = None
    """A grader that comes with rlplus. exact_match: equal texts. math_verify: equal values. math_verify_box: the
    last box has an equal value. math_verify_strict: and a plain one, so that 3+4 is not 7. oat: the rules of oat's
    grader. choice: the letter of multiple choice. code: a program that passes tests, in a sandbox."""
    function: Reference | list[str] | dict[str, float] | None = None
    """A function of your own, as "module:name" or "file.py:name", called with the response's text and the answer, and
    by keyword with each of data.columns that it has a parameter for. Also a list, or a mapping to weights, of functions
    and kinds: the reward is the weighted sum."""
    pattern: Pattern | None = None
    """Regular expression with one group; its last match in the text is what exact_match compares."""
    require_think: bool = False
    """Grade only the text after the last `</think>`; a response without one is worth 0."""
    cut_off: Literal["auto", "zero", "grade"] = "auto"
    """Reward of a response that was cut off at rollout.max_response_length: 0 ("zero"), or what the grader gives
    ("grade"). auto: zero by kinds, grade by functions of your own."""
    box: Literal["auto", "required", "optional"] = "auto"
    r"""Whether a response without a closed box gets the reward 0. auto: by math_verify, where the prompt has the word
    `\boxed`, since this grader takes other expressions for the answer. math_verify_box, math_verify_strict and oat read
    boxes alone, so that they give 0 without one in any case."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Worker processes per rank."""
    timeout_s: Seconds = 10.0
    """CPU time that one may spend on a response, in seconds, children included; ten times that by the wall clock.
    With kind code a program gets half of that; a slower one counts as wrong."""
    memory_mb: Annotated[int, Field(ge=256, le=2**40)] = 2048
    """Limit of a worker's address space."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "limits"] = "auto"
    """Sandbox for kind code. auto: bubblewrap, or namespaces if it does not work; as root namespaces first. limits,
    which is opt-in: limits on time, memory, processes and output, but none on files and network."""
    on_failure: Literal["mask", "zero", "error"] = "mask"
    """Answer to a grader that fails twice on a response (timeout, crash): leave it out of the loss and of its group's
    statistics ("mask"), take its reward for 0 ("zero") or end the run ("error")."""

    @property
    def names(self) -> list[str]:
        """Names of all graders: kinds, and functions by reference."""
        named = self.kind or self.function or ""
        return [named] if isinstance(named, str) else list(named)

    @property
    def stated(self) -> "RewardConfig":
        """The same with the values that cut_off and box have by auto: two of them that mean the same are equal."""
        functions = {":" in name for name in self.names}
        cut_off = self.cut_off
        box = self.box
        if cut_off == "auto" and len(functions) == 1:
            cut_off = "grade" if True in functions else "zero"
        if box == "auto" and "math_verify" not in self.names:
            box = "optional"
        return self.model_copy(update={"cut_off": cut_off, "box": box})

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
            and all(isinstance(name, str) and (name in kinds or re.fullmatch(REFERENCE, name)) for name in names)
            and all(type(weight) in (int, float) and isfinite(weight) for weight in weights)
        ):
            wanted = (
                'want "module:name" or "file.py:name", a list of these and of kinds, or a mapping of these to weights'
            )
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
    """Checkpoints, from which a run resumes."""

    every: NonNegative = 50
    """Steps between two checkpoints; 0 = only at the end."""
    keep: Count = 2
    """Number of checkpoints that are kept."""


class EvaluationConfig(Section):
    """pass@k on problems, in training and by `rlplus eval`.

    Rows that have the same benchmark, prompt and answer, and the same `row` where data.columns has it, are one problem,
    whose samples add up.
    """

    data: DataConfig | None = None
    """Problems, in files as those for training."""
    benchmarks: list[str] = []
    """Names of known benchmarks (rlplus/train/config/benchmarks.py), each with its own grader. Their problems come from
    the hub or, with data.path, from the rows of these files that have the benchmark's name in the column
    data.benchmark."""
    math_grader: MathKind = "math_verify"
    """Grader of the mathematical benchmarks."""
    every: NonNegative = 0
    """Steps between two evaluations; 0 = none in training."""
    samples: Moderate = 32
    """Samples per row."""
    k: list[Count] = [1]
    """Each k of pass@k."""
    temperature: TemperatureOrGreedy = 1.0
    """Temperature of sampling, at least 0.01; or 0 for greedy decoding, with samples 1."""

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
                raise ValueError(f"want names from {', '.join(BENCHMARKS)}; got {name!r}{hint(name, BENCHMARKS)}")
        return names

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"want at least one k, and none above samples; got k {self.k}, samples {self.samples}")
        if self.temperature == GREEDY and self.samples != 1:
            raise ValueError(f"temperature 0 is greedy, all samples would be equal: want samples 1; got {self.samples}")
        if self.every and self.data is None:
            raise ValueError(f"every is {self.every} but there is no data: give the files of problems, or benchmarks")
        if self.data is not None and not self.data.paths and not self.benchmarks:
            raise ValueError("data has no path: want one, or benchmarks, which have sources of their own")
        if self.data is not None and self.data.paths and len(self.benchmarks) > 1 and self.data.benchmark is None:
            raise ValueError("want data.benchmark, the column that names the benchmark of a row; got none")
        return self


class ValidationConfig(EvaluationConfig):
    """Choice of the best checkpoint, by the mean reward on problems that are neither trained on nor a test set.

    It is kept beside the newest ones, and saved whatever checkpoint.every says.
    """

    samples: Moderate = 4
    """Samples per row."""
    patience: Count | None = None
    """The run ends early after so many validations in a row that are not better than the best one before; None = it
    does not."""
    allow_test_benchmarks: bool = False
    """Let a known test benchmark choose the checkpoint; reports then say so."""


TRACKERS = ("wandb", "trackio")  # packages, and keys of LogConfig


class LogConfig(Section):
    """Samples kept to be read, and live trackers, which get the metrics beside metrics.jsonl and TensorBoard."""

    samples_every: NonNegative = 10
    """Interval in steps at which samples are kept in output_dir/samples, besides the first step's; 0 = none, also of
    evaluations in the run. `rlplus eval` keeps its own in any case."""
    sample_groups: Count = 2
    """Number of groups of such a step that are kept."""
    wandb: Text | None = None
    """Project of Weights & Biases; needs `pip install -e ".[wandb]"`. With WANDB_MODE=offline it stays on disk."""
    trackio: Text | None = None
    """Project of Trackio; needs `pip install -e ".[trackio]"`. It stays on disk unless TRACKIO_SPACE_ID is set."""


class Sections(Section):
    """One run, whose sections may still contradict each other."""

    output_dir: PathText
    """Folder that receives the metrics, checkpoints and the final model."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
