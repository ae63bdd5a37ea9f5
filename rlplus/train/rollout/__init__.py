"""Rollouts: token ids of prompts in, sampled responses with their logprobs out, behind one protocol.

Two engines: `vllm` (the real one) and `transformers` (embedded, for small models and machines without vLLM). They keep
a copy of the model, which `push_weights` brings up to date. Where they run, `rollout.mode` says: in the trainer's
process, in a process of their own, or (vLLM) in a server that the user started. A third one, `sglang`, is a server's.
"""

import logging
from collections.abc import Sequence
from importlib import import_module

import torch
import torch.distributed as dist

from rlplus.common.errors import RunFailed, install_command
from rlplus.train.config import RolloutConfig, check_engine, installed_vllm
from rlplus.train.rollout.custom_engine import Response, Sampler, make_respond
from rlplus.train.rollout.protocol import (
    DEFAULT_CACHE_MB,
    LOGIT_BYTES,
    Completion,
    Request,
    Respond,
    RolloutEngine,
    Sampling,
    Task,
    check_experts,
    check_kept,
    check_requests,
    check_responses,
    respond,
    whole_model,
)
from rlplus.train.rollout.push import checked_weights, ranks_here
from rlplus.train.rollout.vllm_options import Adapters

__all__ = [
    "DEFAULT_CACHE_MB",
    "ENGINES",
    "LOGIT_BYTES",
    "Adapters",
    "Completion",
    "Request",
    "Respond",
    "Response",
    "RolloutEngine",
    "RunFailed",
    "Sampler",
    "Sampling",
    "Task",
    "check_experts",
    "check_kept",
    "check_requests",
    "check_responses",
    "checked_weights",
    "make_engine",
    "make_respond",
    "respond",
    "whole_model",
]

# Modules and classes by `rollout.engine`: engines that run here or in a process of their own, and servers.
ENGINES = {"transformers": "transformers_engine.TransformersEngine", "vllm": "vllm_engine.VLLMEngine"}
SERVERS = {"sglang": "sglang_engine.SGLangEngine", "vllm": "server_engine.ServerEngine"}

logger = logging.getLogger(__name__)


def make_engine(
    config: RolloutConfig,
    model_path: str,
    *,
    dtype: str,
    max_model_len: int,
    end_ids: Sequence[int],
    pad_token_id: int,
    seed: int,
    trust_remote_code: bool = False,
    config_path: str | None = None,
    adapters: Adapters | None = None,
) -> RolloutEngine:
    """Start the engine that config names, or find the server, on the model in the folder model_path.

    dtype: "float32" or "bfloat16". max_model_len: tokens of a prompt and its response together. end_ids: the tokens
    that end a response, whatever the model's own files name. config_path: folder of the config.json to use in place of
    the model's own, for a run that changes, say, the rope (write it with `model.config.save_pretrained`). adapters:
    those that will be pushed in place of weights, for vLLM outside of a server. Where torch.distributed is used,
    initialise it first and call this on all ranks: each gets an engine of its own, or its part of one. ValueError:
    config.engine is not installed, the ranks and GPUs do not fit config, or it cannot apply the adapters.
    """
    if config.mode == "server":
        place = SERVERS["vllm" if config.engine == "auto" else config.engine]
    else:
        if installed_vllm() is None:
            check_engine(config)  # ValueError for what only vLLM has
        name = _choose(config.engine)
        logger.info("rollout engine: %s, %s (rollout.engine is %r)", name, config.mode, config.engine)
        config = config.model_copy(update={"engine": name})
        _check_devices(config)
        place = "process_engine.ProcessEngine" if config.mode == "process" else ENGINES[name]
    module, _, kind = place.partition(".")
    engine: RolloutEngine = getattr(import_module(f"{__name__}.{module}"), kind)(
        config,
        model_path,
        dtype=dtype,
        max_model_len=max_model_len,
        end_ids=end_ids,
        pad_token_id=pad_token_id,
        seed=seed,
        trust_remote_code=trust_remote_code,
        config_path=config_path,
        adapters=adapters,
    )
    return engine


def _check_devices(config: RolloutConfig) -> None:
    """ValueError if this machine's ranks or GPUs do not suffice for the configured engines."""
    size = config.tensor_parallel_size
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = ranks_here()
    if config.mode == "colocated" and dist.is_initialized():
        # A group of ranks across machines would send every layer's activations over the network.
        if world % size or local % size:
            raise ValueError(
                f"want rollout.tensor_parallel_size to divide the {world} ranks, and the {local} of each machine; "
                f"got {size}"
            )
        return
    wanted = local * (1 + size) if config.mode == "process" else size
    if torch.cuda.is_available() and torch.cuda.device_count() < wanted:
        raise ValueError(
            f"rollout.mode {config.mode} with rollout.tensor_parallel_size {size} and {local} ranks on this machine "
            f"takes {wanted} GPUs; there are {torch.cuda.device_count()}"
        )


def _choose(engine: str) -> str:
    """The engine that runs, of which "auto" leaves the choice; ValueError if it is vLLM and does not import."""
    if engine == "auto":
        engine = "transformers" if installed_vllm() is None else "vllm"
    if engine == "vllm":
        from rlplus.train.rollout.vllm_engine import import_vllm

        try:
            import_vllm()
        except (ImportError, OSError) as error:
            # A broken installation is not a missing one: falling back here would hide it.
            install = f"{install_command('vllm')} (CUDA) or {install_command('cpu')}"
            raise ValueError(
                f"vLLM is installed but does not import ({error}): install it again by {install} (then uninstall "
                "torchvision, torchaudio and torchcodec, which want CUDA), or set rollout.engine=transformers"
            ) from error
    return engine
