"""The backends of the fused operations, and the choice among them.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplus.loss.backends.backend_interface import Backend
    from rlplus.loss.backends.sampled import Drawer

MODULES = {  # each a `Backend`; `reference` apart
    "torch": "chunked",
    "cpp": "cpp",
    "triton": "triton",
}
DRAWS = {"torch": "torch_draws", "cpp": "cpp_draws", "triton": "triton_draws"}  # the same: draws
DIVERGENCES = {"torch": "chunked", "triton": "divergence_chunks"}  # the same: divergence


def implementation(backend: str) -> "Backend":
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
