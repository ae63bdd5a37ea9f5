"""Adapters in a worker of vLLM: loaded from memory, where its own calls read a folder.

Only vLLM's workers import this module, by `rlplus.train.rollout.receiver`. verl and SkyRL load them in the same way.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from rlplus.train.rollout.push import checked_weights
from rlplus.train.rollout.vllm_options import Adapters, no_adapters

SHOWN = 3  # layers, in a message


class AdapterReceiver:
    """Loads one set of adapters after the other. ValueError for layers that vLLM's model has not, or cannot adapt."""

    def __init__(self, model: Any, adapters: Adapters) -> None:
        self._manager = model.lora_manager
        self._shapes = adapters.shapes
        mapper = getattr(model, "hf_to_vllm_mapper", None)  # turns names of the checkpoint into vLLM's
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._peft = PEFTHelper(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=[])
        packed = self._manager.packed_modules  # q, k and v in one layer: each has adapters of its own
        known = {name for name in self._manager.modules if name not in packed}.union(*packed.values())
        # vLLM leaves out, in silence, what fits no layer.
        left = {name.split(".lora_")[0]: None for name in self._shapes if self._layer(name) not in known}
        if left:
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            shown = ", ".join([*left][:SHOWN])
            raise ValueError(
                no_adapters(f"its {type(model).__name__} has no layer with room for those of {shown}{more}")
            )

    def _layer(self, name: str) -> str:
        """vLLM's name of the layer that the A or B of that name belongs to."""
        return str(parse_fine_tuned_lora_name(name, self._mapper)[0])

    def load(self, number: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all adapters by these, which requests then name by their number."""
        # Copies, as vLLM multiplies B by alpha / rank in its place.
        tensors = {name: weight.to("cpu", copy=True) for name, weight in checked_weights(weights, self._shapes)}
        dtype = self._manager.lora_config.lora_dtype
        lora = LoRAModel.from_lora_tensors(
            number, tensors, self._peft, device="cpu", dtype=dtype, weights_mapper=self._mapper
        )
        self._manager.add_adapter(lora)  # it has room for one: the last ones go
        self._manager.activate_adapter(number)
