"""The Triton kernel of the objective against its definition; without CUDA in Triton's interpreter."""

import math

import pytest
import torch
from closed_form import EXTERNAL, FEATURES, INTERNAL, all_objectives, sample_constants
from torch import Tensor

from rlplus import Objective
from rlplus.kernels import policy_loss as token_kernels
from rlplus.loss import MISMATCH_STATS, STATS, TokenConstants, token_loss
from rlplus.loss.backends.triton import choices, coefficients, token_columns
from rlplus.loss.objective import surrogates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
OBJECTIVES = all_objectives(["plain", "asymmetric-dual", "all"])
OBJECTIVES += [("clip", "mis", features) for features in ("kl", "kl-k2", "mask")]


def token_constants(n: int, absent: tuple[str, ...] = ()) -> TokenConstants:
    constants = sample_constants((n,), n, torch.float32)
    return TokenConstants(**{k: v.to(DEVICE) for k, v in constants.items() if k not in absent})


def run_token_loss(logprob: Tensor, entropy: Tensor, c: TokenConstants, o: Objective) -> dict[str, Tensor]:
    """Derivatives (n,), and statistics (blocks,): a sum for each BLOCK_N tokens."""
    values = torch.stack([logprob, entropy, *[torch.full_like(logprob, math.nan)] * 5], 1)
    columns, given = token_columns(c)
    arguments = (values, columns, coefficients(o), given, choices(o))
    stats = dict(zip(STATS + MISMATCH_STATS, token_kernels.token_loss(*arguments).unbind(1), strict=True))
    if c.engine_logprob is None:
        stats = {name: stats[name] for name in STATS}
    dlogprob, dentropy = (values[:, i.value] for i in (token_kernels.DLOGPROB, token_kernels.DENTROPY))
    return stats | {"dlogprob": dlogprob, "dentropy": dentropy}


def test_every_surrogate_has_a_kernel_and_a_closed_form() -> None:
    for product in (surrogates, token_kernels):
        assert (product.INTERNAL.keys(), product.EXTERNAL.keys()) == (INTERNAL.keys(), EXTERNAL.keys())


def test_the_kernel_names_the_columns_of_the_constants_in_order() -> None:
    names = ["EXTERNAL_TOKEN" if field == "external" else field.upper() for field in TokenConstants._fields]
    assert [getattr(token_kernels, name).value for name in names] == list(range(token_kernels.CONSTANTS.value))


@pytest.mark.parametrize(("internal", "external", "features"), OBJECTIVES)
def test_every_objective_matches_its_definition(internal: str, external: str, features: str) -> None:
    """On ordinary tokens, on p near 0 and 1, on ratios near 1, and on a logprob that rounding put above 0.

    Sums are compared block by block: those with p near 0, whose terms are up to 1e15, are in the first only.
    """
    o, n = Objective(internal, external, **FEATURES[features]), 300
    absent = [(), ("old_logprob", "entropy_weight"), ("behavior_logprob", "engine_logprob")]
    for without in absent[:2] if o.mismatch_cap else absent:
        c = token_constants(n, without)
        logprob = -5 * torch.rand(n, device=DEVICE)
        for rows, value in ((slice(0, 30), -1e-6), (slice(30, 60), 6e-8), (slice(60, 80), -40.0), (slice(80, 99), 0.0)):
            logprob[rows] = value
        if c.old_logprob is not None:
            logprob[100:200] = c.old_logprob[100:200] + torch.linspace(-1e-3, 1e-3, 100, device=DEVICE)
        entropy = 3 * torch.rand(n, device=DEVICE)
        off = (c.token_weight == 0) & (entropy == 0 if c.entropy_weight is None else c.entropy_weight == 0)
        logprob[off.nonzero()[:9, 0]] = math.nan
        got = run_token_loss(logprob, entropy, c, o)
        exact, plain = (definition(logprob, entropy, c, o, dtype) for dtype in (torch.float64, torch.float32))
        for name, value in got.items():
            each, size = name in ("dlogprob", "dentropy"), token_kernels.LAUNCH["BLOCK_N"]
            scale = exact[name].abs() if each else size * exact[name].abs().clamp(min=1)
            rounding = (plain[name] - exact[name]).abs()
            bound = 2 * (rounding.max() if each else rounding) + 8 * EPS * scale
            error = (value - exact[name]).abs()
            assert (error <= bound).all(), f"{name}: error {error.max():.1e}, bound {bound.max():.1e}"


def definition(
    logprob: Tensor, entropy: Tensor, c: TokenConstants, o: Objective, dtype: torch.dtype
) -> dict[str, Tensor]:
    """`run_token_loss` of the definition."""
    wide = TokenConstants(*(x if x is None or x.dtype == torch.bool else x.to(dtype) for x in c))
    parts = []
    for start in range(0, len(logprob), token_kernels.LAUNCH["BLOCK_N"]):
        block = slice(start, start + token_kernels.LAUNCH["BLOCK_N"])
        constants = TokenConstants(*(None if x is None else x[block] for x in wide))
        parts.append(token_loss(logprob[block].to(dtype), entropy[block].to(dtype), constants, o))
    derivatives = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("dlogprob", "dentropy")}
    return {name: torch.stack([part.stats[name] for part in parts]) for name in parts[0].stats} | derivatives


@pytest.mark.parametrize(("internal", "external", "features"), OBJECTIVES)
def test_what_overflows_does_so_as_in_the_definition(internal: str, external: str, features: str) -> None:
    """Infinite ratios stay infinite, NaN stays NaN, and an advantage of 0 is exactly 0 whatever they are."""
    extremes = torch.tensor([-0.5, -1e30, math.nan, -math.inf, 0.0], device=DEVICE)
    logprob, old, behavior, ref = (x.reshape(-1) for x in torch.meshgrid(*[extremes] * 4, indexing="ij"))
    n = len(logprob)
    advantage = torch.tensor([-1.0, 0.0, 2.0], device=DEVICE).repeat(n // 3 + 1)[:n]
    c = TokenConstants(
        advantage, torch.ones_like(logprob), torch.arange(n, device=DEVICE) % 2 == 0, old, behavior, ref, ref
    )
    o = Objective(internal, external, **FEATURES[features])
    got = run_token_loss(logprob, logprob, c, o)["dlogprob"]
    want = definition(logprob, logprob, c, o, torch.float32)["dlogprob"]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-30)


# ---- the whole operation against float64
