"""Checks of the per-token inputs, shared by every operation."""

import torch
from torch import Tensor

from rlplus.objective.presets import Objective
from rlplus.objective.surrogates import TokenConstants

NAMES = ("advantage", "token_weight", "external", "old_logprob", "behavior_logprob", "ref_logprob", "engine_logprob")
NAMES += ("entropy_weight",)
REQUIRED = ("advantage", "token_weight", "external")


def describe(value: object) -> str:
    """A tensor as an error message shows it."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"


def check_tensor(
    name: str, value: object, shape: torch.Size, device: torch.device, *, dtype: torch.dtype | None = None
) -> Tensor:
    """ValueError unless `value` is a tensor of that shape, device and dtype (None: any floating dtype)."""
    fits = isinstance(value, Tensor) and value.shape == shape and value.device == device
    if not fits or (not value.is_floating_point() if dtype is None else value.dtype != dtype):  # type: ignore[attr-defined]
        kind = "floating" if dtype is None else str(dtype).removeprefix("torch.")
        raise ValueError(f"want {name} {kind} {tuple(shape)} on {device}; got {describe(value)}")
    return value  # type: ignore[return-value]


def check_constants(
    inputs: dict[str, Tensor | None], shape: torch.Size, device: torch.device, dtype: torch.dtype, objective: Objective
) -> TokenConstants:
    """Per-token inputs of one shape (...) -> flat constants (N,) in `dtype`; ValueError says what was wanted."""
    if not isinstance(objective, Objective):
        raise ValueError(f"want objective an rlplus.Objective; got {type(objective).__name__}")
    for coefficient, needed in (("kl_coef", "ref_logprob"), ("mismatch_cap", "engine_logprob")):
        if getattr(objective, coefficient) and inputs[needed] is None:
            raise ValueError(f"objective.{coefficient}={getattr(objective, coefficient):g} needs {needed}; got None")
    flat: dict[str, Tensor | None] = {}
    for name in NAMES:
        value = inputs[name]
        if value is None and name not in REQUIRED:
            flat[name] = None
            continue
        value = check_tensor(name, value, shape, device, dtype=torch.bool if name == "external" else None)
        flat[name] = value.detach().reshape(-1).to(value.dtype if name == "external" else dtype)
    return TokenConstants(**flat)  # type: ignore[arg-type]


def check_values(ok: Tensor, message: str) -> None:
    """A check of values: ValueError on the CPU; elsewhere asserted on the device, so that nothing waits for it."""
    if ok.device.type == "cpu" and not torch.compiler.is_compiling():
        if not ok.all():
            raise ValueError(message)
    else:
        torch._assert_async(ok.all(), message)


def check_weights(constants: TokenConstants) -> None:
    """Weights must be finite: an infinite or NaN weight would decide silently which tokens count."""
    check_values(constants.token_weight.isfinite(), "want token_weight finite everywhere; got NaN or Inf")
    if constants.entropy_weight is not None:
        check_values(constants.entropy_weight.isfinite(), "want entropy_weight finite everywhere; got NaN or Inf")
