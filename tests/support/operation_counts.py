"""Costs of an operation of the loss on a device: launches, operations of torch, waits of the host, bytes of scratch.

Counted on the simulated device of ptxcheck, which executes the kernels for that GPU; TRITON_INTERPRET must not be set.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import budgets
import torch
import torch.distributed as dist
from head_cases import on_policy, sample
from ptxcheck.simulate import simulated
from thread_ranks import group_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rlplus import Objective, linear_divergence, linear_logprob, linear_policy_loss

N, V, H = 150, 300, 64
CHUNKS_MB = 0.05  # several chunks
KEPT = 3  # tokens of each row that a sampler kept, but of every fourth row none


def seeded(call: Callable[[], Any]) -> Any:
    """The call with the same random numbers each time."""
    torch.manual_seed(0)
    return call()


class Called(TorchDispatchMode):
    """The names of our operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rlplus":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def operation_rows(arch: int, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each operation, or each of these, on `N` tokens in bf16."""
    with simulated(arch) as gpu, one_rank() as group:
        calls = Calls(group)
        for name, call in calls.every():
            if only is not None and name not in only:
                continue
            gpu.reset()
            before = gpu.allocated
            with Called() as called:
                results = call()
            kept, scratch = gpu.allocated - before, gpu.peak - gpu.allocated
            assert results
            assert kept > 0
            assert called.names == set(budgets.OPERATIONS[name].split()), (name, called.names)
            yield {
                "arch": arch,
                "operation": name,
                "launches": sum(gpu.launches.values()),
                "operations": sum(gpu.ops.values()),
                "waits": len(gpu.syncs) + gpu.waits["waits for an event"],
                "scratch": scratch,
            }
            del results


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A group of one rank, whose collectives the simulated device does not see."""

    def unseen(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return collective(*args, **options)

        return call

    collectives = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}
    with group_of(0, 1, dist.HashStore()) as group:
        try:
            for name, collective in collectives.items():
                setattr(dist, name, unseen(collective))
            yield group
        finally:
            for name, collective in collectives.items():
                setattr(dist, name, collective)


class Calls:
    """The operations' inputs on the device, and calls of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        head, constants = sample(N, V, 1, torch.bfloat16, H)
        head = on_policy(head)
        del head["bias"]
        self.head = {k: v.to("cuda").requires_grad_(v.is_floating_point()) for k, v in head.items()}
        self.constants = {k: v.to("cuda") for k, v in constants.items()}
        self.weight, self.group = self.head["weight"], group
        self.inputs = [self.head["hidden"], self.weight]
        teacher, _ = sample(N, V, 2, torch.bfloat16, H)
        self.teacher = {f"teacher_{k}": teacher[k].to("cuda") for k in ("hidden", "weight")}
        likeliest = (teacher["hidden"].float() @ teacher["weight"].float().T).log_softmax(1).topk(KEPT)
        self.topk = (likeliest.indices.to("cuda"), likeliest.values.to("cuda"))
        counts = torch.where(torch.arange(N) % 4 == 3, 0, KEPT)
        tokens = (head["target"][:, None] + torch.arange(KEPT)) % V
        self.kept = (
            torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to("cuda"),
            tokens[counts > 0].flatten().to("cuda"),
        )

    def loss(self, objective: Objective, **options: Any) -> list[Any]:
        inputs = self.head | self.constants | options
        out = linear_policy_loss(**inputs, objective=objective, backend="triton")
        return [out, torch.autograd.grad(out.loss, [inputs["hidden"], inputs["weight"]])]

    def logprobs(self, **options: Any) -> Any:
        with torch.no_grad():
            return linear_logprob(**(self.head | options), backend="triton")

    def gradients(self, **options: Any) -> Any:
        logprob, spread = linear_logprob(**self.head, backend="triton", **options)
        return [logprob, spread, torch.autograd.grad((logprob + spread).sum(), self.inputs)]

    def divergence(self, backend: str = "triton", **teacher: Any) -> Any:
        weights = self.constants["token_weight"]
        out = linear_divergence(*self.inputs, token_weight=weights, backend=backend, **teacher)
        return [out, torch.autograd.grad(out.loss, self.inputs)]

    def divergence_alone(self) -> Any:
        with torch.no_grad():
            weights = self.constants["token_weight"]
            return linear_divergence(*self.inputs, token_weight=weights, backend="triton", **self.teacher)

    def every(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and call, which returns what it computes. The vendor's GEMM: of a weight that lies the other way."""
        across = {"weight": self.weight.detach().t().contiguous().t().requires_grad_()}
        chunks: dict[str, Any] = {"max_scratch_mb": CHUNKS_MB}
        loss = partial(self.loss, Objective("clip", "mis"))
        yield "logprobs", self.logprobs
        yield "logprobs, the vendor's GEMM", partial(self.logprobs, **across)
        yield "logprobs and gradients", self.gradients
        yield "loss and gradients", loss
        yield "loss and gradients, the vendor's GEMM", partial(loss, **across)
        bonus = Objective("clip", "mis", entropy_coef=0.01)
        yield "loss and gradients, entropy bonus", partial(self.loss, bonus)
        yield "loss and gradients, chunks", partial(loss, **chunks)
        yield "loss and gradients, chunks, the vendor's GEMM", partial(loss, **chunks, **across)
        yield "logprobs and gradients, sampled", partial(seeded, partial(self.gradients, backward="sampled"))
        yield "loss and gradients, sampled", partial(seeded, partial(loss, backward="sampled"))
        for name, form in (("kept tokens", {"kept": self.kept}), ("split head", {"group": self.group})):
            yield f"logprobs, {name}", partial(self.logprobs, **form)
            yield f"logprobs and gradients, {name}", partial(self.gradients, **form)
            yield f"loss and gradients, {name}", partial(loss, **form)
        yield "divergence", self.divergence_alone
        yield "divergence and gradients", partial(self.divergence, **self.teacher)
        yield "divergence and gradients, chunks", partial(self.divergence, **self.teacher, **chunks)
        topk = partial(self.divergence, "torch", teacher_topk=self.topk)
        yield "divergence from the teacher's likeliest tokens, and gradients", topk
