"""Adapters that vLLM applies itself, to base weights that it has loaded from the model's folder."""

from dataclasses import dataclass
from typing import Any, get_args

import torch


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
            raise ValueError(refusal("its kernels on a GPU take bfloat16, and model.dtype is float32"))
        from vllm.config.lora import MaxLoRARanks

        room = min((rank for rank in get_args(MaxLoRARanks) if rank >= self.rank), default=None)
        if room is None:
            raise ValueError(refusal(f"their rank is {self.rank}, and it has room for {max(get_args(MaxLoRARanks))}"))
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


def refusal(reason: str) -> str:
    """The message where vLLM cannot apply a run's adapters."""
    return f"rollout.lora adapters: vLLM does not apply these adapters: {reason}; want rollout.lora merged"
