"""A `Head` from the arguments of the operations, which are checked here."""

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlplus.loss.head.head import Head
from rlplus.loss.objective.inputs import check_tensor, describe, refuse_tangents

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SUMMED = ", with grad_placements=[Partial()] where ranks have tokens of their own: their gradients add up"


def make_head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    numbers: tuple[float, float | None, float | Tensor],
    group: "ProcessGroup | None",
    kept: tuple[Tensor, Tensor] | None = None,
) -> Head:
    """numbers: logit_scale, logit_softcap, temperature. A `Head` has temperature / scale and softcap / temperature.

    A temperature per token is the head's row_temperature, and the other one is 1.
    """
    weight, bias, group_name = _own_rows(weight, bias, group)
    check_plain(hidden=hidden, weight=weight, target=target, bias=bias)
    tensors = isinstance(hidden, Tensor) and isinstance(weight, Tensor)
    some = tensors and (weight.numel() > 0 or (group_name and weight.ndim == 2 and weight.shape[1] > 0))
    if not some or hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"want hidden (..., H) and weight (V, H), H > 0, V > 0; got {describe(hidden)} and {describe(weight)}"
        )
    if not {hidden.dtype, weight.dtype} <= set(DTYPES) or weight.device != hidden.device:
        raise ValueError(
            "want hidden and weight of bf16, fp16, fp32 or fp64 and of one device; "
            f"got {describe(hidden)}, {describe(weight)}"
        )
    if isinstance(target, Tensor) and target.dtype == torch.int32:
        target = target.long()
    check_tensor("target", target, (hidden.shape[:-1], hidden.device), dtype=torch.int64)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[:1], hidden.device))
    refuse_tangents(hidden, weight, bias)
    scale, softcap, temperature = numbers
    rows: Tensor | None = None
    if isinstance(temperature, Tensor) and temperature.ndim == 0 and temperature.device.type == "cpu":
        temperature = temperature.item()
    elif isinstance(temperature, Tensor):
        rows = _row_temperature(temperature, hidden)
        temperature = 1.0
    # Comparisons only: a number that changes is a symbol to torch.compile, which math.isfinite cannot take.
    for name, value in {"logit_scale": scale, "logit_softcap": softcap, "temperature": temperature}.items():
        optional = name == "logit_softcap" and value is None
        if not (optional or (isinstance(value, int | float) and 0 < value < inf)):
            got = describe(value) if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"want {name} a finite number > 0; got {got}")
    return Head(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1),
        float(temperature / scale), None if softcap is None else float(softcap / temperature), rows, group_name,
        *_kept(kept, target, group_name),
    )  # fmt: skip


def _kept(kept: Any, target: Tensor, group: str) -> tuple[Tensor | None, Tensor | None]:
    """offsets and tokens, int64."""
    if kept is None:
        return None, None
    if group:
        raise ValueError("want kept None with a head that is split over ranks")
    if not (isinstance(kept, tuple | list) and len(kept) == 2 and all(isinstance(x, Tensor) for x in kept)):
        raise ValueError(f"want kept a pair of tensors, offsets and tokens; got {describe(kept)}")
    offsets, tokens = kept
    if offsets.dtype == torch.int32:
        offsets = offsets.long()
    if tokens.dtype == torch.int32:
        tokens = tokens.long()
    for name, tensor, length in (("offsets", offsets, target.numel() + 1), ("tokens", tokens, tokens.numel())):
        check_tensor(f"kept {name}", tensor, (torch.Size([length]), target.device), dtype=torch.int64)
    return offsets, tokens


def _own_rows(weight: Any, bias: Any, group: Any) -> tuple[Tensor, Tensor | None, str]:
    """This rank's rows of a split head, and the name of the group that has it; "" with a whole head."""
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import Shard

        place = weight.placements[0] if len(weight.placements) == 1 else None
        if type(place) is not Shard or place.dim != 0 or group is not None:
            also = "" if group is None else ", and no group beside it"
            raise ValueError(
                f"want weight a plain tensor, or a DTensor of one mesh dimension, Shard(0){also}; got a DTensor, "
                f"{describe(weight)}, {weight.placements}: weight.full_tensor() is plain{SUMMED}"
            )
        if bias is not None and getattr(bias, "placements", None) != weight.placements:
            got = f"{describe(bias)}, {getattr(bias, 'placements', 'a plain tensor')}"
            raise ValueError(f"want bias split as weight is, a DTensor, {weight.placements}; got {got}")
        group = weight.device_mesh.get_group()
        weight = weight.to_local()
        bias = None if bias is None else bias.to_local()
    if group is None:
        return weight, bias, ""
    if not hasattr(group, "group_name"):
        raise ValueError(f"want group a process group that this rank belongs to; got {group!r}")
    return weight, bias, group.group_name


def check_plain(**inputs: Any) -> None:
    for name, value in inputs.items():
        if hasattr(value, "full_tensor"):
            raise ValueError(
                f"want {name} a plain tensor; got a DTensor, {describe(value)}, {value.placements}: pass "
                f"{name}.full_tensor(){SUMMED}, or call in the forward pass of a module whose parameters FSDP gathered"
            )


def _row_temperature(temperature: Tensor, hidden: Tensor) -> Tensor:
    """One temperature per row of a `Head`; a 0-d tensor on a device is expanded: reading it would wait."""
    shape = hidden.shape[:-1]
    each = temperature.expand(shape) if temperature.ndim == 0 else temperature
    check_tensor("temperature", each, (shape, hidden.device))
    return each.detach().reshape(-1).to(torch.promote_types(hidden.dtype, torch.float32))
