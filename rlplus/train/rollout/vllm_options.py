"""Requests to vLLM besides tokens, and its refusals: adapters, the tokens that it kept, the experts it chose.

vLLM applies adapters itself, to base weights that it has loaded from the model's folder.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, get_args

import torch

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.protocol import Sampling

# vLLM's arguments.
MASKS = "return_sampling_mask"
EXPERTS = "enable_return_routed_experts"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run, each of which makes a W into W + alpha / rank * B A.

    shapes: A's (rank, in) and B's (out, rank), by the names that peft gives them in a file, MODULE.lora_A.weight and
    MODULE.lora_B.weight.
    """

    rank: int
    alpha: float
    shapes: dict[str, torch.Size]

    def engine_arguments(self, dtype: str, *, cpu: bool) -> dict[str, Any]:
        """vLLM's arguments for one set of adapters on weights of that dtype; ValueError if it has no room for them.

        Only layers with adapters get room: vLLM would also wrap embeddings and head, and refuse large vocabularies.
        """
        if dtype == "float32" and not cpu:
            raise ValueError(no_adapters("its kernels on a GPU take bfloat16, and model.dtype is float32"))
        from vllm.config.lora import MaxLoRARanks

        room = min((rank for rank in get_args(MaxLoRARanks) if rank >= self.rank), default=None)
        if room is None:
            raise ValueError(
                no_adapters(f"their rank is {self.rank}, and it has room for {max(get_args(MaxLoRARanks))}")
            )
        layers = {name.split(".")[-3] for name in self.shapes}
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": room,
            "lora_target_modules": sorted(layers),
        }


def lora_request(number: int) -> Any:
    """vLLM's name for the adapters of a push, which are in its workers; it finds none in the folder that it wants."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"rlplus-{number}", number, "/no folder: rlplus pushes adapters through memory")


def no_adapters(reason: str) -> str:
    """The message where vLLM cannot apply a run's adapters."""
    return f"rollout.lora adapters: vLLM does not apply these adapters: {reason}; want rollout.lora merged"


def no_masks(top_k: int, reason: str) -> str:
    """The message of an engine that does not return the tokens it kept."""
    return (
        f"rollout.top_k {top_k} needs the tokens that vLLM kept, from which it sampled: want vLLM 0.32 on a GPU, whose "
        f"Model Runner V2 returns them ({MASKS}), rollout.engine transformers, or top_k 0; got {reason}"
    )


def no_experts(reason: str) -> str:
    """The message of an engine that does not return the experts it chose."""
    return (
        "rollout.routing_replay needs the experts that vLLM chose: want a mixture of experts and vLLM 0.32 on a GPU, "
        f"whose Model Runner V2 returns them ({EXPERTS}), or rollout.engine transformers; got {reason}"
    )


def check_arguments(config: RolloutConfig, vllm: Any) -> None:
    """ValueError for a vLLM, the module, that lacks an argument that the run needs."""
    for wanted, argument, refusal in (
        (config.top_k, MASKS, partial(no_masks, config.top_k)),
        (config.routing_replay, EXPERTS, no_experts),
    ):
        if wanted and argument not in [field.name for field in fields(vllm.EngineArgs)]:
            raise ValueError(refusal(f"vLLM {vllm.__version__}, which has no such argument"))


def check_sampling(sampling: Sampling, most_kept: int, replays: bool = False) -> None:
    """ValueError for sampling that vLLM refuses. most_kept, replays: rollout.top_k and routing_replay at its start."""
    if bool(sampling.top_k) != bool(most_kept):
        raise ValueError(
            f"want top_k in all requests to a vLLM that returns the tokens it kept, and in none to another: it was "
            f"started with rollout.top_k {most_kept}; got {sampling.top_k}"
        )
    if sampling.experts and not replays:
        raise ValueError("want an engine that was made with rollout.routing_replay for its experts")
