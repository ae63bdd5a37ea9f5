"""Contract of rlplus.loss: it agrees with closed forms in float64 and obeys the laws they obey."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives, sample_constants
from closed_form import policy_loss as closed_policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlplus import Objective, policy_loss
from rlplus.train.algorithm import ALGORITHMS

EXACT = {"rtol": 1e-12, "atol": 1e-13}
EVERYTHING = Objective("clip", "mis", **FEATURES["all"])


def sample(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """logprob, entropy and constants of n tokens."""
    g = torch.Generator().manual_seed(1000 + seed)
    logprob, entropy = torch.rand(2, n, generator=g, dtype=torch.float64).to(dtype)
    return -4 * logprob, 3 * entropy, sample_constants((n,), seed, dtype)


def run(logprob: Tensor, entropy: Tensor | None, constants: dict[str, Any], objective: Objective) -> tuple[Any, ...]:
    """loss, gradients of logprob and entropy, stats."""
    inputs = [t.detach().clone().requires_grad_() for t in (logprob, entropy) if t is not None]
    options = {"old_logprob": None} | constants
    loss, stats = policy_loss(inputs[0], entropy=None if entropy is None else inputs[1], objective=objective, **options)
    return loss, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True), stats


def rounding(objective: Objective, logprob: Tensor, constants: dict[str, Any], dlogprob: Tensor) -> Tensor:
    """How far dlogprob (n,) of the same tokens among others may be: a vector's exponential is not the scalar one.

    8 eps of the absolute surrogate and KL terms, for every nat in an exponent.
    """
    surrogate = run(logprob, logprob, constants, dataclasses.replace(objective, kl_coef=0.0))[1]
    logs = [logprob, *(v for k, v in constants.items() if k.endswith("_logprob"))]
    nats = 1 + torch.stack(logs).abs().amax(0)
    return 8 * torch.finfo(logprob.dtype).eps * nats * (surrogate.abs() + (dlogprob - surrogate).abs())


def one_token(
    objective: Objective, logprob: float, old: float | None, *, external: bool, A: float = 1.0
) -> tuple[float, float]:
    """g and dg/dlogprob: minus loss and derivative of one token of weight 1."""
    one = torch.ones(1, dtype=torch.float64)
    constants = {"advantage": A * one, "token_weight": one, "external": torch.tensor([external])}
    old_logprob = None if old is None else old * one
    loss, slope, _ = run(logprob * one, None, constants | {"old_logprob": old_logprob}, objective)
    return -loss.item(), -slope.item()


# ---- values, derivatives, statistics


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives())
def test_matches_the_closed_form_in_fp64(internal: str, external: str, features: str) -> None:
    objective = Objective(internal=internal, external=external, **FEATURES[features])
    for seed, absent in enumerate([(), ("old_logprob",), ("behavior_logprob", "entropy_weight"), ("engine_logprob",)]):
        logprob, entropy, constants = sample(20, seed)
        if not (objective.mismatch_cap and "engine_logprob" in absent):
            constants = {k: v for k, v in constants.items() if k not in absent}
        loss, dlogprob, dentropy, stats = run(logprob, entropy, constants, objective)

        inputs = [logprob.clone().requires_grad_(), entropy.clone().requires_grad_()]
        want, want_stats = closed_policy_loss(objective, *inputs, constants)
        wants = torch.autograd.grad(want, inputs, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(loss, want, **EXACT)
        torch.testing.assert_close((dlogprob, dentropy), wants, **EXACT)
        assert {name: stats[name].item() for name in want_stats} == pytest.approx(want_stats, rel=1e-11, abs=1e-12)
        assert stats["active_rows"] == ((wants[0] != 0) | (wants[1] != 0)).sum()


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["plain", "all"]))
def test_fp32_errs_no_more_than_plain_pytorch_does(internal: str, external: str, features: str) -> None:
    objective = Objective(internal=internal, external=external, **FEATURES[features])
    logprob, entropy, constants = sample(20, 4, torch.float32)
    got = run(logprob, entropy, constants, objective)[:3]
    results = []
    for dtype in (torch.float64, torch.float32):
        inputs = [logprob.to(dtype).requires_grad_(), entropy.to(dtype).requires_grad_()]
        cast = {k: v if v.dtype == torch.bool else v.to(dtype) for k, v in constants.items()}
        loss, stats = closed_policy_loss(objective, *inputs, cast)
        results.append((loss, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)))
    terms = 20 * max(1.0, *(abs(value) for name, value in stats.items() if name.startswith("loss_")))
    for out, exact, plain, size in zip(got, *results, (terms, None, None), strict=True):
        assert out.dtype == torch.float32
        size = exact.abs().max() if size is None else size
        bound = 2 * (plain - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * size
        assert ((out - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("p", "p_old", "proxy", "bayes", "mis", "explored", "shaped", "dshaped"),
    [
        (0.05, 0.05, 1, 0.095238, 0.173913, 0.169509, 0.333333, 0.222222),
        (0.5, 0.25, 2, 0.8, 1.142857, 0.808122, 0.833333, 0.138889),
        (0.95, 0.95, 1, 0.974359, 0.987013, 0.220703, 0.904762, 0.086168),
        (1, 1, 1, 1, 1, 0, 0.909091, 0.082645),
        (0.001, 1e-6, 1000, 0.002, 0.004, 0.003998, 0.009901, 0.009803),
        (0.9, 1e-12, 9e11, 1.8, 3.6, 1.138420, 0.9, 0.09),
    ],
)
def test_numbers_of_the_published_table(
    p: float, p_old: float, proxy: float, bayes: float, mis: float, explored: float, shaped: float, dshaped: float
) -> None:
    for name, gamma, want in (
        ("proxy", 0.0, (proxy, proxy)),
        ("bayes", 0.0, (bayes, bayes)),
        ("mis", 0.0, (mis, mis)),
        ("mis", 0.5, (explored, explored)),
        ("shaped", 0.0, (shaped, dshaped)),
    ):
        got = one_token(Objective(external=name, gamma=gamma), math.log(p), math.log(p_old), external=True)
        assert got == pytest.approx(want, rel=1e-6, abs=6e-7), name


@settings(max_examples=60)
@given(logprob=st.floats(-60, 0), old=st.floats(-60, 0), gamma=st.floats(0, 3), A=st.floats(-5, 5))
def test_mis_is_bounded_and_proportional_to_the_advantage(logprob: float, old: float, gamma: float, A: float) -> None:
    g, slope = one_token(Objective(gamma=gamma), logprob, old, external=True)
    assert 0 <= g <= 4
    assert slope == g
    scaled = one_token(Objective(gamma=gamma), logprob, old, external=True, A=A)
    assert scaled == pytest.approx((A * g, A * g), rel=1e-12)


@settings(max_examples=60)
@given(
    logprob=st.floats(-8, 0), old=st.floats(-8, 0), A=st.floats(-3, 3), low=st.floats(0, 0.5), high=st.floats(0, 0.5)
)
def test_clip_is_a_lower_bound_of_the_ratio_and_dual_clip_a_floor(
    logprob: float, old: float, A: float, low: float, high: float
) -> None:
    plain, slope = one_token(Objective("ratio"), logprob, old, external=False, A=A)
    clipped, clipped_slope = one_token(
        Objective("clip", clip_low=low, clip_high=high), logprob, old, external=False, A=A
    )
    dual, _ = one_token(
        Objective("clip", clip_low=low, clip_high=high, dual_clip=3.0), logprob, old, external=False, A=A
    )
    assert clipped <= plain
    assert clipped_slope in (0.0, slope)
    assert dual == (max(clipped, 3.0 * A) if A < 0 else clipped)


# ---- laws


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_rows_of_weight_0_change_no_bit(poison: float) -> None:
    logprob, entropy, constants = sample(20)
    want = run(logprob, entropy, constants, EVERYTHING)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert off.any()
    spoilt = {k: v.masked_fill(off, poison) for k, v in constants.items() if v.is_floating_point()}
    spoilt |= {k: constants[k] for k in ("token_weight", "entropy_weight")} | {"external": constants["external"] ^ off}
    got = run(logprob.masked_fill(off, poison), entropy.masked_fill(off, poison), spoilt, EVERYTHING)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    assert {k: v.item() for k, v in got[3].items()} == {k: v.item() for k, v in want[3].items()}


def test_all_masked_gives_zero_and_keeps_the_graph() -> None:
    for n in (0, 5):
        logprob, entropy, constants = sample(n)
        for name in ("token_weight", "entropy_weight"):
            constants[name] = torch.zeros(n, dtype=torch.float64)
        loss, dlogprob, dentropy, stats = run(logprob.fill_(math.nan), entropy, constants, EVERYTHING)
        assert loss == 0
        assert loss.requires_grad
        assert torch.equal(dlogprob, torch.zeros_like(logprob))
        assert torch.equal(dentropy, torch.zeros_like(entropy))
        assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize(("internal", "external"), [("ratio", "proxy"), ("clip", "omega"), ("clip", "mis")])
def test_an_advantage_of_0_is_exactly_0_whatever_overflows(internal: str, external: str) -> None:
    for is_external in (False, True):
        objective = Objective(internal, external)
        assert one_token(objective, -0.1, -2000.0, external=is_external, A=0.0) == (0, 0)
        one = torch.ones(1)
        constants = {"token_weight": one, "external": torch.tensor([is_external]), "behavior_logprob": -2000 * one}
        constants |= {"advantage": 0 * one, "old_logprob": -2000 * one, "engine_logprob": -9000 * one}
        got = run(-one, None, constants, dataclasses.replace(objective, mismatch_cap=2.0))
        assert (got[0], got[1]) == (0, 0)
    assert one_token(Objective(internal), -0.1, -2000.0, external=False, A=-1.0)[0] == -math.inf  # not hidden


def test_a_logprob_that_rounding_put_above_0_counts_as_p_1() -> None:
    for internal, external, features in all_objectives():
        objective = Objective(internal=internal, external=external, **FEATURES[features])
        _, entropy, constants = sample(20, 1, torch.float32)
        loss, dlogprob, dentropy, stats = run(torch.full((20,), 1e-7), entropy, constants, objective)
        for value in (loss, dlogprob, dentropy, *stats.values()):
            assert value.isfinite().all()
    assert one_token(Objective(), 1e-7, None, external=True) == (0, 0)


@pytest.mark.parametrize("objective", [EVERYTHING, Objective(entropy_coef=0.1), ALGORITHMS["dapo"].objective])
def test_micro_batches_add_up(objective: Objective) -> None:
    logprob, entropy, constants = sample(24)
    whole = run(logprob, entropy, constants, objective)
    bound = rounding(objective, logprob, constants, whole[1])
    for parts in (2, 4, 24):
        pieces = [
            run(x, h, dict(zip(constants, c, strict=True)), objective)
            for x, h, *c in zip(*(t.chunk(parts) for t in (logprob, entropy, *constants.values())), strict=True)
        ]
        torch.testing.assert_close(sum(p[0] for p in pieces), whole[0], **EXACT)
        assert ((torch.cat([p[1] for p in pieces]) - whole[1]).abs() <= bound).all()
        assert torch.equal(torch.cat([p[2] for p in pieces]), whole[2])  # products only
        for name, value in whole[3].items():
            torch.testing.assert_close(sum(p[3][name] for p in pieces), value, **EXACT)


def test_leading_shapes_do_not_matter() -> None:
    logprob, entropy, constants = sample(24)
    want = run(logprob, entropy, constants, EVERYTHING)
    for shape in ((24, 1), (2, 3, 4)):
        folded = {k: v.view(shape) for k, v in constants.items()}
        got = run(logprob.view(shape), entropy.view(shape), folded, EVERYTHING)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1].view(shape))
    scalar = {k: v[0] for k, v in constants.items()}
    assert run(logprob[0], entropy[0], scalar, EVERYTHING)[1].shape == ()


def test_no_old_logprob_means_the_current_policy() -> None:
    for internal, external, features in all_objectives():
        objective = Objective(internal=internal, external=external, **FEATURES[features])
        logprob, entropy, constants = sample(20)
        want = run(logprob, entropy, constants | {"old_logprob": logprob}, objective)
        got = run(logprob, entropy, constants | {"old_logprob": None}, objective)
        torch.testing.assert_close(got[:3], want[:3], **EXACT)
        assert got[3]["kl_old"] == 0
        assert got[3]["clipped_low"] == got[3]["clipped_high"] == 0


def test_stats_are_detached_scalars_and_the_loss_is_their_sum() -> None:
    logprob, entropy, constants = sample(20)
    loss, *_, stats = run(logprob, entropy, constants, EVERYTHING)
    base = {"tokens", "tokens_internal", "tokens_external", "active_rows", "loss_internal", "loss_external", "loss_kl"}
    base |= {"loss_entropy", "prob_internal", "prob_external", "ratio_external", "kl_old", "kl_ref"}
    base |= {"clipped_low", "clipped_high"}
    mismatch = {"mismatch_abs", "mismatch_outside_10pct", "mismatch_truncated"}
    assert set(stats) == base | mismatch | {"entropy", "entropy_internal"}
    assert all(value.shape == () and not value.requires_grad for value in stats.values())
    torch.testing.assert_close(
        loss.detach(), sum(stats[f"loss_{k}"] for k in ("internal", "external", "kl", "entropy"))
    )
    del constants["engine_logprob"]
    plain = dataclasses.replace(EVERYTHING, mismatch_cap=None, entropy_coef=0.0)
    assert set(run(logprob, None, constants, plain)[-1]) == base


def test_stats_count_what_was_clipped_and_sum_the_weights_of_demonstrations() -> None:
    logprob, _, constants = sample(200)
    objective = Objective("clip", "bayes", clip_low=0.1, clip_high=0.3, dual_clip=1.5)
    stats = run(logprob, None, constants, objective)[-1]
    r, A = (logprob - constants["old_logprob"]).exp(), constants["advantage"]
    on, external = constants["token_weight"] != 0, constants["external"]
    high, low = ((A > 0) & (r > 1.3)) | ((A < 0) & (r > 1.5)), (A < 0) & (r < 0.9)
    assert stats["clipped_high"] == (on & ~external & high).sum() > 0
    assert stats["clipped_low"] == (on & ~external & low).sum() > 0
    g = 2 * logprob.exp() / (1 + constants["old_logprob"].exp())
    torch.testing.assert_close(stats["ratio_external"], g[on & external].sum(), **EXACT)


@pytest.mark.parametrize("internal", ["cispo", "sapo", "dppo"])
def test_stats_count_where_a_bound_changed_the_ratio(internal: str) -> None:
    logprob, _, constants = sample(400)
    objective = Objective(internal, clip_low=0.1, clip_high=0.3)
    stats = run(logprob, None, constants, objective)[-1]
    old, A = constants["old_logprob"], constants["advantage"]
    on, moved = (constants["token_weight"] != 0) & ~constants["external"], logprob.exp() - old.exp()
    low = on & (A < 0) & (moved < -0.1) if internal == "dppo" else on & False
    high = on & (
        {"cispo": (A != 0) & ((logprob - old).exp() > 1.3), "dppo": (A > 0) & (moved > 0.3)}.get(internal, on & False)
    )
    assert (stats["clipped_low"], stats["clipped_high"]) == (low.sum(), high.sum())
    assert internal == "sapo" or high.any()


def test_a_gate_that_is_shut_has_no_gradient_whatever_overflows() -> None:
    for A in (1.0, -1.0):
        g, slope = one_token(Objective("sapo"), -0.1, -2000.0, external=False, A=A)
        assert g == pytest.approx(4 * A / (1.0 if A > 0 else 1.05), rel=1e-12)
        assert slope == 0


def test_a_masked_token_has_no_surrogate_whatever_overflows() -> None:
    one = torch.ones(1, dtype=torch.float64)
    constants = {"advantage": one, "token_weight": one, "external": torch.tensor([False])}
    constants |= {"old_logprob": -2000 * one, "engine_logprob": -one, "ref_logprob": -one}
    objective = Objective("ratio", mismatch_cap=5.0, mismatch_low=0.5, mismatch_mode="mask", kl_coef=0.1)
    loss, slope, stats = run(-2 * one, None, constants, objective)
    assert loss.item() == pytest.approx(0.1 * (math.e - 2), rel=1e-12)  # the KL penalty stays
    assert slope.item() == pytest.approx(-0.1 * (math.e - 1), rel=1e-12)
    assert stats["mismatch_truncated"] == 1


@pytest.mark.parametrize(("estimator", "old_is_current"), [("k2", True), ("k3-unbiased", True), ("k3-unbiased", False)])
def test_the_gradient_of_a_kl_estimate_is_unbiased(estimator: str, old_is_current: bool) -> None:
    """Its mean over all tokens, by their probability under the sampling policy, is the divergence's own gradient."""
    g = torch.Generator().manual_seed(3)
    logits, ref, old = torch.randn(3, 7, generator=g, dtype=torch.float64).unbind()
    logits.requires_grad_()
    logprob, ref, old = (x.log_softmax(0) for x in (logits, ref, old))
    exact = (logprob.exp() * (logprob - ref)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    old = logprob.detach() if old_is_current else old
    constants = {"advantage": torch.zeros_like(old), "token_weight": old.exp(), "external": torch.zeros(7) > 0}
    objective = Objective(kl_coef=1.0, kl_estimator=estimator)
    loss, stats = policy_loss(logprob, old_logprob=old, ref_logprob=ref, objective=objective, **constants)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], want, rtol=1e-12, atol=1e-14)
    if estimator == "k3-unbiased":
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(stats["kl_ref"], (logprob - ref).sum().detach())


