"""The routers of a mixture of experts, and a record of the experts that they choose while it generates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlplus.common.chosen_experts import Experts, small_type


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Shares of the softmax over all experts; relative to their sum unless the model keeps them (norm_topk_prob)."""
    share = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, experts)
    return share / share.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else share


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Sigmoids, which a correction of the choice (e_score_correction_bias) does not change."""
    share = logits.sigmoid().gather(-1, experts)
    if router.norm_topk_prob:
        share = share / (share.sum(dim=-1, keepdim=True) + 1e-20)
    return share * router.routed_scaling_factor


# The weights of given experts from the logits. Keys are classes of transformers, whose forward returns logits
# (N, experts), weights (N, k) and the experts' numbers (N, k).
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "MixtralTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


def routers_of(lm: nn.Module) -> list[Any]:
    """The routers of a model in the order of its layers; ValueError if it has none that is known."""
    routers = [module for module in lm.modules() if type(module).__name__ in WEIGHTS]
    if not routers:
        raise ValueError(
            "rollout.routing_replay: want a mixture of experts of Mixtral, Olmoe, Qwen2Moe, Qwen3Moe, DeepseekV3 or "
            f"Glm4Moe, whose routers it knows; got {type(lm).__name__}"
        )
    return routers


class Recorder:
    """The experts of sequences that a model generates a token at a time, from its own forward passes."""

    def __init__(self, lm: nn.Module) -> None:
        self._routers = routers_of(lm)
        self._dtype = small_type(max(router.num_experts for router in self._routers))
        self._lengths: Sequence[int] = ()
        self._layers: list[Tensor] = []  # the last forward pass's
        self._rows: list[list[Experts]] = []

    @contextmanager
    def listening(self, lengths: Sequence[int]) -> Iterator["Recorder"]:
        """Notes what the routers choose inside, for sequences with prompts of these lengths; gives itself."""
        self._lengths = lengths
        hooks = [router.register_forward_hook(self._note) for router in self._routers]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            self._layers = []
            self._rows = []

    def _note(self, _: Any, __: Any, output: tuple[Tensor, ...]) -> None:
        self._layers.append(output[2])

    def _last(self, rows: int) -> Experts:
        """(rows, T, layers, k) of the forward pass that has ended."""
        layers = self._layers
        self._layers = []
        experts: Experts = torch.stack(layers, dim=1).cpu().numpy().astype(self._dtype)
        return experts.reshape(rows, -1, *experts.shape[1:])

    def begin(self, prompts: int, copies: Sequence[int]) -> None:
        """After the pass over so many prompts with padding before them: the sequences are these copies of them."""
        experts = self._last(prompts)
        self._rows = [[experts[copy, -length:]] for copy, length in zip(copies, self._lengths, strict=True)]

    def add(self, rows: Sequence[int]) -> None:
        """After a pass over one more token of each of these sequences."""
        for row, experts in zip(rows, self._last(len(rows)), strict=True):
            self._rows[row].append(experts)

    def taken(self, row: int, tokens: int) -> Experts:
        """The experts of a sequence with that many tokens sampled, whose last one no pass was over."""
        return np.concatenate(self._rows[row][:tokens])
