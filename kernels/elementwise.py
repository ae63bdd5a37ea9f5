"""Functions of single numbers that the kernels share: from a logit to z, exponentials and logarithms."""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret and triton.__version__.startswith("3.6."):
    from rlplus.kernels.interpreter import squeeze_indices

    squeeze_indices()

FUSION = {"enable_fp_fusion": True}  # stated: the environment could switch it off, and with it the bits of the results
FLOOR = tl.constexpr(-1e30)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a reference where no logit is above -inf
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter knows no assembly


@triton.jit
def _at_rows(x, row_temperature, rows, here):
    """x (1 / temperature, or softcap) of rows with individual temperatures, by which it is divided."""
    if row_temperature is not None:
        x *= 1.0 / tl.load(row_temperature + rows, here, 1.0)
    return x  # a single value: Triton 3.6 cannot return a tuple that holds None


@triton.jit
def _x(logits, v, inside, bias, inv_temperature):
    if bias is not None:
        logits += tl.load(bias + v, inside, 0.0).to(tl.float32)
    return logits * inv_temperature


@triton.jit
def _z(logits, v, inside, bias, inv_temperature, softcap):
    """z of logits at v; arbitrary where v is not `inside` the vocabulary."""
    z = _x(logits, v, inside, bias, inv_temperature)
    if softcap is not None:
        z = _softcap(z, softcap)
    return z


@triton.jit
def _softcap(x, softcap):
    """softcap tanh(x / softcap), to about 3 ulp: by the series where 1 - e^(-2 |y|) would cancel."""
    a = tl.abs(x / softcap)
    a2 = a * a
    series = a * (1 - a2 * (1 / 3 - a2 * (2 / 15 - a2 * (17 / 315 - a2 * (62 / 2835)))))
    e = _exp(-2 * a)
    bound = softcap * tl.where(a < 0.25, series, (1 - e) / (1 + e))
    return tl.where(x < 0, -bound, bound)


@triton.jit
def _softcap_slope(x, softcap):
    """1 - tanh^2(x / softcap), without the difference."""
    e = _exp(-2 * tl.abs(x / softcap))
    return 4 * e / ((1 + e) * (1 + e))


@triton.jit
def _exp2(x):
    """2^x: one instruction, of relative error 2^-22, and 0 below 2^-126.

    tl.exp2 needs three more instructions to keep subnormal numbers, which are negligible in a sum of at least 1.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _log2(x):
    """The logarithm in base 2: one instruction, of absolute error 2^-22; -inf below 2^-126."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exp(x):
    return _exp2(x * LOG2_E)


@triton.jit
def _expm1(x):
    """e^x - 1, accurate to rounding near 0, where exp(x) - 1 cancels."""
    y = 1.0 + x * (1 / 9)
    for k in tl.static_range(8, 1, -1):
        y = 1.0 + y * x * (1 / k)
    return tl.where(tl.abs(x) < 0.5, x * y, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    """log(1 + x) of x > -1, accurate to rounding near 0, where 1 + x would take the digits of x: by 2 atanh(y)."""
    y = x / (2.0 + x)
    y2 = y * y
    series = 1 + y2 * (1 / 3 + y2 * (1 / 5 + y2 * (1 / 7 + y2 * (1 / 9 + y2 * (1 / 11)))))
    return tl.where((x < 0.5) & (x > -0.25), 2 * y * series, tl.log(1.0 + x))


@triton.jit
def _floor(x):
    """x where it is at least FLOOR, which stands in for log 0: e^FLOOR = 0, yet 0 * FLOOR is not NaN."""
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL)
