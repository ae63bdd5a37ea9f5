"""Inputs, exact results and launches of the kernels of a head, for tests of their compiled code."""

from typing import NamedTuple

import torch
from head_rows import DENTROPY, DLOGPROB, ENTROPY, LOGPROB, REFERENCE, WIDTH, begun, with_own
from ptxcheck.launcher import Run, findings_of
from torch import Tensor

from rlplus.kernels import exponentials, row_values
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import GRADIENT, Block, Tile
from rlplus.loss.objective.tokens import FLOOR

EPS = torch.finfo(torch.float32).eps
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LOGSUM, SLOPE = row_values.LOGSUM.value, row_values.SLOPE.value
PARTIALS = kernels.PARTIALS.value


class Transform(NamedTuple):
    """From logits to z."""

    bias: Tensor | None = None
    temperature: float = 0.7
    softcap: float | None = None
    row_temperature: Tensor | None = None

    def x(self, logits: Tensor) -> Tensor:
        return (logits if self.bias is None else logits + self.bias.to(logits.dtype)) / self.temperature

    def __call__(self, logits: Tensor) -> Tensor:
        x = self.x(logits)
        z = x if self.softcap is None else self.softcap * (x / self.softcap).tanh()
        return z if self.row_temperature is None else z / self.row_temperature[:, None].to(z.dtype)

    def cap_slope(self, logits: Tensor) -> Tensor:
        """dz / dx."""
        x = self.x(logits)
        return torch.ones_like(x) if self.softcap is None else 1 / (x / self.softcap).cosh() ** 2

    def inverse(self, n: int) -> Tensor:
        """dx / dlogits (n, 1)."""
        own = torch.ones(n) if self.row_temperature is None else self.row_temperature
        return 1 / (self.temperature * own.double())[:, None]

    def reach(self, terms: Tensor) -> Tensor:
        """By how much rounding is magnified in each row, at least 1: the largest size of what exponentials are taken
        of. terms (n, V): the sums of the sizes of the terms of each logit."""
        if self.bias is not None:
            terms = terms + self.bias.double().abs().nan_to_num(posinf=0.0)
        steepest = 1 if self.softcap is None else max(1, 2 / self.softcap)
        return (terms.double().amax(1) * self.inverse(len(terms))[:, 0] * steepest).clamp(min=1)

    def columns(self, start: int, stop: int) -> "Transform":
        return self if self.bias is None else self._replace(bias=self.bias[start:stop].contiguous())


class Exact(NamedTuple):
    """In float64; the reference and what belongs to it is that of the target or, if that is no token, of token 0."""

    logp: Tensor
    logprob: Tensor
    entropy: Tensor
    known: Tensor
    reference: Tensor
    slope: Tensor

    @property
    def distance(self) -> Tensor:
        """How far the reference may be below the largest z, in nats."""
        return self.logprob.abs().clamp(max=45)


def exact(logits: Tensor, target: Tensor, transform: Transform) -> Exact:
    z = transform(logits.double())
    logp = z.log_softmax(1).clamp(min=FLOOR)
    known = (target >= 0) & (target < z.shape[1])
    own = target.where(known, 0)[:, None]
    logprob, reference, slope = (x.gather(1, own)[:, 0] for x in (logp, z, transform.cap_slope(logits.double())))
    # Near 1 a probability leaves float64 too few digits: by the others' sum.
    others = z.scatter(1, own, -torch.inf).logsumexp(1) - reference
    logprob = torch.where(logprob > -1e-3, -torch.nn.functional.softplus(others), logprob)
    return Exact(logp, logprob, -(logp.exp() * logp).sum(1), known, reference.clamp(min=FLOOR), slope)


def check_statistics(values: Tensor, logits: Tensor, reach: Tensor, target: Tensor, transform: Transform) -> None:
    """The columns of the rows within the rounding of z, of which a nearly sure token shows as little as is left."""
    want, error = exact(logits, target, transform), 16 * EPS * reach
    found = values.double().unbind(1)
    total = transform(logits.double()).logsumexp(1)
    assert torch.equal(found[LOGPROB].isnan(), ~want.known)
    for name, got, value, bound in (
        ("logprob", found[LOGPROB].where(want.known, want.logprob), want.logprob,
         error * -want.logprob.expm1() + 2 * EPS * want.logprob.abs()),
        ("entropy", found[ENTROPY], want.entropy, error * (want.entropy + want.distance)),
        ("log sum", found[REFERENCE] + found[LOGSUM], total, error),
        ("slope", found[SLOPE], want.slope, error * want.slope + 1e-37),
    ):  # fmt: skip
        assert ((got - value).abs() <= bound).all(), (name, got, value, bound)
    assert (found[LOGSUM] < 45).all()


def given_values(logits: Tensor, target: Tensor, transform: Transform, dlogprob: Tensor, dentropy: Tensor) -> Tensor:
    """`values` of rows as the statistics and the objective leave them."""
    of = exact(logits, target, transform)
    values = torch.empty(len(target), WIDTH)
    values[:, LOGPROB], values[:, ENTROPY], values[:, SLOPE] = of.logprob, of.entropy, of.slope
    z = transform(logits.double())
    values[:, REFERENCE] = z.amax(1)
    values[:, LOGSUM] = (z - values[:, REFERENCE, None].double()).logsumexp(1)
    values[:, DLOGPROB], values[:, DENTROPY] = dlogprob, dentropy
    return values


def give_slopes(values: Tensor, entropy: bool) -> None:
    """Derivatives of a loss; the last of several rows has none, and the one before it none of its entropy."""
    n = len(values)
    values[:, DLOGPROB], values[:, DENTROPY] = torch.randn(n), torch.randn(n) if entropy else 0.0
    if n > 2:
        values[-1, DLOGPROB : DENTROPY + 1] = values[-2, DENTROPY] = 0.0


