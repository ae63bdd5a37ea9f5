"""Inputs, exact results and launches of the kernels of a head, for tests of their compiled code."""

import math
import os
from typing import NamedTuple

import torch
from compiled_known import KNOWN
from ptx.launcher import Run, findings_of
from torch import Tensor

from rlplus.kernels.linear_logprob import ENTROPY, LOGPROB, LOGSUM, MAX, WIDTH
from rlplus.loss.head import FLOOR

os.environ["PTX_TOLERATED"] = KNOWN
EPS = torch.finfo(torch.float32).eps
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Transform(NamedTuple):
    """From logits to z."""

    bias: Tensor | None = None
    temperature: float = 0.7
    softcap: float | None = None
    row_temperature: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        dtype = logits.dtype
        x = logits if self.bias is None else logits + self.bias.to(dtype)
        x = x / self.temperature
        z = x if self.softcap is None else self.softcap * (x / self.softcap).tanh()
        return z if self.row_temperature is None else z / self.row_temperature[:, None].to(dtype)

    def slope(self, logits: Tensor) -> Tensor:
        """dz / dlogits."""
        x = (logits if self.bias is None else logits + self.bias.to(logits.dtype)) / self.temperature
        cap = 1 if self.softcap is None else 1 - (x / self.softcap).tanh() ** 2
        own = 1 if self.row_temperature is None else self.row_temperature[:, None].to(x.dtype)
        return cap / (self.temperature * own) * torch.ones_like(x)


class Statistics(NamedTuple):
    logprob: Tensor
    entropy: Tensor
    top: Tensor
    logsum: Tensor


def statistics(z: Tensor, target: Tensor) -> Statistics:
    """The columns that the kernels fill; NaN for the logprob of what is no token."""
    logp = z.log_softmax(1).clamp(min=FLOOR)
    known = (target >= 0) & (target < z.shape[1])
    logprob = logp.gather(1, target.where(known, 0)[:, None])[:, 0].masked_fill(~known, math.nan)
    top = z.amax(1)
    return Statistics(logprob, -(logp.exp() * logp).sum(1), top, (z - top[:, None]).exp().sum(1).log())


def check_statistics(values: Tensor, logits: Tensor, reach: Tensor, target: Tensor, transform: Transform) -> None:
    """Within twice the error of plain fp32 and the rounding of the terms; `reach`: the largest |terms| of each row."""
    exact = statistics(transform(logits.double()), target)
    plain = statistics(transform(logits.float()), target)
    size = 8 * EPS * reach.clamp(min=1)
    for column, e, p, more in zip(
        (LOGPROB, ENTROPY, MAX, LOGSUM), exact, plain, (1, exact.entropy.clamp(min=1), 1, 1), strict=True
    ):
        got = values[:, column.value].double()
        assert torch.equal(got.isnan(), e.isnan())
        bound = 2 * (p - e).abs().nan_to_num().max() + size * more
        assert ((got - e).abs().nan_to_num() <= bound).all(), f"column {column.value}"


def given_values(exact: Statistics, dlogprob: Tensor, dentropy: Tensor) -> Tensor:
    """`values` of rows as the statistics and the objective leave them."""
    return torch.stack([*exact, dlogprob, dentropy], 1).float()


def gradient(logits: Tensor, values: Tensor, target: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """dlogits (n, V) of these values in float64, and the size of its rounding errors in units of EPS max |z|."""
    v, z = values.double(), transform(logits.double())
    dlogprob, dentropy, entropy = v[:, 4, None], v[:, 5, None], v[:, ENTROPY.value, None]
    logp = (z - v[:, MAX.value, None] - v[:, LOGSUM.value, None]).clamp(min=FLOOR)
    p, onehot = logp.exp(), torch.zeros_like(z).scatter_(1, target[:, None], 1.0)
    slope = transform.slope(logits.double())
    out = (dlogprob * (onehot - p) - dentropy * p * (logp + entropy)) * slope
    size = (dlogprob.abs() * (onehot + p) + dentropy.abs() * p * (1 + logp.abs() + entropy.abs())) * slope.abs()
    on = (dlogprob != 0) | (dentropy != 0)
    return torch.where(on, out, 0.0), size * z.abs().amax(1, keepdim=True).clamp(min=1)


def check_gradient(got: Tensor, want: Tensor, size: Tensor) -> None:
    """Rounded once to the dtype of `got`, after fp32 arithmetic."""
    info = torch.finfo(got.dtype)
    rounding = 0 if got.dtype == F32 else want.abs() * info.eps / 2 + info.tiny * info.eps
    assert ((got.double() - want).abs() <= 16 * EPS * size + rounding + 1e-37).all()


def rows(n: int, V: int, W: int, offset: int = 0, scale: float = 3.0) -> Tensor:
    """Logits (n, W) in a larger buffer; the columns past V and the gaps were never written."""
    buffer = torch.empty(offset + n * W)
    logits = buffer[offset:].view(n, W)
    logits[:, :V] = scale * torch.randn(n, V)
    return logits


def targets(n: int, V: int) -> Tensor:
    """Tokens, the last of all among them; in more than three rows two that are none."""
    target = torch.randint(V, (n,))
    target[0] = V - 1
    if n > 3:
        target[1], target[2] = -1, V
    return target


def new_values(n: int) -> Tensor:
    return torch.empty(n, WIDTH.value)


def check_launches(runs: list[Run], *padded: str) -> None:
    """No findings, and nothing is read that was never written, but for the padding of these tensors."""
    assert not findings_of(runs)
    for run in runs:
        assert not run.unwritten(*padded), (run.name, run.unwritten(*padded))


def gemm_inputs(n: int, V: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, H).to(dtype), (2 * H**-0.5 * torch.randn(V, H)).to(dtype)


def product(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The exact logits, and the sums of the terms' sizes."""
    return hidden.double() @ weight.double().T, hidden.double().abs() @ weight.double().abs().T


def width(V: int) -> int:
    return -(-V // 64) * 64
