"""Checks of the per-token inputs, shared by every operation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from rlplus.loss.objective.objective import OBJECTIVES, Objective, find_objective
from rlplus.loss.objective.tokens import TokenConstants


def describe(value: object) -> str:
    """A tensor as an error message shows it."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"


def check_tensor(
    name: str, value: object, like: tuple[torch.Size, torch.device] | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """ValueError unless `value` is a tensor of that shape and device (None: any) and dtype (None: any floating one)."""
    if (
        isinstance(value, Tensor)
        and (like is None or (value.shape, value.device) == like)
        and (value.is_floating_point() if dtype is None else value.dtype == dtype)
    ):
        return value
    kind = "floating" if dtype is None else str(dtype).removeprefix("torch.")
    where = "" if like is None else f" {tuple(like[0])} on {like[1]}"
    raise ValueError(f"want {name} a tensor, {kind}{where}; got {describe(value)}")


ROUNDING = 0.1  # nats by which a logprob of half-precision logits may exceed 0
WEIGHTS = ("token_weight", "entropy_weight")


def check_weight(name: str, value: object, like: tuple[torch.Size, torch.device]) -> Tensor:
    """`check_tensor` of a token's weights: a mask is none, since each of its tokens would count as a whole batch."""
    if isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex():
        got = describe(value)
        raise ValueError(f"want {name} floating, as rlplus.token_weights(mask) returns it for a mask; got {got}")
    return check_tensor(name, value, like)


def expand_advantage(value: Any, shape: torch.Size) -> Any:
    """Expand an advantage per sequence, (..., 1) or (...) without the last axis, to the sequence's tokens."""
    if isinstance(value, Tensor) and value.shape != shape and value.shape in (shape[:-1], (*shape[:-1], 1)):
        return value.reshape(*shape[:-1], 1).expand(shape)
    return value


def _number(name: str, value: object, dtype: torch.dtype) -> object:
    """Convert integers and bools, where they are allowed, to the given dtype."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return value
    return value != 0 if name == "external" else value.to(dtype) if name == "advantage" else value


def objective_of(given: object) -> Objective:
    """The objective; a name's is its preset's, None's the default. ValueError for anything else."""
    if given is None:
        return OBJECTIVES["rlplus"]
    if isinstance(given, str):
        return find_objective(given)
    if not isinstance(given, Objective):
        raise ValueError(f"want objective an rlplus.Objective or the name of a preset; got {type(given).__name__}")
    return given


def check_constants(
    objective: Objective, shape: torch.Size, device: torch.device, dtype: torch.dtype, **inputs: Tensor | None
) -> TokenConstants:
    """All fields, of one shape (...) -> flat constants (N,) in `dtype`; ValueError says what was wanted.

    advantage may be one per sequence, see `expand_advantage`. external: None if no token is.
    """
    for coefficient, needed in (("kl_coef", "ref_logprob"), ("mismatch_cap", "engine_logprob")):
        if getattr(objective, coefficient) and inputs[needed] is None:
            raise ValueError(f"objective.{coefficient}={getattr(objective, coefficient):g} needs {needed}; got None")
    flat: dict[str, Tensor | None] = {}
    if inputs["external"] is None:
        inputs["external"] = torch.zeros(shape, dtype=torch.bool, device=device)
    for name, given in inputs.items():
        if given is None and name in TokenConstants._field_defaults:
            flat[name] = None
            continue
        value = expand_advantage(given, shape) if name == "advantage" else given
        like = (shape, device)
        if name in WEIGHTS:
            flat[name] = check_weight(name, value, like).detach().reshape(-1).to(dtype)
            continue
        kind = torch.bool if name == "external" else None
        value = check_tensor(name, _number(name, value, dtype), like, dtype=kind)
        flat[name] = value.detach().reshape(-1).to(kind or dtype)
    return TokenConstants(**flat)  # type: ignore[arg-type]


def check_differentiated_once() -> None:
    """Refuse a second derivative through a backward pass of constants: it would be silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError("want create_graph=False: the loss is differentiable once; got create_graph=True")


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Refuse forward-mode differentiation: an operation without a rule for it has no tangent, which counts as 0."""
    if any(x is not None and unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError(
            "want gradients by a backward pass: the losses have no forward-mode derivative; got an input with a "
            "tangent (torch.func.jvp, torch.func.jacfwd or torch.autograd.forward_ad)"
        )


def check_values(ok: Tensor, message: str) -> None:
    """A check of values: ValueError on the CPU; elsewhere asserted on the device, so that nothing waits for it."""
    check_each(ok.all().view(1), [message])


def check_each(ok: Tensor, messages: Sequence[str]) -> None:
    """`check_values` of several checks at once, ok (k,), each with its message; the first that fails is raised."""
    if ok.device.type == "cpu" and not torch.compiler.is_compiling():
        for passed, message in zip(ok.tolist(), messages, strict=True):
            if not passed:
                raise ValueError(message)
    else:
        for passed, message in zip(ok.unbind(), messages, strict=True):
            torch._assert_async(passed, message)


def check_constant_values(constants: TokenConstants) -> None:
    """Weights must be finite: an infinite or NaN weight would decide silently which tokens count.

    Where the weight is not 0, advantages must be finite too, and given logprobs must not all be 0 or more: such have
    come as probabilities, or negated. Single ones may be above 0, where they stand for the ratio of a whole sequence;
    engine logprobs, then moved by a sum over the sequence, are not checked. NaN logprobs pass, and make the loss NaN.

    Columns are checked together: each operation of torch is a launch, and a short call on a GPU waits for launches.
    """
    on = constants.token_weight != 0
    finite = {
        "token_weight finite everywhere": constants.token_weight,
        "entropy_weight finite everywhere": constants.entropy_weight,
        "advantage finite where token_weight is not 0": constants.advantage.where(on, 0.0),
    }
    given = {what: values for what, values in finite.items() if values is not None}
    ok = (torch.stack(list(given.values())).abs() < torch.inf).all(1)
    check_each(ok, [f"want {what}; got NaN or Inf" for what in given])
    logprobs = {name: getattr(constants, name) for name in ("old_logprob", "behavior_logprob", "ref_logprob")}
    names = [name for name, value in logprobs.items() if value is not None]
    if names:
        values = torch.stack([logprobs[name] for name in names]).where(on, 0.0)
        possible = (values < 0).any(1) | ~(values > ROUNDING).any(1)
        wanted = f"in nats, at most 0; got none below 0, and some above {ROUNDING}"
        check_each(possible, [f"want {name} {wanted}" for name in names])


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte and the one after its last."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def check_apart(weight_grad: Tensor, inputs: Sequence[Any]) -> None:
    start, end = _memory(weight_grad)
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.numel():
            first, last = _memory(tensor)
            if first < end and start < last:
                raise ValueError("want weight_grad in memory that no input uses; got one that overlaps")
