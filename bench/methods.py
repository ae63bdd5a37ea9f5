"""The registry of the methods, the bare GEMMs, and every backend of ours.

A method gets `cases.Inputs` and prepares a step. A step computes the method's loss and `hidden.grad`, `weight.grad`, or
only logprobs where the method is a forward one, and returns the logprobs (N,) if there are any.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlplus.loss import Objective, linear_logprob, linear_policy_loss, policy_loss

from .cases import Inputs

Step = Callable[[], Tensor | None]
Prepare = Callable[[Inputs], Step]


@dataclass(frozen=True)
class Method:
    """kind says which loss: "policy" (RL-PLUS), "grpo", "cross-entropy" (mean over the rows with a gradient), "forward"
    (logprobs only), "bare" (GEMMs), or "other" (a policy loss whose gradients are not compared).

    - `package`: the distribution that it comes from
    - `device`: the only type of device it runs on; None = any
    - `compiles`: its first call takes long
    - `into`: it adds the weight's gradient to a buffer that exists, instead of making one
    """

    name: str
    kind: str
    what: str
    prepare: Prepare
    package: str = "rlplus"
    device: str | None = None
    compiles: bool = False
    into: bool = False


METHODS: dict[str, Method] = {}


def method(name: str, kind: str, what: str, **fields: Any) -> Callable[[Prepare], Prepare]:
    """Register a function that prepares a step."""

    def register(prepare: Prepare) -> Prepare:
        METHODS[name] = Method(name, kind, what, prepare, **fields)
        return prepare

    return register


class Unavailable(Exception):
    """The reason why a method cannot be measured here."""


# ---- the unit


@method("bare-3u", "bare", "logits, dhidden, dweight by the vendor's GEMM into memory that exists", package="torch")
def bare_three(x: Inputs) -> Step:
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits, dhidden, dweight = hidden.new_empty(len(hidden), len(weight)), *map(torch.empty_like, (hidden, weight))

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return step


@method("bare-1u", "bare", "logits by the vendor's GEMM into memory that exists", package="torch")
def bare_one(x: Inputs) -> Step:
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)

    return step


# ---- ours


def ours(
    name: str, device: str | None, kind: str = "policy", note: str = "", into: bool = False, **options: Any
) -> None:
    """Register a backend with its options, for the policy loss."""

    def prepare(x: Inputs) -> Step:
        buffer = torch.zeros_like(x.weight, dtype=torch.float32, requires_grad=False) if into else None

        def step() -> Tensor:
            out = linear_policy_loss(x.hidden, x.weight, x.target, **x.constants, **options, weight_grad=buffer)
            out.loss.backward()
            return out.logprob

        return step

    method(name, kind, f"RL-PLUS loss{note}", device=device, into=into)(prepare)


def from_logprob(x: Inputs, logprobs: Callable[[], Tensor]) -> Step:
    """The RL-PLUS loss on differentiable logprobs (N,)."""

    def step() -> Tensor:
        logprob = logprobs()
        policy_loss(logprob, **x.constants)[0].backward()
        return logprob.detach()

    return step


def ours_logprob(name: str, device: str | None, **options: Any) -> None:
    """Register a backend with its options, for logprob and entropy: without gradients, and under the loss."""

    def logprobs(x: Inputs, frozen: bool = False) -> Callable[[], Tensor]:
        weight = x.weight.detach() if frozen else x.weight
        return lambda: linear_logprob(x.hidden, weight, x.target, **options)[0]

    method(f"{name} forward", "forward", "logprob and entropy", device=device)(logprobs)
    what = "linear_logprob; RL-PLUS loss"
    method(f"{name} logprob", "policy", what, device=device)(lambda x: from_logprob(x, logprobs(x)))
    method(f"{name} logprob frozen", "other", f"{what}, frozen head", device=device)(
        lambda x: from_logprob(x, logprobs(x, frozen=True))
    )


KEPT = 8  # tokens of each row


def kept(backend: str, device: str | None) -> None:
    """Register a backend for the loss with a few kept tokens of each row, the target among them."""

    def prepare(x: Inputs) -> Step:
        N, V, at = len(x.target), len(x.weight), x.target.device
        tokens = (x.target[:, None] + V // KEPT * torch.arange(KEPT, device=at)) % V
        pair = (KEPT * torch.arange(N + 1, device=at), tokens.flatten())

        def step() -> None:
            out = linear_policy_loss(x.hidden, x.weight, x.target, **x.constants, kept=pair, backend=backend)
            out.loss.backward()

        return step

    method(f"{backend} kept", "other", f"RL-PLUS loss, {KEPT} kept tokens a row", device=device)(prepare)


BONUS = replace(Objective(), entropy_coef=1e-3)
for backend, only in {"reference": None, "torch": None, "cpp": "cpu", "triton": "cuda"}.items():
    ours(backend, only, backend=backend)
    ours_logprob(backend, only, backend=backend)
    if backend != "reference":
        sampled: dict[str, Any] = {"backend": backend, "backward": "sampled"}
        ours(f"{backend} sampled", only, note=", sampled backward pass", **sampled)
        ours_logprob(f"{backend} sampled", only, **sampled)
        ours(f"{backend} into", only, "other", ", dW added to an fp32 buffer", into=True, backend=backend)
        ours(f"{backend} entropy", only, "other", " with an entropy bonus", backend=backend, objective=BONUS)
        kept(backend, only)
        for mb in (40, 160, 320):
            ours(f"{backend} {mb} MB", only, note=f", max_scratch_mb {mb}", backend=backend, max_scratch_mb=mb)
