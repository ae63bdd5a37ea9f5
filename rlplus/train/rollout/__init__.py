"""Rollouts: token ids of prompts in, sampled responses with their logprobs out, behind one protocol.

Two engines: `vllm` (the real one) and `transformers` (embedded, for small models and machines without vLLM). They keep
a copy of the model, which `push_weights` brings up to date. Where they run, `rollout.mode` says: in the trainer's
process, in a process of their own, or (vLLM) in a server that the user started. A third one, `sglang`, is a server's.
"""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from rlplus.common.errors import RunFailed, install_command
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.custom_engine import Respond, Response, Sampler, Task, make_respond, respond
from rlplus.train.rollout.engine_adapters import Adapters
from rlplus.train.rollout.protocol import (
    DEFAULT_CACHE_MB,
    LOGIT_BYTES,
    Completion,
    Request,
    RolloutEngine,
    Sampling,
    check_experts,
    check_kept,
    check_requests,
    check_responses,
    whole_model,
)
from rlplus.train.rollout.push import checked_weights, ranks_here

__all__ = [
    "DEFAULT_CACHE_MB",
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
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "end_ids": end_ids,
        "trust_remote_code": trust_remote_code,
        "config_path": config_path,
    }
    if config.engine == "sglang":
        from rlplus.train.rollout.sglang_engine import SGLangEngine

        return SGLangEngine(config, model_path, **settings)
    if config.mode == "server":
        from rlplus.train.rollout.server_engine import ServerEngine

        return ServerEngine(config, model_path, **settings)
    name = _choose(config.engine)
    logger.info("rollout engine: %s, %s (rollout.engine is %r)", name, config.mode, config.engine)
    config = config.model_copy(update={"engine": name})
    _check_devices(config)
    if adapters is not None:
        if name != "vllm":
            raise ValueError(f"rollout.lora adapters needs vLLM, which is not installed: {_INSTALL}")
        settings["adapters"] = adapters
    if config.mode == "process":
        from rlplus.train.rollout.process_engine import ProcessEngine

        return ProcessEngine(config, model_path, **settings, pad_token_id=pad_token_id, seed=seed)
    if name == "vllm":
        from rlplus.train.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(config, model_path, **settings, seed=seed)
    from rlplus.train.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(config, model_path, **settings, pad_token_id=pad_token_id)


_INSTALL = f"{install_command('vllm')} (CUDA) or {install_command('cpu')}"


def _check_devices(config: RolloutConfig) -> None:
    """ValueError if this machine's ranks or GPUs do not suffice for the configured engines."""
    size = config.tensor_parallel_size
    world = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1 and config.engine != "vllm":
        raise ValueError(f"rollout.tensor_parallel_size {size} needs vLLM, which is not installed: {_INSTALL}")
    for key in ("sleep", "vllm"):
        if getattr(config, key) and config.engine != "vllm":
            raise ValueError(f"rollout.{key} needs vLLM, which is not installed: {_INSTALL}")
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
    if engine == "transformers":
        return engine
    if find_spec("vllm") is None:
        if engine == "auto":
            return "transformers"
        raise ValueError(
            f"rollout.engine is 'vllm', but vLLM is not installed: {_INSTALL}, or set rollout.engine=transformers"
        )
    from rlplus.train.rollout.vllm_engine import import_vllm

    try:
        import_vllm()
    except (ImportError, OSError) as error:
        # A broken installation is not a missing one: falling back here would hide it.
        raise ValueError(
            f"vLLM is installed but does not import ({error}): install it again by {_INSTALL} (then uninstall "
            "torchvision, torchaudio and torchcodec, which want CUDA), or set rollout.engine=transformers"
        ) from error
    return "vllm"
