"""The backends of the fused operations, and the choice among them.

A backend of your own is a module here with the functions of `chunked`. `MODULES` has its name, which `backend=` then
takes; for `train.backend` the type there needs it, too:

    # rounded.py, for `linear_policy_loss(..., backend="rounded")`
    from rlplus.loss.backends.chunked import logprob, logprob_backward, policy_loss as exact

    def policy_loss(head, constants, objective, *options):
        return exact(head, constants._replace(advantage=constants.advantage.round(decimals=2)), objective, *options)
"""

from importlib import import_module
from types import ModuleType

MODULES = {  # `reference` apart: policy_loss, logprob, logprob_backward, each as in `chunked`
    "torch": "chunked",
    "cpp": "cpp",
    "triton": "triton",
}
DRAWS = {"torch": "torch_draws", "cpp": "cpp_draws", "triton": "triton_draws"}  # the same: draws
DIVERGENCES = {"torch": "chunked", "triton": "divergence_chunks"}  # the same: divergence


def implementation(backend: str) -> ModuleType:
    """The module that computes; a backend is imported when it is first used."""
    return import_module(f".{MODULES.get(backend, backend)}", __name__)
