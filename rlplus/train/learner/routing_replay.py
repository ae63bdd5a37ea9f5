"""Routing replay: a mixture trains with the experts that the engine chose, as R3 does (arXiv 2510.11370).

Engine and trainer compare numbers that they round differently, and so choose different experts for some tokens: the
layer's output then differs by more than rounding, and so does all that follows. Here the trainer's routers take the
engine's choice, weighted by the trainer's own logits, through which gradients flow.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlplus.train.rollout.expert_routing import WEIGHTS, routers_of


class RoutingReplay:
    """Hooks on the routers of lm; ValueError for a model whose routers are unknown.

    What is in `use` stays until something else is: a layer that the backward pass runs again has the same experts.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._routers = routers_of(lm)
        self._experts: Tensor | None = None
        self._checked: set[int] = set()
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._replay, layer))

    def use(self, experts: Tensor | None) -> None:
        """Replay these (R, L, layers, k), the largest number of their dtype being unknown: the router chooses itself.

        None: all are. ValueError for another number of layers, or of experts a token.
        """
        wanted = (len(self._routers), self._routers[0].top_k)
        if experts is not None and experts.shape[2:] != wanted:
            raise ValueError(
                f"want the engine's experts of {wanted[0]} layers, {wanted[1]} for each token, as the policy has them; "
                f"got {experts.shape[2]} layers, {experts.shape[3]} for each token"
            )
        self._experts = None if experts is None else experts.flatten(0, 1)

    def _replay(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """The router's output with the replayed experts; its own where nothing is replayed."""
        logits, weights, own = output
        if layer not in self._checked:
            self._check(layer, router, output)
        if self._experts is None:
            return output
        chosen = self._experts[:, layer]
        experts = own.where(chosen == torch.iinfo(chosen.dtype).max, chosen.to(own.dtype))
        return logits, WEIGHTS[type(router).__name__](router, logits, experts).to(weights.dtype), experts

    @torch.no_grad()
    def _check(self, layer: int, router: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """ValueError if the weights that we compute of a router's own choice are not the router's, to the last bit."""
        logits, weights, own = output
        if not logits.numel():
            return
        if not logits.isfinite().all():
            raise ValueError(f"want finite logits of the router in layer {layer}: the policy or its input is broken")
        kind = type(router).__name__
        if not torch.equal(WEIGHTS[kind](router, logits, own).to(weights.dtype), weights):
            raise ValueError(f"want a {kind} whose weights are those of transformers 5.19; got others in layer {layer}")
        self._checked.add(layer)
