"""A language-model head and its products, which the backends share."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlplus.loss.head.cost import Shape
from rlplus.loss.objective.tokens import FLOOR

VOCABULARY_BLOCK = 8192  # rows of a half-precision weight, or of its gradient, that are converted at a time


class Head(NamedTuple):
    """hidden (N, H), weight (V, H), bias (V,) or None, target (N,) int64, row_temperature (N,) in `dtype` or None.

    z = softcap * tanh(x / softcap) / row_temperature of x = (hidden weight^T + bias) / temperature; without a softcap,
    x / row_temperature; without a row_temperature, nothing is divided.

    group: the name of a process group whose ranks have the rows of weight and bias, in the order of ranks; "": whole.
    kept_offsets (N + 1,), kept_tokens (K,) int64 or None: `rlplus.loss.backends.kept_tokens` has them, no backend has.
    uniform (N,) in [0, 1), fp32, or None: the backward pass is sampled by these, with `threshold`; else it is exact.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    temperature: float
    softcap: float | None = None
    row_temperature: Tensor | None = None
    group: str = ""
    kept_offsets: Tensor | None = None
    kept_tokens: Tensor | None = None
    uniform: Tensor | None = None
    threshold: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulators."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def shape(self) -> Shape:
        """Sizes alone, for `rlplus.loss.head.cost`."""
        V, H = self.weight.shape
        narrow = self.hidden.dtype.itemsize
        return Shape(len(self.target), H, V, narrow, self.dtype.itemsize)

    def new_column(self) -> Tensor:
        """Uninitialized memory for a number of each row, (N,), in `dtype`."""
        return self.hidden.new_empty(len(self.target), dtype=self.dtype)

    def rounded(self) -> "Head":
        """Weight and bias in the dtype of hidden."""
        dtype = self.hidden.dtype
        return self._replace(weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def whole_vocabulary(self) -> "Head":
        """Without kept tokens."""
        return self._replace(kept_offsets=None, kept_tokens=None)

    def rows(self, which: slice | Tensor) -> "Head":
        """The head of those rows alone."""
        assert self.kept_offsets is None
        return self._replace(
            hidden=self.hidden[which],
            target=self.target[which],
            row_temperature=None if self.row_temperature is None else self.row_temperature[which],
            uniform=None if self.uniform is None else self.uniform[which],
        )

    @property
    def divisor(self) -> float | Tensor:
        """The divisor of z outside the softcap: a number, or one per row (n,)."""
        return self.temperature if self.row_temperature is None else self.temperature * self.row_temperature

    @property
    def logits(self) -> tuple[torch.dtype, str, bool]:
        """Inputs of a backend's scratch per logit: hidden's dtype, the type of device, whether there is a cap."""
        return self.hidden.dtype, self.hidden.device.type, self.softcap is not None

    @property
    def mixed(self) -> bool:
        """Whether half-precision inputs go into GEMMs that accumulate and return fp32: on CUDA; the CPU has none."""
        return self.hidden.is_cuda and self.hidden.dtype != self.dtype


class Statistics(NamedTuple):
    """Statistics of rows of z, (n,) each: a reference near max z, log sum e^(z - reference), log p[target], entropy."""

    reference: Tensor
    logsum: Tensor
    logprob: Tensor
    entropy: Tensor


class RunningStatistics:
    """`Statistics` of a head's rows from blocks of its vocabulary: online softmax, as the row kernels do over columns.

    of_block: (block, its logits, which may be overwritten) -> the block's statistics, which count unless all its logits
    are -inf, and the target's logit if the block contains it.
    """

    def __init__(self, head: Head, of_block: Callable[[Head, Tensor], Statistics]) -> None:
        self.of_block = of_block
        # rest: the sum of e^(z - max) without the largest term, a 1 that would take its digits.
        self.rest = head.new_column().fill_(-1.0)
        self.moment = head.new_column().zero_()
        self.top = head.new_column().fill_(-torch.inf)
        self.hit = head.new_column().fill_(torch.nan)  # z[target] - max, once its block was added

    def take(self, block: Head, z: Tensor) -> None:
        """Add a block, whose head has the block's weight and bias and targets relative to the block's start."""
        rows = self.of_block(block, z)
        top = self.top
        rest = self.rest
        new = torch.maximum(top, rows.reference)
        origin = new.masked_fill(new == -torch.inf, 0.0)  # all -inf so far: no inf - inf
        up = (top - origin).clamp(min=FLOOR)
        block_up = (rows.reference - origin).clamp(min=FLOOR)
        empty = rows.reference == -torch.inf
        block_rest = rows.logsum.expm1().masked_fill(empty, -1.0)
        total = 1 + rest
        block_total = 1 + block_rest
        block_moment = (block_total * (rows.logsum - rows.entropy)).masked_fill(empty, 0.0)
        self.moment = up.exp() * (self.moment + up * total) + block_up.exp() * (block_moment + block_up * block_total)
        self.rest = torch.where(
            rows.reference > top, block_rest + up.exp() * total, rest + block_up.exp() * block_total
        )
        here = (block.target >= 0) & (block.target < len(block.weight))
        block_hit = (rows.logprob + rows.logsum).masked_fill(empty, FLOOR) + block_up
        self.hit = torch.where(here, block_hit, self.hit + up).clamp(min=FLOOR)
        self.top = new

    def finish(self) -> Statistics:
        logsum = self.rest.log1p().masked_fill(self.top == -torch.inf, torch.nan)
        entropy = logsum - self.moment / (1 + self.rest)
        return Statistics(self.top, logsum, (self.hit - logsum).clamp(min=FLOOR), entropy)


def scaled(z: Tensor, head: Head) -> Tensor:
    """Turn hidden weight^T (n, V) into x = (hidden weight^T + bias) / temperature, in place."""
    if head.bias is not None:
        z += head.bias
    if head.temperature != 1.0:
        z /= head.temperature
    return z


def capped(x: Tensor, head: Head) -> Tensor:
    """Turn x into the logits z of the softmax, in place."""
    if head.softcap is not None:
        x.div_(head.softcap).tanh_().mul_(head.softcap)
    return x if head.row_temperature is None else x.div_(head.row_temperature[:, None])


def cap_slope(x: Tensor, head: Head) -> Tensor | None:
    """dz/dx = 1 - tanh^2(x / softcap) in new memory, as 1 / cosh^2: the difference would cancel near tanh = 1."""
    return None if head.softcap is None else (x / head.softcap).cosh_().pow_(-2)


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    step = len(weight) if weight.dtype == dtype else VOCABULARY_BLOCK
    for start in range(0, len(weight), step):
        yield slice(start, start + step), weight[start : start + step].to(dtype)


def raw_logits(head: Head) -> Tensor:
    """hidden weight^T (n, V), in the accumulation dtype."""
    if head.mixed:
        return torch.mm(head.hidden, head.weight.t(), out_dtype=head.dtype)
    return logits_into(head, head.hidden.new_empty(len(head.hidden), len(head.weight), dtype=head.dtype))


def logits_into(head: Head, z: Tensor) -> Tensor:
    """hidden weight^T of inputs of any dtype, computed in the dtype of z (n, V) and written there."""
    hidden = head.hidden.to(z.dtype)
    for v, block in _blocks(head.weight, z.dtype):
        torch.mm(hidden, block.t(), out=z[:, v])
    return z


def dhidden(dz: Tensor, head: Head) -> Tensor:
    """dz weight: (n, V) -> (n, H), in the accumulation dtype."""
    if not dz.shape[1]:  # a rank that has none of the head's rows
        return dz.new_zeros(len(dz), head.weight.shape[1], dtype=head.dtype)
    if head.mixed:
        return torch.mm(dz.to(head.hidden.dtype), head.weight, out_dtype=head.dtype)
    return sum(dz[:, v] @ block for v, block in _blocks(head.weight, head.dtype))  # type: ignore[return-value]


def dweight(dz: Tensor, hidden: Tensor) -> Tensor:
    """dz^T hidden: (n, v), (n, H) -> (v, H), in fp32 (fp64); on the CPU in the dtype of dz."""
    if dz.is_cuda and hidden.dtype.itemsize == 2:
        return torch.mm(dz.to(hidden.dtype).t(), hidden, out_dtype=torch.float32)
    return torch.mm(dz.t(), hidden.to(dz.dtype))


def add_dweight(total: Tensor, dz: Tensor, hidden: Tensor, beta: float = 1.0) -> None:
    """total (V, H) = beta total + dz^T hidden; with beta 0 the contents of total are ignored."""
    if hidden.is_cuda and hidden.dtype != total.dtype:  # one GEMM that accumulates: no product in memory
        torch.addmm(total, dz.to(hidden.dtype).t(), hidden, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, dz.t(), hidden.to(dz.dtype), beta=beta, out=total)