def test_gradcheck_and_scaled_upstream_gradients() -> None:
    logprob, entropy, constants = sample(12)
    objective = Objective("ratio", "mis", gamma=0.0, kl_coef=0.3, entropy_coef=0.2)
    inputs = [logprob.requires_grad_(), entropy.requires_grad_()]

    def loss(logprob: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(logprob, entropy=entropy, objective=objective, **constants)[0]

    assert torch.autograd.gradcheck(loss, inputs)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(loss(*inputs), inputs, create_graph=True)


def test_half_precision_logprobs_are_computed_with_in_fp32() -> None:
    logprob, entropy, constants = sample(20, dtype=torch.bfloat16)
    loss, dlogprob, _, stats = run(logprob, entropy, constants, EVERYTHING)
    assert loss.dtype == stats["kl_old"].dtype == torch.float32
    assert dlogprob.dtype == torch.bfloat16
    wide = {k: v if v.dtype == torch.bool else v.float() for k, v in constants.items()}
    assert torch.equal(loss, run(logprob.float(), entropy.float(), wide, EVERYTHING)[0])


@pytest.mark.parametrize("objective", [Objective(), EVERYTHING])
def test_compiles_into_one_graph(objective: Objective) -> None:
    logprob, entropy, constants = sample(20)
    compiled = torch.compile(policy_loss, fullgraph=True, backend="aot_eager")
    x = logprob.clone().requires_grad_()
    loss, stats = compiled(x, entropy=entropy, objective=objective, **constants)
    want = run(logprob, entropy, constants, objective)
    torch.testing.assert_close((loss, torch.autograd.grad(loss, x)[0]), (want[0], want[1]), **EXACT)
    torch.testing.assert_close(stats, want[3], **EXACT)


# ---- errors


@pytest.mark.parametrize(
    ("change", "objective", "message"),
    [
        ({"advantage": torch.zeros(5)}, {}, r"want advantage a tensor, floating \(4,\) on cpu; got float32 \(5,\)"),
        ({"token_weight": torch.ones(4) * 1j}, {}, r"want token_weight .*floating.*got complex64 \(4,\)"),
        ({"old_logprob": torch.ones(4, dtype=torch.bool)}, {}, r"want old_logprob .*floating.*got bool \(4,\)"),
        (
            {"token_weight": torch.tensor([1, math.nan, 1, 1])},
            {},
            "want token_weight finite everywhere; got NaN or Inf",
        ),
        ({"entropy_weight": torch.tensor([1, math.inf, 1, 1])}, {}, "want entropy_weight finite"),
        ({"external": torch.zeros(4)}, {}, r"want external .*bool.*got float32 \(4,\)"),
        ({"external": [False] * 4}, {}, "want external .*got list"),
        ({"old_logprob": torch.zeros(4, device="meta")}, {}, r"want old_logprob .*on cpu; got float32 \(4,\) on meta"),
        ({"old_logprob": [0.0] * 4}, {}, "want old_logprob .*got list"),
        ({"logprob": torch.zeros(4, dtype=torch.int64)}, {}, r"want logprob a tensor, floating; got int64 \(4,\)"),
        ({"logprob": None}, {}, "want logprob a tensor, floating; got NoneType"),
        ({"entropy": torch.zeros(2, 2)}, {}, r"want entropy .*\(4,\) on cpu; got float32 \(2, 2\)"),
        ({}, {"kl_coef": 0.1}, "kl_coef=0.1 needs ref_logprob; got None"),
        ({}, {"mismatch_cap": 2.0}, "mismatch_cap=2 needs engine_logprob; got None"),
        ({}, {"entropy_coef": 0.1}, "entropy_coef=0.1 needs entropy; got None"),
    ],
)
def test_policy_loss_says_what_it_wanted_and_what_came(change: dict, objective: dict, message: str) -> None:
    inputs = {"logprob": -torch.ones(4), "old_logprob": None, "advantage": torch.ones(4), "token_weight": torch.ones(4)}
    inputs |= {"external": torch.zeros(4, dtype=torch.bool)} | change
    with pytest.raises(ValueError, match=message):
        policy_loss(objective=Objective(**objective), **inputs)
