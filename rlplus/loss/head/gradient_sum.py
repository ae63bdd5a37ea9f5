"""The gradients of a head's inputs: which a call wants, and their sums over chunks of rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.head.head import Head, add_dweight, dhidden

Index = slice | Tensor
Gradients = tuple[Tensor, Tensor, Tensor]
"""dhidden (N, H), dweight (V, H), dbias (V,); one that is not needed is empty."""


class Needs(NamedTuple):
    """Whether an input of a head needs its gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


class Want(NamedTuple):
    """The gradients that a call wants beside its values, and the memory that it may take.

    weight_grad (V, H) fp32 (fp64) or None: the gradient of weight is added there, and needs.weight is False.
    scratch_bytes: for logits.
    """

    scratch_bytes: float
    needs: Needs = Needs()
    weight_grad: Tensor | None = None

    @property
    def weight(self) -> bool:
        """Whether the gradient of weight is computed."""
        return self.needs.weight or self.weight_grad is not None

    @property
    def some(self) -> bool:
        """Whether any gradient is computed."""
        return any(self.needs) or self.weight_grad is not None

    def into(self, weight_grad: Tensor | None) -> "Want":
        """The same with the gradient of weight added to `weight_grad`, unless that is None."""
        needs = self.needs._replace(weight=self.needs.weight and weight_grad is None)
        return self._replace(needs=needs, weight_grad=weight_grad)


class GradientSum:
    """The gradients of a head's inputs, summed over chunks of rows.

    Those of weight and bias accumulate in fp32 (fp64) and are rounded once. factors: values to which the slopes of rows
    are proportional; for fp16 they decide `scale`, by which the caller multiplies the slopes. None: there is no scale.
    """

    def __init__(self, head: Head, want: Want, factors: list[Tensor] | None) -> None:
        new = head.hidden.new_zeros
        self.head = head
        self.want = want
        self.hidden = new(head.hidden.shape if want.needs.hidden else (0,))
        self.weight = want.weight_grad  # None: the first chunk writes it, since zeros would be read once more
        self.bias = new(head.weight.shape[:1] if want.needs.bias else (0,), dtype=head.dtype)
        fp16 = want.some and gradient_dtype(head) == torch.float16
        self.scale = fp16_scale(*factors) if fp16 and factors is not None else None
        if self.scale is not None and self.weight is not None:
            self.weight.mul_(self.scale)  # a power of two: exact, and undone at the end

    def scaled(self, slopes: Tensor) -> Tensor:
        return slopes if self.scale is None else slopes * self.scale

    def add(
        self, rows: Index, head: Head, dz: Tensor, active: Tensor, memory: Tensor | None = None, clean: bool = False
    ) -> None:
        """Add the products of dz (n, V), which may be overwritten; head: that of these rows alone.

        active (n,): the rows that have a gradient. memory: like dz, may be overwritten. clean: whether the other rows
        of dz are 0.
        """
        hidden = head.hidden
        if dz.device.type == "cpu":  # leave rows without a gradient out of the GEMMs
            index = active.nonzero().squeeze(1)
            if len(index) < len(active):
                out = None if memory is None else memory[: len(index)]
                dz = torch.index_select(dz, 0, index, out=out)
                hidden = hidden[index]
                rows = index + (rows.start or 0) if isinstance(rows, slice) else rows[index]
        else:  # counting them would wait for the device
            hidden = hidden.masked_fill(~active[:, None], 0.0)
            dz = dz if clean else dz.masked_fill_(~active[:, None], 0.0)
        if self.want.needs.hidden:
            self.set_hidden(rows, dhidden(dz, head))
        if self.want.weight:
            self.add_weight(dz, hidden)
        if self.want.needs.bias:
            self.bias.add_(dz.sum(0, dtype=self.bias.dtype))

    def set_hidden(self, rows: Index, gradient: Tensor) -> None:
        """gradient (n, H), in fp32 (fp64); it may be overwritten."""
        if self.scale is not None:
            gradient /= self.scale
        self.hidden[rows] = gradient.to(self.hidden.dtype)

    def add_weight(self, dz: Tensor, hidden: Tensor) -> None:
        """Add dz^T hidden."""
        if self.weight is not None:
            add_dweight(self.weight, dz, hidden)
        else:
            self.weight = hidden.new_empty(self.head.weight.shape, dtype=self.head.dtype)
            add_dweight(self.weight, dz, hidden, beta=0.0)

    def finish(self) -> Gradients:
        """Those of hidden and weight in the dtype of hidden, bias's in fp32 (fp64). One in weight_grad is not
        returned."""
        total = self.weight
        if total is None:
            total = self.head.hidden.new_zeros(self.head.weight.shape if self.want.needs.weight else (0,))
        if self.scale is not None:
            total.div_(self.scale)
            self.bias.div_(self.scale)
        total = total.new_empty(0) if self.want.weight_grad is not None else total
        return self.hidden, total.to(self.hidden.dtype), self.bias


def gradient_dtype(head: Head) -> torch.dtype:
    """The dtype of the backward GEMMs: the inputs', but fp32 if no GEMM from half precision to fp32 exists."""
    return head.dtype if head.hidden.device.type == "cpu" else head.hidden.dtype


def fp16_scale(*slopes: Tensor) -> Tensor:
    """A power of two that brings the largest slope near 1: in fp16 the gradients of weights like 1e-6 would vanish."""
    largest = torch.cat([slopes[0].new_zeros(1), *(s.abs() for s in slopes)]).amax()
    usable = (largest > 2.0**-100) & (largest < 2.0**100)
    return torch.where(usable, torch.exp2(-largest.where(usable, 1.0).log2().floor()), 1.0)
