"""The methods of others, each through its public entry point: PyTorch's and other packages'.

To add one, write a function with the decorator `method`, and name it in `suites.py`. A method of ours is one call of
`methods.ours`.
"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cases import Inputs
from .methods import METHODS, Method, Step, Unavailable, from_logprob, method

__all__ = ["METHODS", "Method", "Step", "Unavailable", "method"]  # METHODS includes other packages' methods

# ---- peers: PyTorch


def from_loss(loss: Callable[[], Tensor]) -> Step:
    """A peer's own scalar loss."""

    def step() -> None:
        loss().backward()

    return step


def plain_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(1).gather(1, target[:, None]).squeeze(1)


@method("naive torch", "policy", "full logits, fp32 softmax, autograd; RL-PLUS loss", package="torch")
def naive(x: Inputs) -> Step:
    return from_logprob(x, lambda: plain_logprob(x.hidden, x.weight, x.target))


@method("naive torch compiled", "policy", "naive torch under torch.compile", package="torch", compiles=True)
def naive_compiled(x: Inputs) -> Step:
    compiler = os.environ.get("CXX", "g++")
    if not x.hidden.is_cuda and shutil.which(compiler) is None:
        raise Unavailable(f"needs a C++ compiler: {compiler}")
    # fullgraph: past torch's limit of compiled shapes it fails, and does not go on without compilation.
    compiled = torch.compile(plain_logprob, dynamic=False, fullgraph=True)
    return from_logprob(x, lambda: compiled(x.hidden, x.weight, x.target))


@method("naive torch forward", "forward", "full logits, fp32 log_softmax", package="torch")
def naive_forward(x: Inputs) -> Step:
    return lambda: plain_logprob(x.hidden, x.weight, x.target)


@method("fp32 logits forward", "forward", "GEMM with fp32 output, log_softmax", package="torch")
def fp32_forward(x: Inputs) -> Step:
    def step() -> Tensor:
        if x.hidden.is_cuda and x.hidden.dtype != torch.float32:
            logits = torch.mm(x.hidden, x.weight.T, out_dtype=torch.float32)
        else:
            logits = x.hidden.float() @ x.weight.float().T
        return logits.log_softmax(1).gather(1, x.target[:, None]).squeeze(1)

    return step


def torch_options(x: Inputs, tuned: bool) -> Any:
    """The default options; or fast ones: chunks of 512 rows (CUDA: 2048), accumulated on CUDA in fp32."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise Unavailable("needs torch >= 2.13")
    if not tuned:
        return options()
    rows, policy = (2048, "compact") if x.hidden.is_cuda else (512, "balanced")
    wide = torch.float32 if x.hidden.is_cuda and x.hidden.dtype != torch.float32 else None
    return options(acc_policy=policy, batch_chunk_size=rows, acc_dtype=wide)


def torch_cross_entropy(x: Inputs, tuned: bool) -> Step:
    options = torch_options(x, tuned)
    return from_loss(lambda: F.linear_cross_entropy(x.hidden, x.weight, x.ce_target, options=options))


@method("torch linear CE", "cross-entropy", "F.linear_cross_entropy, default options", package="torch")
def torch_default(x: Inputs) -> Step:
    return torch_cross_entropy(x, tuned=False)


@method("torch linear CE tuned", "cross-entropy", "F.linear_cross_entropy, chunk and policy set", package="torch")
def torch_tuned(x: Inputs) -> Step:
    return torch_cross_entropy(x, tuned=True)


def torch_per_token(x: Inputs) -> Tensor:
    options = torch_options(x, tuned=True)
    return -F.linear_cross_entropy(x.hidden, x.weight, x.target, reduction="none", options=options)


@method("torch linear CE none", "policy", "F.linear_cross_entropy per token, tuned; RL-PLUS loss", package="torch")
def torch_none(x: Inputs) -> Step:
    torch_options(x, tuned=True)
    return from_logprob(x, lambda: torch_per_token(x))


@method("torch linear CE none forward", "forward", "F.linear_cross_entropy per token, tuned", package="torch")
def torch_none_forward(x: Inputs) -> Step:
    torch_options(x, tuned=True)
    return lambda: torch_per_token(x)


# ---- peers: others


def submodule(name: str, *parents: str, **stand_ins: dict[str, Any]) -> Any:
    """A package's module without its parents' imports, which load packages that the module does not need.

    parents: imported as empty packages unless they can be imported; stand_ins: modules (dots as __) with what is asked
    of them, for those that cannot be imported either.
    """
    for parent in parents:
        if parent in sys.modules:
            continue
        try:
            import_module(parent)
        except ImportError:
            above, _, last = parent.rpartition(".")
            if above:
                folders = [f"{folder}/{last}" for folder in sys.modules[above].__path__]
            else:
                spec = find_spec(parent)
                if spec is None or spec.submodule_search_locations is None:
                    raise
                folders = list(spec.submodule_search_locations)
            empty = ModuleType(parent)
            empty.__path__ = folders
            sys.modules[parent] = empty
    for key, names in stand_ins.items():
        path = key.replace("__", ".")
        try:
            import_module(path)
        except ImportError:
            stand_in = ModuleType(path)
            stand_in.__dict__.update(names)
            sys.modules[path] = stand_in
    return import_module(name)


def grpo(x: Inputs, sequences: int) -> Step:
    """Liger's GRPO loss, which is chunked by sequences."""
    loss_type = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    loss = loss_type(beta=0.0, use_ref_model=False, chunk_size=sequences)
    shape = (x.head.sequences, x.head.length)
    hidden = x.hidden.view(*shape, -1)
    rest = (x.target.view(shape), x.keep.float().view(shape), x.sequence_advantage)
    old = x.constants["old_logprob"].view(shape)
    return from_loss(lambda: loss(hidden, x.weight, *rest, old_per_token_logps=old)[0])


