"""The fused operations as torch sees them: custom ops with fake versions and gradients.

The policy loss computes its gradients in the forward pass and hands them out in the backward pass, scaled.
"""

from collections.abc import Sequence
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlplus.objective import MISMATCH_STATS, STATS, Objective, TokenConstants
from rlplus.objective.inputs import check_differentiated_once, check_values, check_weights
from rlplus.ops import least
from rlplus.ops.head import Head
from rlplus.ops.precision import full_precision

PIECE = 2048  # rows of a gradient that are scaled at a time
COEFFICIENTS = ("gamma", "kappa", "clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef", "mismatch_cap")
MODULES = {  # of rlplus.ops, by backend: policy_loss, logprob, logprob_backward, each as in `chunked`
    "torch": "chunked",
    "cpp": "cpp",
    "triton": "triton",
}


def implementation(backend: str) -> ModuleType:
    """The module that computes; a backend is imported when it is first used."""
    return import_module(f"rlplus.ops.{MODULES[backend]}")


def encode(objective: Objective) -> tuple[str, list[float]]:
    """An objective in the types that a torch op takes; None becomes inf."""
    values = [getattr(objective, name) for name in COEFFICIENTS]
    return f"{objective.internal}/{objective.external}", [inf if v is None else float(v) for v in values]


def decode(surrogates: str, coefficients: Sequence[float]) -> Objective:
    internal, external = surrogates.split("/")
    values = {name: None if v == inf else v for name, v in zip(COEFFICIENTS, coefficients, strict=True)}
    return Objective(internal, external, **values)  # type: ignore[arg-type]


def check_targets(target: Tensor, counted: Tensor, V: int) -> None:
    check_values(
        ((target >= 0) & (target < V)) | ~counted,
        f"want target in [0, {V}) wherever the token's weight is not 0; got a value outside",
    )


def _policy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    constants: Sequence[Tensor],
    names: str,
    surrogates: str,
    coefficients: Sequence[float],
    temperature: float,
    grad_filter: float,
    scratch_bytes: float,
    needs: Sequence[bool],
    backend: str,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = TokenConstants(**dict(zip(names.split(), constants, strict=True)))
    objective = decode(surrogates, coefficients)
    check_weights(row)
    check_targets(target, row.token_weight != 0, len(weight))
    head = Head(hidden, weight, bias, target, temperature)
    arguments = (head, row, objective, grad_filter, scratch_bytes, list(needs), weight_grad)
    name, _, memory = backend.partition("/")
    with full_precision(hidden.device):
        if memory:
            loss, logprob, entropy, stats, grads = least.policy_loss(implementation(name), *arguments)
        else:
            loss, logprob, entropy, stats, grads = implementation(name).policy_loss(*arguments)
    return loss, logprob, entropy, stats, *grads


@torch.library.custom_op("rlplus::linear_policy_loss", mutates_args=())
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    constants: Sequence[Tensor],
    names: str,
    surrogates: str,
    coefficients: Sequence[float],
    temperature: float,
    grad_filter: float,
    scratch_bytes: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> loss, logprob, entropy, stats, dhidden, dweight, dbias (without elements where not needed).

    names: those of `constants`, separated by spaces. (A list with None in it would change the form that torch wants
    the backward pass to return with the inputs.) backend: its name, with "/least" behind it for that module.
    """
    return _policy_loss(
        hidden, weight, bias, target, constants, names, surrogates, coefficients, temperature, grad_filter,
        scratch_bytes, needs, backend,
    )  # fmt: skip


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


@torch.library.custom_op("rlplus::linear_policy_loss_into", mutates_args=("weight_grad",))
def linear_policy_loss_into(
    weight_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    constants: Sequence[Tensor],
    names: str,
    surrogates: str,
    coefficients: Sequence[float],
    temperature: float,
    grad_filter: float,
    scratch_bytes: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same with the gradient of weight added to weight_grad; not differentiable, see `hand_out`."""
    start, end = _memory(weight_grad)
    for tensor in (hidden, weight, bias, target, *constants):
        if tensor is not None and tensor.numel():
            first, last = _memory(tensor)
            if first < end and start < last:
                raise ValueError("want weight_grad in memory that no input uses; got one that overlaps")
    return _policy_loss(
        hidden, weight, bias, target, constants, names, surrogates, coefficients, temperature, grad_filter,
        scratch_bytes, needs, backend, weight_grad,
    )  # fmt: skip