def check_gradient(
    got: Tensor, values: Tensor, logits: Tensor, reach: Tensor, target: Tensor, transform: Transform, kept: torch.dtype
) -> None:
    """The gradient of the logits (n, V), for the slopes in `values`; `kept`: the dtype of its rounded parts."""
    of = exact(logits, target, transform)
    a, h = (values[:, column, None].double() for column in (DLOGPROB, DENTROPY))
    p, onehot = of.logp.exp(), torch.zeros_like(of.logp).scatter_(1, target[:, None], 1.0)
    slope = transform.cap_slope(logits.double()) * transform.inverse(len(target))
    entropy = of.entropy[:, None]
    own = torch.where(onehot > 0, -of.logprob.expm1()[:, None], -p)
    want = (a * own - h * p * (of.logp + entropy)) * slope
    size = (a * own).abs() + h.abs() * p * (1 + of.logp.abs() + entropy + of.distance[:, None])
    size = (size * slope).where((a != 0) | (h != 0), 0.0)
    # Where there is a bonus, it is computed from a rounded exponential, and rounded.
    rounding = 0.0 if kept == F32 else torch.finfo(kept).eps / 2
    rounded = torch.where(h != 0, 2 * size, want.abs()) * rounding
    tiny = (
        2.0**-25 if kept == F16 else 1e-35
    )  # half a step of fp16's subnormal numbers; exponentials below 2^-126 are 0
    error = (got.double() - want.where((a != 0) | (h != 0), 0.0)).abs()
    assert (error <= 32 * EPS * reach[:, None] * size + rounded + tiny).all(), (error / (size + tiny)).max()


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
    return torch.empty(n, WIDTH)


def check_launches(runs: list[Run], *padded: str) -> None:
    """No findings, and nothing is read that was never written, but for the padding of these tensors."""
    assert not findings_of(runs)
    for run in runs:
        assert not run.unwritten(*padded), (run.name, run.unwritten(*padded))


# ---- from logits


def by_blocks(logits: Tensor, V: int, target: Tensor, transform: Transform, step: int = 4096) -> Tensor:
    """values (n, WIDTH) from blocks of the vocabulary, one after another."""
    values = begun(logits, V, target, *transform)
    so_far = torch.zeros(1, PARTIALS, len(target))
    so_far[0, 0] = values[:, REFERENCE]
    for start in range(0, V, step):
        stop = min(V, start + step)
        block, rest = logits[:, start:stop], transform.columns(start, stop)
        exponentials.row_exponentials(so_far, None, values, block, stop - start, target - start, *rest, carry=True)
    kernels.finish_rows(values, so_far, V, target)
    return values


def closed(
    values: Tensor, e: Tensor, V: int, target: Tensor, transform: Transform, entropy: bool,
    block: Block = GRADIENT,
) -> Tensor:  # fmt: skip
    """The gradient of the logits (n, V) that exponentials stand for, which are closed on the way."""
    factor, own = torch.empty(2, len(target))
    rest = (transform.temperature, transform.row_temperature)
    exponentials.close_rows(factor, own, values, e, V, target, *rest, entropy, block)
    return with_own(e[:, :V].float() * factor[:, None], own, target)


def row_gradient(
    logits: Tensor, V: int, target: Tensor, transform: Transform, out: Tensor, block: Block = GRADIENT
) -> None:
    """Check the gradient from fp32 logits, which `out` may be."""
    n, before = len(target), logits[:, :V].clone()
    values = given_values(before, target, transform, torch.randn(n), torch.randn(n))
    give_slopes(values, entropy=True)
    exponentials.row_gradient(out, values, logits, V, target, *transform, block=block)
    check_gradient(out[:, :V], values, before, transform.reach(before.abs()), target, transform, out.dtype)


# ---- our GEMM


def gemm_inputs(n: int, V: int, H: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, H).to(dtype), (2 * H**-0.5 * torch.randn(V, H)).to(dtype)


def make_impossible(hidden: Tensor, weight: Tensor, target: Tensor, which: list[int]) -> None:
    """Put the targets of these rows about 200 nats below the others, at a temperature of 0.7."""
    own = weight[target[which]].double()
    hidden[which] = (-140 * own / own.square().sum(1, keepdim=True)).to(hidden.dtype)


def product(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The exact logits, and the sums of the terms' sizes."""
    return hidden.double() @ weight.double().T, hidden.double().abs() @ weight.double().abs().T


def width(V: int) -> int:
    return -(-V // 64) * 64


def from_hidden(
    hidden: Tensor, weight: Tensor, target: Tensor, transform: Transform, tile: Tile, kept: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """values (n, WIDTH), exponentials (n, W), and which rows were computed again: the launches of the backend."""
    n, V, values = len(hidden), len(weight), new_values(len(hidden))
    e = None if kept is None else torch.empty(n, width(V), dtype=kept)
    partial, marked = torch.empty(-(-V // tile.BLOCK_V), PARTIALS, n), torch.empty(n, dtype=torch.int32)
    rest = (values, hidden, weight, target, *transform)
    kernels.target_logits(*rest)
    kernels.linear_exponentials(partial, e, *rest, tile=tile)
    kernels.finish_rows(values, partial, V, target, marked)
    listed = torch.full((n,), -1)  # rows behind the count must not be read
    listed[: int(marked.sum())] = marked.nonzero()[:, 0]
    listed = listed, marked.sum()
    kernels.linear_exponentials(partial, None, *rest, tile=tile, listed=listed)
    kernels.finish_rows(values, partial, V, target, marked, again=True)
    if e is not None:
        kernels.linear_exponentials(partial, e, *rest, tile=tile, listed=listed)
    return values, e, marked
