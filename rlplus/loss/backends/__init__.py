"""The backends of the fused operations: their interface, and their modules.

A backend of your own is a module here with the functions of `Backend`; the one below has the policy loss alone.
`MODULES` has its name, which `backend=` then takes, and DRAWS if it can be sampled; for `train.backend` the type there
needs it, too:

    # rounded.py, for `linear_policy_loss(..., backend="rounded")`
    from rlplus.loss.backends.chunked import logprob, logprob_backward, policy_loss as exact

    def policy_loss(call):
        advantage = call.constants.advantage.round(decimals=2)
        return exact(call._replace(constants=call.constants._replace(advantage=advantage)))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlplus.loss.head.gradient_sum import Gradients, Index, Want
from rlplus.loss.head.head import Head
from rlplus.loss.objective.objective import Objective
from rlplus.loss.objective.tokens import TokenConstants

if TYPE_CHECKING:
    from rlplus.loss.backends.sampled import Drawer

MODULES = {  # each a `Backend`; `reference` apart
    "torch": "chunked",
    "cpp": "cpp",
    "triton": "triton",
}
DRAWS = {"torch": "torch_draws", "cpp": "cpp_draws", "triton": "triton_draws"}  # the same: draws
DIVERGENCES = {"torch": "chunked", "triton": "divergence_chunks"}  # the same: divergence


class PolicyCall(NamedTuple):
    """A policy loss that is to be computed."""

    head: Head
    constants: TokenConstants
    objective: Objective
    want: Want

    @property
    def factors(self) -> list[Tensor]:
        """Values to which the slopes of the rows are proportional."""
        weights = self.constants.entropy_weight if self.objective.entropy_coef else None
        return [self.constants.token_weight, *([] if weights is None else [weights])]


class PolicyResult(NamedTuple):
    """loss: 0-d. logprob, entropy (N,). stats (S,): sums. gradients: of hidden, weight and bias where wanted."""

    loss: Tensor
    logprob: Tensor
    entropy: Tensor
    stats: Tensor
    gradients: Gradients


class Slopes(NamedTuple):
    """The derivatives of a loss by logprob and entropy, (N,) each, fp32 (fp64)."""

    logprob: Tensor
    entropy: Tensor

    def rows(self, which: Index) -> "Slopes":
        return Slopes(self.logprob[which], self.entropy[which])


Stored = tuple[Tensor, Tensor]
"""Tensors (n, .) that a forward pass keeps of rows for the backward pass; a backend knows their contents."""


class Backend(Protocol):
    """A module of this folder. Every head is whole, and its weight and bias have hidden's dtype."""

    def policy_loss(self, call: PolicyCall) -> PolicyResult:
        """Loss and gradients in one pass."""

    def new_stored(self, head: Head, count: int) -> Stored:
        """Memory for what `logprob_backward` needs of so many rows."""

    def logprob(self, head: Head, scratch_bytes: float, stored: Stored | None = None) -> tuple[Tensor, Tensor]:
        """-> logprob (N,), entropy (N,). stored: of all rows, which are written there; None: they are not kept."""

    def logprob_backward(self, head: Head, slopes: Slopes, want: Want, stored: Stored | None = None) -> Gradients:
        """Gradients of sum(slopes.logprob * logprob + slopes.entropy * entropy).

        stored: as `logprob` wrote it, of all rows; it is read. None: the logits are computed again.
        """

    def scratch_per_logit(self, dtype: torch.dtype, device: str, capped: bool = False) -> int:
        """Bytes of scratch, for a head with these `Head.logits`; `rlplus plan` asks, too."""


def implementation(backend: str) -> Backend:
    """The module that computes; a backend is imported when it is first used."""
    return _module(MODULES.get(backend, backend))


def drawer(backend: str) -> "Drawer":
    """The module that draws for a sampled backward pass."""
    return _module(DRAWS[backend])


def divergence(backend: str) -> Any:
    """The function that computes the divergence of two heads."""
    return _module(DIVERGENCES[backend]).divergence


def _module(name: str) -> Any:
    return import_module(f".{name}", __name__)