@linear_policy_loss.register_fake
def _shapes(hidden, weight, bias, target, constants, names, *options):  # type: ignore[no-untyped-def]
    *_, needs, _ = options
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    stats = STATS + MISMATCH_STATS if "engine_logprob" in names.split() else STATS
    rows = (hidden.new_empty(len(target), dtype=dtype) for _ in range(2))
    wanted = zip((hidden.shape, weight.shape, weight.shape[:1]), needs, strict=True)
    grads = (hidden.new_empty(shape if need else (0,)) for shape, need in wanted)
    return hidden.new_empty((), dtype=dtype), *rows, hidden.new_empty(len(stats), dtype=dtype), *grads


@linear_policy_loss_into.register_fake
def _(weight_grad, *inputs):  # type: ignore[no-untyped-def]
    return _shapes(*inputs)


@torch.library.custom_op("rlplus::hand_out", mutates_args=())
def hand_out(loss: Tensor, hidden: Tensor, bias: Tensor | None, dhidden: Tensor, dbias: Tensor) -> Tensor:
    """The loss, whose gradients in hidden and bias are given."""
    return loss.clone()


hand_out.register_fake(lambda loss, *_: torch.empty_like(loss))


def _keep_given(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[3:])


def _hand_out(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    check_differentiated_once()
    given = zip(ctx.saved_tensors, ctx.needs_input_grad[1:3], strict=True)
    return None, *(_scale(g, grad_loss, in_place=False) if need else None for g, need in given), None, None


hand_out.register_autograd(_hand_out, setup_context=_keep_given)


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)  # no zeros as large as dweight for the outputs that nothing depends on
    ctx.save_for_backward(*output[4:])
    ctx.constants = len(inputs[4])


def _scale(gradient: Tensor, by: Tensor, in_place: bool) -> Tensor:
    """gradient * by, multiplied in fp32 (fp64): a loss scale of 65536 is infinite in fp16."""
    if not in_place:
        return (gradient.to(by.dtype) * by).to(gradient.dtype)
    if by.device.type == "cpu" and by.item() == 1:  # elsewhere reading it would wait for the device
        return gradient
    for piece in gradient.split(PIECE):  # all of dweight in fp32 would be the peak of memory
        piece.copy_(piece.to(by.dtype) * by)
    return gradient


def _scale_gradients(ctx: Any, grad_loss: Tensor | None, *_: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    check_differentiated_once()
    if grad_loss is None:  # nothing depends on the loss
        return *(None,) * 4, [None] * ctx.constants, *(None,) * 8
    # Where the graph is not kept nobody else reads them, and a second dweight would be the peak of memory.
    last = not torch._C._autograd._get_current_graph_task_keep_graph()
    needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    # A compiler's stand-in for a tensor is of another type; its graph may not change what the forward pass returned.
    grads = (_scale(g, grad_loss, last and type(g) is Tensor) if need else None for g, need in needed)
    return *grads, None, [None] * ctx.constants, *(None,) * 8


linear_policy_loss.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("rlplus::linear_logprob", mutates_args=())
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    scratch_bytes: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    check_targets(target, torch.ones_like(target, dtype=torch.bool), len(weight))
    with full_precision(hidden.device):
        return implementation(backend).logprob(Head(hidden, weight, bias, target, temperature), scratch_bytes)


@linear_logprob.register_fake
def _(hidden, weight, bias, target, temperature, scratch_bytes, backend):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty(len(target), dtype=dtype), hidden.new_empty(len(target), dtype=dtype)


@torch.library.custom_op("rlplus::linear_logprob_backward", mutates_args=())
def linear_logprob_backward(
    dlogprob: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float,
    scratch_bytes: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    head = Head(hidden, weight, bias, target, temperature)
    with full_precision(hidden.device):
        return implementation(backend).logprob_backward(head, dlogprob, dentropy, scratch_bytes, list(needs))


@linear_logprob_backward.register_fake
def _(dlogprob, dentropy, hidden, weight, bias, target, temperature, scratch_bytes, needs, backend):  # type: ignore[no-untyped-def]
    wanted = zip((hidden.shape, weight.shape, weight.shape[:1]), needs, strict=True)
    return tuple(hidden.new_empty(shape if need else (0,)) for shape, need in wanted)


def _keep_inputs(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.temperature, ctx.scratch_bytes, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _recompute(ctx: Any, dlogprob: Tensor, dentropy: Tensor) -> tuple[Tensor | None, ...]:
    check_differentiated_once()
    needs = list(ctx.needs_input_grad[:3])
    options = (ctx.temperature, ctx.scratch_bytes, needs, ctx.backend)
    grads = linear_logprob_backward(dlogprob, dentropy, *ctx.saved_tensors, *options)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 4


linear_logprob.register_autograd(_recompute, setup_context=_keep_inputs)
