"""Costs of an operation of the loss on a device: launches, operations of torch, waits of the host, bytes of scratch.

Counted on the simulated device of tests/ptx, which executes the kernels for that GPU; TRITON_INTERPRET must not be set.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from head_cases import on_policy, sample
from ptx.simulate import simulated

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.kernels.tiling import Tiling
from rlplus.loss import tuning

N, V, H = 150, 300, 64
CHUNKS_MB = 0.05  # several chunks


def operation_rows(arch: int, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each operation, or each of these, on `N` tokens in bf16."""
    with simulated(arch) as gpu:
        head, constants = sample(N, V, 1, torch.bfloat16, H)
        there = [{k: v.to("cuda") for k, v in part.items()} for part in (on_policy(head), constants)]
        del there[0]["bias"]
        for name, tiling, call in operations(*there):
            if only is not None and name not in only:
                continue
            kind = tuning.kind_of(there[0]["weight"].device, torch.bfloat16, V, H)
            with nullcontext() if tiling is None else tuning.using(kind, tiling):
                gpu.reset()
                before = gpu.allocated
                results = call()
                kept, scratch = gpu.allocated - before, gpu.peak - gpu.allocated
                assert results
                assert kept > 0
                yield {
                    "arch": arch,
                    "operation": name,
                    "launches": sum(gpu.launches.values()),
                    "operations": sum(gpu.ops.values()),
                    "waits": len(gpu.syncs) + gpu.waits["waits for an event"],
                    "scratch": scratch,
                }
                del results


def operations(head: dict[str, Any], constants: dict[str, Any]) -> Iterator[tuple[str, Any, Callable]]:
    """Name, the tiling that it needs (None: the default), and the call, which returns what it computes."""
    leaves = {k: v.requires_grad_(v.is_floating_point()) for k, v in head.items()}
    inputs = [leaves["hidden"], leaves["weight"]]
    plain, entropy = Objective("clip", "mis"), Objective("clip", "mis", entropy_coef=0.01)

    def loss(objective: Objective = plain, **options: Any) -> list[Any]:
        out = linear_policy_loss(**leaves, **constants, objective=objective, backend="triton", **options)
        return [out, torch.autograd.grad(out.loss, inputs)]

    def logprobs(**options: Any) -> Any:
        return linear_logprob(**leaves, backend="triton", **options)

    def gradients() -> Any:
        logprob, spread = logprobs()
        return [logprob, spread, torch.autograd.grad((logprob + spread).sum(), inputs)]

    def without_gradients() -> Any:
        with torch.no_grad():
            return logprobs()

    vendor = Tiling(forward="vendor", loss="vendor")
    yield "logprobs", None, without_gradients
    yield "logprobs, the vendor's GEMM", vendor, without_gradients
    yield "logprobs and gradients", None, gradients
    yield "loss and gradients", None, loss
    yield "loss and gradients, the vendor's GEMM", vendor, loss
    yield "loss and gradients, entropy bonus", None, partial(loss, entropy)
    yield "loss and gradients, chunks", None, partial(loss, max_scratch_mb=CHUNKS_MB)
    yield "loss and gradients, chunks, the vendor's GEMM", vendor, partial(loss, max_scratch_mb=CHUNKS_MB)
    yield (
        "loss and gradients, chunks, smallest gradients left out",
        None,
        partial(loss, max_scratch_mb=CHUNKS_MB, grad_filter=0.01),
    )
    yield "loss and gradients, least memory", None, partial(loss, memory="least", max_scratch_mb=CHUNKS_MB)