@method("Liger GRPO", "grpo", "LigerFusedLinearGRPOLoss, its defaults", package="liger-kernel", compiles=True)
def liger_grpo(x: Inputs) -> Step:
    return grpo(x, 1)


@method("Liger GRPO tuned", "grpo", "the same, chunks of 512 rows (CUDA: 2048)", package="liger-kernel", compiles=True)
def liger_grpo_tuned(x: Inputs) -> Step:
    return grpo(x, max(1, (2048 if x.hidden.is_cuda else 512) // x.head.length))


@method("Liger GRPO TF32", "grpo", "tuned, TF32 allowed", package="liger-kernel", device="cuda", compiles=True)
def liger_grpo_tf32(x: Inputs) -> Step:
    """Two of its four GEMMs are in fp32: the backward pass converts each chunk of the weight."""
    step = liger_grpo_tuned(x)

    def fast() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        step()
        torch.set_float32_matmul_precision(before)

    return fast


@method("Liger linear CE", "cross-entropy", "LigerFusedLinearCrossEntropyLoss", package="liger-kernel", device="cuda")
def liger_cross_entropy(x: Inputs) -> Step:
    loss = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return from_loss(lambda: loss(x.weight, x.hidden, x.ce_target))


def liger_linear(x: Inputs, target: Tensor, reduction: str, chunk: int, ce: str | None = None) -> Callable[[], Tensor]:
    """Liger's cross-entropy with fp32 accumulation. chunk: `chunk_mem_const`; ce: the implementation of its kernel."""
    apply = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction.apply
    rest = (None, None, -100, 0.0, 0.0, reduction, None, False, torch.float32, False, False, False, ce, None, chunk)
    return lambda: apply(x.hidden, x.weight, target, *rest)[0]


def liger_chunks(chunk: int) -> None:
    """Register Liger's cross-entropy with N × H × chunk logits at a time, as a mean and per token."""

    def mean(x: Inputs) -> Step:
        return from_loss(liger_linear(x, x.ce_target, "mean", chunk))

    def none(x: Inputs) -> Step:
        loss = liger_linear(x, x.target, "none", chunk)
        return from_logprob(x, lambda: -loss())

    what = f"fp32 accumulation, chunk_mem_const {chunk}"
    method(f"Liger linear CE {chunk}x", "cross-entropy", what, package="liger-kernel", device="cuda")(mean)
    method(f"Liger none {chunk}x", "policy", f"per token, {what}; RL-PLUS loss", package="liger-kernel", device="cuda")(
        none
    )


for factor in (1, 4, 16):
    liger_chunks(factor)


@method("Liger CuTe", "policy", "Liger none 4x with its kernel in CuTe", package="liger-kernel", device="cuda")
def liger_cute(x: Inputs) -> Step:
    loss = liger_linear(x, x.target, "none", 4, "nvidia-cutedsl")
    return from_logprob(x, lambda: -loss())


@method("Liger none forward", "forward", "cross-entropy per token", package="liger-kernel", device="cuda")
def liger_none_forward(x: Inputs) -> Step:
    loss = liger_linear(x, x.target, "none", 4)
    return lambda: -loss()


def liger_scaled_logprob(x: Inputs) -> Callable[[], Tensor]:
    """Liger's logprobs: in CuTe on Hopper, elsewhere in torch."""
    apply = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda: -apply(x.hidden, x.weight, x.target)


@method("Liger scaled CE", "policy", "per token, CuTe on Hopper, else torch; RL-PLUS loss", package="liger-kernel")
def liger_scaled(x: Inputs) -> Step:
    return from_logprob(x, liger_scaled_logprob(x))


@method("Liger scaled CE forward", "forward", "per token, CuTe on Hopper, else torch", package="liger-kernel")
def liger_scaled_forward(x: Inputs) -> Step:
    return liger_scaled_logprob(x)


@cache
def cce_package(tuned: bool) -> Any:
    """cut_cross_entropy, imported separately for each value of CCE_AUTOTUNE, which it reads on import."""

    def taken() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == "cut_cross_entropy"]
        return {name: sys.modules.pop(name) for name in names}

    others, before = taken(), os.environ.get("CCE_AUTOTUNE")
    os.environ["CCE_AUTOTUNE"] = str(int(tuned))
    try:
        return import_module("cut_cross_entropy")
    finally:
        taken()
        sys.modules.update(others)
        del os.environ["CCE_AUTOTUNE"]
        os.environ.update({} if before is None else {"CCE_AUTOTUNE": before})


def cce(x: Inputs, target: Tensor, reduction: str, tuned: bool = False) -> Callable[[], Tensor]:
    """CCE; on the CPU its fallback: torch.compile of full logits."""
    loss = cce_package(tuned).linear_cross_entropy
    impl = "cce" if x.hidden.is_cuda else "torch_compile"
    return lambda: loss(x.hidden, x.weight, target, reduction=reduction, impl=impl)


@method("CCE", "cross-entropy", "cut_cross_entropy, its defaults", package="cut-cross-entropy", compiles=True)
def cce_mean(x: Inputs) -> Step:
    return from_loss(cce(x, x.ce_target, "mean"))


@method("CCE none", "policy", "cut_cross_entropy per token; RL-PLUS loss", package="cut-cross-entropy", compiles=True)
def cce_none(x: Inputs) -> Step:
    loss = cce(x, x.target, "none")
    return from_logprob(x, lambda: -loss())


@method("CCE tuned", "cross-entropy", "CCE_AUTOTUNE=1", package="cut-cross-entropy", device="cuda", compiles=True)
def cce_tuned(x: Inputs) -> Step:
    return from_loss(cce(x, x.ce_target, "mean", tuned=True))


@method("CCE none tuned", "policy", "CCE_AUTOTUNE=1", package="cut-cross-entropy", device="cuda", compiles=True)
def cce_none_tuned(x: Inputs) -> Step:
    loss = cce(x, x.target, "none", tuned=True)
    return from_logprob(x, lambda: -loss())


@method("CCE none forward", "forward", "cut_cross_entropy per token", package="cut-cross-entropy", compiles=True)
def cce_forward(x: Inputs) -> Step:
    loss = cce(x, x.target, "none")
    return lambda: -loss()


def verl_torch_module(**options: str) -> Any:
    module = submodule("verl.utils.experimental.torch_functional", "verl", "verl.utils")
    return module.FusedLinearForPPO(**options)


@method("verl torch", "policy", "FusedLinearForPPO, its defaults; RL-PLUS loss", package="verl")
def verl_torch(x: Inputs) -> Step:
    loss = verl_torch_module()
    return from_logprob(x, lambda: loss(x.hidden, x.weight, x.target)[0])


@method("verl torch forward", "forward", "FusedLinearForPPO, its defaults", package="verl")
def verl_torch_forward(x: Inputs) -> Step:
    loss = verl_torch_module()
    return lambda: loss(x.hidden, x.weight, x.target)[0]


@method("verl liger", "policy", 'FusedLinearForPPO(impl_backend="liger"); RL-PLUS loss', package="verl")
def verl_liger(x: Inputs) -> Step:
    import_module("liger_kernel.ops")  # without it verl would take its backend torch
    loss = verl_torch_module(impl_backend="liger")
    return from_logprob(x, lambda: loss(x.hidden, x.weight, x.target)[0])


@method("verl triton", "policy", "linear_cross_entropy; RL-PLUS loss", package="verl", device="cuda")
def verl_triton(x: Inputs) -> Step:
    apply = submodule("verl.utils.kernel.linear_cross_entropy", "verl", "verl.utils").linear_cross_entropy
    return from_logprob(x, lambda: apply(x.hidden, x.weight, x.target, 1.0, "none")[0])


def trl_logprob(x: Inputs) -> Callable[[], Tensor]:
    """The kernel of TRL's fused head, with its vocabulary chunk; it is the only form that takes hidden and weight."""
    nothing = {"maybe_gather_lm_head_ctx": lambda *_: nullcontext()}  # gathers under ZeRO-3 only
    is_there = {"is_triton_available": lambda: find_spec("triton") is not None}
    parents = ("trl", "trl.trainer")
    module = submodule(
        "trl.kernels", *parents, transformers={}, transformers__utils=is_there, trl__trainer__utils=nothing
    )
    apply = module.ChunkedLogProbFunction.apply
    return lambda: apply(x.hidden, x.weight, None, x.target, 1.0, 32768, None, 1.0, ("entropy",))[0]


@method("TRL", "policy", "ChunkedLogProbFunction, accumulates dhidden and dW in fp32; RL-PLUS loss", package="trl")
def trl(x: Inputs) -> Step:
    return from_logprob(x, trl_logprob(x))


@method("TRL forward", "forward", "ChunkedLogProbFunction", package="trl")
def trl_forward(x: Inputs) -> Step:
    return trl_logprob(x)


@method("QuACK", "cross-entropy", "chunked_linear_cross_entropy", package="quack-kernels", device="cuda", compiles=True)
def quack(x: Inputs) -> Step:
    """It has no loss per token."""
    loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return from_loss(lambda: loss(x.hidden, x.weight, x.ce_target))
