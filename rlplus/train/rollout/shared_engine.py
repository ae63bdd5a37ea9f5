"""Rollouts by the policy itself: a second module around its parameters, so that generating takes no copy of them."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.transformers_engine import TransformersEngine


class SharedEngine(TransformersEngine):
    """Generates with the weights of `lm`, which trains in this process, whatever they are by then.

    They have to be whole, as with ZeRO 1 and 2, and rest while it generates. Adapters are not merged, and weights of 4
    bits stay what they are.
    """

    def __init__(
        self,
        config: RolloutConfig,
        lm: PreTrainedModel,
        *,
        max_model_len: int,
        end_ids: Sequence[int],
        pad_token_id: int,
    ) -> None:
        self._begin(config, twin_of(lm), max_model_len, end_ids, pad_token_id)

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to do: these weights are the engine's already, and are not made (merged, dequantized) for it."""

    def sleep(self) -> None:
        """Give the memory of keys and values, which torch keeps in pieces of many sizes, to the training."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def twin_of(lm: PreTrainedModel) -> PreTrainedModel:
    """A module like lm that has its parameters and buffers themselves, and all else of its own.

    So neither knows of the other's mode, attention, head, adapters' switches and settings.
    """
    quantized = (getattr(module, "quant_state", None) for module in lm.modules())
    shared: list[Any] = [*lm.parameters(), *lm.buffers(), *(state for state in quantized if state is not None)]
    twin: PreTrainedModel = copy.deepcopy(lm, {id(each): each for each in shared})
    vars(twin.get_output_embeddings()).pop("forward", None)  # `PackedModel` has its own
    return twin
