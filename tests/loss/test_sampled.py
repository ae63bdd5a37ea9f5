"""backward="sampled": gradients of the right mean and variance, exact where nothing is drawn, alike on all backends.

weight = identity makes hidden the logits and dhidden their gradient, whose elements are the draws themselves.
"""

import math
from typing import Any

import pytest
import torch
from closed_form import FEATURES
from head_cases import closed, run, sample, to
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlplus import Objective, RLPlusLoss, linear_logprob, linear_policy_loss
from rlplus.kernels import tiling
from rlplus.loss.backends import native
from rlplus.loss.backends.sampled import MOST
from rlplus.loss.operations import logprob_library

CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
EVERY = pytest.mark.parametrize("backend", ["torch", CPP, "triton"])
FAST = pytest.mark.parametrize("backend", ["torch", CPP])  # many calls, or long rows: interpreted kernels take minutes
PLAIN = Objective("ratio", "mis")
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
EDGES = {
    "nearly sure": lambda z: z.index_fill(1, torch.tensor([0]), 16.0 + z.amax().item()),
    "all equal": torch.zeros_like,
    "one huge": lambda z: z.index_fill(1, torch.tensor([3]), 3e4),
    "two of them": lambda z: z[:, :2],
    "as they are": lambda z: z,
}


def sampled(threshold: float) -> dict[str, Any]:
    return {"backward": "sampled", "threshold": threshold}


def logits(n: int, V: int, seed: int = 0, dtype: torch.dtype = FP32) -> Tensor:
    return (3 * torch.randn(n, V, generator=torch.Generator().manual_seed(seed), dtype=FP64)).to(dtype)


def of_logits(backend: str, z: Tensor, target: Tensor, slopes: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """The gradient by z (n, V) of sums of logprob and entropy times these slopes (n,)."""
    device = DEVICE.get(backend, "cpu")
    leaf, eye = z.to(device).requires_grad_(), torch.eye(z.shape[1], dtype=z.dtype, device=device)
    found = linear_logprob(leaf, eye, target.to(device), backend=backend, **options)
    loss = sum((slope.to(device) * x).sum() for slope, x in zip(slopes, found, strict=True))
    return torch.autograd.grad(loss, leaf)[0].cpu()


def exact_gradient(z: Tensor, target: Tensor, slopes: tuple[Tensor, Tensor]) -> Tensor:
    leaf = z.double().requires_grad_()
    logp = leaf.log_softmax(1)
    logprob, entropy = logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)
    return torch.autograd.grad((slopes[0] * logprob + slopes[1] * entropy).sum(), leaf)[0]


# ---- mean and variance


@FAST
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_every_element_has_the_right_mean_and_variance(backend: str, entropy: float) -> None:
    n, V, threshold, draws = 5, 60, 2.0**-5, 600
    z, target = logits(n, V), torch.tensor([0, 59, 7, 8, 30])
    slopes = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0]), torch.full((n,), entropy)
    want, p = exact_gradient(z, target, slopes), z.double().softmax(1)
    of_draw = slopes[0][:, None] + entropy * (p.log() - (p * p.log()).sum(1, keepdim=True))
    variance = ((p * (threshold - p)).clamp(min=0) * of_draw**2).scatter(1, target[:, None], 0.0)
    each = torch.stack([of_logits(backend, z, target, slopes, seed=i, **sampled(threshold)) for i in range(draws)])
    error = each.double().mean(0) - want
    drawn = variance > 1e-12
    assert drawn.sum() > 100
    assert (error[~drawn].abs() <= 1e-6).all(), "the target's element and large ones are exact"
    scores = error[drawn] / (variance[drawn] / draws).sqrt()
    assert scores.abs().max() <= 5.5
    assert 0.5 <= scores.std() <= 1.15
    total = (each.double() - want).square().sum((1, 2)).mean()
    assert total == pytest.approx(variance.sum().item(), rel=0.1)


@FAST
def test_the_mean_of_many_draws_is_the_gradient_of_every_input(backend: str) -> None:
    """With all that a head can have. The mean of K draws has the error of one by the root of K."""
    head, constants = sample(40, V=300, dtype=FP64 if backend == "torch" else FP32)
    constants = {k: v for k, v in constants.items() if k != "entropy_weight"}
    objective, draws = Objective("clip", "mis", **(FEATURES["all"] | {"entropy_coef": 0.05})), 64
    transform = {"temperature": torch.linspace(0.5, 2, 40), "logit_softcap": 9.0, "logit_scale": 1.3}
    want = run(head, constants, objective, backend="reference", **transform)
    each = [
        run(head, constants, objective, backend=backend, seed=i, **transform, **sampled(2.0**-7)) for i in range(draws)
    ]
    for name in ("dhidden", "dweight", "dbias"):
        size = want[name].norm()
        one = torch.stack([(got[name] - want[name]).norm() / size for got in each]).square().mean().sqrt()
        mean = (torch.stack([got[name] for got in each]).mean(0) - want[name]).norm() / size
        assert 1e-4 < one < 0.3
        assert mean <= 1.35 * one / math.sqrt(draws), name


@EVERY
def test_the_error_is_the_one_that_the_statistics_say(backend: str) -> None:
    n, V, draws = 24, 400, 6 if backend == "triton" else 40
    z = logits(n, V, 1)
    target = z.softmax(1).multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    constants = {"advantage": torch.linspace(-2, 2, n), "token_weight": torch.full((n,), 1 / n)}
    head = {"hidden": z, "weight": torch.eye(V), "bias": torch.zeros(V), "target": target}
    want = closed(to(head, FP64), to(constants, FP64), PLAIN)["dhidden"]
    each = [run(head, constants, PLAIN, backend=backend, seed=i, **sampled(2.0**-8)) for i in range(draws)]
    error = torch.stack([(got["dhidden"] - want).square().sum() for got in each]).mean().sqrt() / want.norm()
    stats = each[0]["stats"]
    predicted = (stats["sampled_variance"] / stats["sampled_square"]).sqrt()
    assert predicted == pytest.approx(error.item(), rel=0.2)
    assert stats["sampled_elements"] > n
    assert stats["sampled_flat"] == 0


# ---- where nothing is random


@EVERY
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_below_all_probabilities_it_is_exact(backend: str, dtype: torch.dtype) -> None:
    head, constants = sample(13, V=61, dtype=dtype)
    options: dict[str, Any] = {"temperature": 0.7}
    if backend != "triton" or dtype == FP32:
        options["logit_softcap"] = 5.0
    objective = Objective("clip", "mis", **FEATURES["all"])
    want = closed(to(head, FP64), to(constants, FP64), objective, **options)
    got = run(head, constants, objective, backend=backend, **options, **sampled(1e-30))
    rounding = {FP32: 1e-5, BF16: 8e-3, FP16: 2e-3}[dtype]
    for name in ("loss", "logprob", "entropy", "dhidden", "dweight", "dbias"):
        assert (got[name] - want[name]).norm() <= rounding * want[name].norm(), name


@FAST
@pytest.mark.parametrize("edge", EDGES)
def test_edges(backend: str, edge: str) -> None:
    """Finite, with rows that add up to 0: what was drawn has the mass that it stands for, to one threshold."""
    z = EDGES[edge](logits(6, 300, 2))
    target, threshold = torch.arange(6) % z.shape[1], 2.0**-6
    ones, none = torch.ones(6), torch.zeros(6)
    got = of_logits(backend, z, target, (ones, none), seed=0, **sampled(threshold))
    want = exact_gradient(z, target, (ones, none))
    assert got.isfinite().all()
    assert (got.sum(1).abs() <= 1.01 * threshold).all()
    assert ((got - want).abs() <= threshold).all()
    own = got.gather(1, target[:, None]).double()
    torch.testing.assert_close(own, want.gather(1, target[:, None]), rtol=1e-5, atol=1e-12)


@FAST
def test_a_flat_row_keeps_no_more_than_its_share_and_stays_unbiased(backend: str) -> None:
    n, V = 4, 3000
    z = 0.3 * logits(n, V, 3)
    z[0, 5] = 30.0  # one that is not flat
    head = {"hidden": z, "weight": torch.eye(V), "bias": torch.zeros(V), "target": torch.tensor([5, 1, 2, 3])}
    constants = {"advantage": torch.ones(n), "token_weight": torch.ones(n)}
    each = [run(head, constants, PLAIN, backend=backend, seed=i, **sampled(2.0**-12)) for i in range(30)]
    assert each[0]["stats"]["sampled_flat"] == 3
    kept = (each[0]["dhidden"] != 0).sum(1)
    assert (kept[1:] > MOST // 2).all()
    assert (kept <= MOST + 2).all()
    want = closed(to(head, FP64), to(constants, FP64), PLAIN)["dhidden"]
    one = (each[0]["dhidden"] - want).norm()
    assert (torch.stack([got["dhidden"] for got in each]).mean(0) - want).norm() <= 1.3 * one / math.sqrt(30)


# ---- laws


@EVERY
def test_rows_that_do_not_count_touch_nothing(backend: str) -> None:
    head, constants = sample(20, V=50, dtype=FP32)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert 0 < off.sum() < 20
    objective = Objective("clip", "mis", **FEATURES["all"])
    want = run(head, constants, objective, backend=backend, seed=4, **sampled(2.0**-6))
    dirty = head | {"hidden": head["hidden"].masked_fill(off[:, None], math.nan)}
    dirty["target"] = head["target"].masked_fill(off, -7)
    got = run(dirty, constants, objective, backend=backend, seed=4, **sampled(2.0**-6))
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name
    silent = constants | {"advantage": torch.zeros(20)}
    silent = run(head, silent, Objective("clip", "none"), backend=backend, seed=4, **sampled(2.0**-6))
    assert silent["stats"]["sampled_elements"] == 0
    assert not any(silent[name].any() for name in ("dhidden", "dweight", "dbias"))


@EVERY
def test_a_row_that_is_no_number_is_seen(backend: str) -> None:
    head, _ = sample(3, V=23, dtype=FP32)
    head["hidden"][1, 2] = math.nan
    ones = {"advantage": torch.ones(3), "token_weight": torch.ones(3)}
    got = run(head, ones, PLAIN, backend=backend, seed=0, **sampled(2.0**-6))
    assert got["loss"].isnan()
    assert got["dhidden"].isnan().any(-1).tolist() == [False, True, False]
    assert got["dweight"].isnan().any()


@EVERY
def test_a_seed_says_all_and_chunks_say_nothing(backend: str) -> None:
    head, constants = sample(24, V=200, dtype=FP32)
    runs = [
        run(head, constants, PLAIN, backend=backend, seed=seed, max_scratch_mb=mb, **sampled(2.0**-6))
        for seed, mb in ((5, None), (5, None), (6, None), (5, 5 * 200 * 30 / 1e6))
    ]
    for name in ("dhidden", "dweight", "dbias"):
        same, again, other, chunked = (one[name] for one in runs)
        assert torch.equal(same, again)
        assert not torch.equal(same, other)
        torch.testing.assert_close(chunked, same, rtol=1e-4, atol=1e-6)


def test_all_backends_keep_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "DRAWN", tiling.Block(32, 4))  # seven tiles a row
    head, constants = sample(24, V=200, dtype=FP32)
    names = ["torch", *(["cpp"] if native.load() else []), "triton"]
    runs = [run(head, constants, PLAIN, backend=name, seed=7, **sampled(2.0**-6)) for name in names]
    for one in runs[1:]:
        assert one["stats"]["sampled_elements"] == runs[0]["stats"]["sampled_elements"]
        for name in ("dhidden", "dweight", "dbias"):
            torch.testing.assert_close(one[name], runs[0][name], rtol=1e-3, atol=1e-5)


def test_logits_far_from_zero_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "DRAWN", tiling.Block(256, 4))  # five tiles a row
    z = logits(3, 1200, 2) * torch.tensor([1.0, 0.1, 1.0])[:, None] - 120  # e^-logsumexp is infinite; a flat row
    given = torch.tensor([0, 7, 1199]), (torch.ones(3), torch.zeros(3))
    want, got = (of_logits(name, z, *given, seed=3, **sampled(2.0**-12)) for name in ("torch", "triton"))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@EVERY
def test_the_policy_loss_is_the_one_of_sampled_logprobs(backend: str) -> None:
    """The elements do not depend on the loss, so any loss of linear_logprob has the same gradient."""
    head, constants = sample(24, V=200, dtype=FP32)
    constants = {k: v for k, v in constants.items() if k in ("advantage", "token_weight")}
    constants["token_weight"] = constants["token_weight"].abs() + 0.1
    constants["advantage"] = constants["advantage"].abs() + 0.1
    got = run(head, constants, PLAIN, backend=backend, seed=8, **sampled(2.0**-6))
    leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
    logprob, _ = linear_logprob(**leaf, target=head["target"], backend=backend, seed=8, **sampled(2.0**-6))
    ratio = (logprob - logprob.detach()).exp()
    loss = -(constants["token_weight"] * constants["advantage"] * ratio).sum()
    for name, gradient in zip(leaf, torch.autograd.grad(loss, list(leaf.values())), strict=True):
        torch.testing.assert_close(gradient, got[f"d{name}"], rtol=1e-5, atol=1e-6)


@EVERY
def test_a_gradient_of_the_weight_that_is_there_and_a_frozen_head(backend: str) -> None:
    head, constants = sample(24, V=200, dtype=BF16)
    options: dict[str, Any] = {"backend": backend, "seed": 9, "objective": PLAIN} | sampled(2.0**-6)
    whole = run(head, constants, PLAIN, backend=backend, seed=9, **sampled(2.0**-6))
    total, hidden = torch.ones(200, 7), head["hidden"].clone().requires_grad_()
    rest = {k: v for k, v in head.items() if k != "hidden"} | constants
    inputs = {"old_logprob": None} | rest
    out = linear_policy_loss(hidden, weight_grad=total, **inputs, **options)
    out.loss.backward()
    assert torch.equal(hidden.grad, whole["dhidden"])
    torch.testing.assert_close((total - 1).to(BF16), whole["dweight"], rtol=1e-2, atol=1e-2)
    hidden.grad = None
    linear_policy_loss(hidden, **inputs, **options).loss.backward()
    assert torch.equal(hidden.grad, whole["dhidden"])


@EVERY
def test_rows_with_kept_tokens_are_exact_beside_sampled_ones(backend: str) -> None:
    head, constants = sample(6, V=40, dtype=FP32)
    constants = {k: v for k, v in constants.items() if k in ("advantage", "old_logprob")} | {
        "token_weight": torch.ones(6)
    }
    offsets = torch.tensor([0, 3, 3, 6, 6, 9, 9])
    others = [[(y + 1) % 40, (y + 2) % 40] for y in head["target"].tolist()]
    tokens = torch.tensor([v for i in (0, 2, 4) for v in (head["target"][i].item(), *others[i])])
    options: dict[str, Any] = {"kept": (offsets, tokens), "backend": backend}
    exact = run(head, constants, PLAIN, **options)
    got = run(head, constants, PLAIN, seed=2, **options, **sampled(2.0**-4))
    torch.testing.assert_close(got["dhidden"][[0, 2, 4]], exact["dhidden"][[0, 2, 4]], rtol=1e-5, atol=1e-6)
    assert not torch.equal(got["dhidden"][1], exact["dhidden"][1])
    for name in ("tokens", "loss_internal", "prob_external"):
        torch.testing.assert_close(got["stats"][name], exact["stats"][name], rtol=1e-5, atol=1e-6)
    assert got["stats"]["sampled_elements"] > 3
    with pytest.raises(ValueError, match="want backward 'exact' with kept tokens, whose gradient is sparse by itself"):
        linear_logprob(head["hidden"].requires_grad_(), head["weight"], head["target"], backward="sampled", **options)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
def test_they_are_well_formed_torch_ops(needs: tuple[bool, ...]) -> None:
    head, _ = sample(6, V=20)
    leaves = [head[k].requires_grad_(need) for k, need in zip(("hidden", "weight", "bias"), needs, strict=True)]
    uniform = torch.rand(6)
    arguments = (*leaves, head["target"], 1.0, None, None, "", None, None, uniform, 2.0**-6, 1e9, "torch")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(logprob_library.sampled_logprob, arguments, test_utils=tests)


def test_torchs_seed_repeats_what_has_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    z, target = logits(8, 100), torch.arange(8)
    slopes = torch.ones(8), torch.zeros(8)
    monkeypatch.setenv("RLPLUS_BACKWARD", "sampled")
    got = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        got.append(of_logits("torch", z, target, slopes, threshold=2.0**-4))
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[0], got[2])
    want = of_logits("torch", z, target, slopes, backward="exact")
    assert not torch.equal(got[0], want)
    monkeypatch.delenv("RLPLUS_BACKWARD")
    assert torch.equal(of_logits("torch", z, target, slopes), want)


# ---- mistakes

BAD: list[tuple[dict[str, Any], str]] = [
    ({"backward": "sample"}, "want backward one of auto, exact, sampled; got 'sample'"),
    ({"threshold": 0.0}, r"want threshold in \(0, 1\); got 0.0"),
    ({"threshold": 1}, r"want threshold in \(0, 1\); got 1"),
    ({"threshold": math.nan}, r"want threshold in \(0, 1\); got nan"),
    ({"threshold": "small"}, r"want threshold in \(0, 1\); got 'small'"),
    ({"seed": 1.5}, "want seed an int of 64 bits or None; got 1.5"),
    ({"seed": True}, "want seed an int of 64 bits or None; got True"),
    ({"backend": "reference"}, "want backward 'exact' with backend 'reference'; got 'sampled'"),
    ({"seed": 2**70}, f"want seed an int of 64 bits or None; got {2**70}"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_it_says_what_it_wanted_and_what_came(change: dict[str, Any], message: str) -> None:
    head, constants = sample(5, dtype=FP32)
    with pytest.raises(ValueError, match=message):
        run(head, constants, PLAIN, **({"backward": "sampled"} | change))


def test_a_variable_that_names_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_BACKWARD", "fast")
    head, constants = sample(5, dtype=FP32)
    with pytest.raises(ValueError, match="want RLPLUS_BACKWARD one of auto, exact, sampled; got 'fast'"):
        run(head, constants, PLAIN)


def test_a_refusal_names_the_variable_that_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUS_BACKWARD", "sampled")
    head, constants = sample(5, dtype=FP32)
    with pytest.raises(
        ValueError, match="want backward 'exact' with backend 'reference'; got 'sampled', from RLPLUS_BACK"
    ):
        run(head, constants, PLAIN, backend="reference")
    assert run(head, constants, PLAIN, backend="reference", backward="exact")["loss"].isfinite()


@pytest.mark.parametrize("dtype", [FP64, BF16, FP16], ids=str)
@FAST
def test_another_default_dtype_changes_no_bit(backend: str, dtype: torch.dtype) -> None:
    head, constants = sample(30, V=200, dtype=FP32)
    want = run(head, constants, PLAIN, backend=backend, seed=1, **sampled(2.0**-6))
    torch.set_default_dtype(dtype)
    try:
        got = run(head, constants, PLAIN, backend=backend, seed=1, **sampled(2.0**-6))
    finally:
        torch.set_default_dtype(FP32)
    for name in ("dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name


def test_it_works_inside_an_activation_checkpoint() -> None:
    head, _ = sample(30, V=200, dtype=FP32)
    leaf = head["hidden"].requires_grad_()

    def loss(hidden: Tensor) -> Tensor:
        return linear_logprob(hidden, head["weight"], head["target"], seed=1, **sampled(2.0**-6))[0].sum()

    (want,) = torch.autograd.grad(loss(leaf), leaf)
    (got,) = torch.autograd.grad(checkpoint(loss, leaf, use_reentrant=False), leaf)
    assert torch.equal(got, want)


@FAST
def test_an_entropy_that_is_no_number_is_seen_where_there_is_no_target(backend: str) -> None:
    head, _ = sample(4, V=50, dtype=FP32)
    head["hidden"][1] = math.nan
    head["target"][1:3] = -100
    leaf = head["hidden"].requires_grad_()
    inputs = {"bias": head["bias"], "backend": backend, "seed": 1} | sampled(2.0**-6)
    _, entropy = linear_logprob(leaf, head["weight"], head["target"], **inputs)
    (got,) = torch.autograd.grad(entropy.sum(), leaf)
    assert got.isnan().any(1).tolist() == [False, True, False, False]
    assert got[2].any()


def test_the_module_takes_the_options() -> None:
    head, constants = sample(5, dtype=FP32)
    inputs = {"old_logprob": None} | constants
    loss = RLPlusLoss("rlplus", backward="sampled", threshold=2.0**-6, seed=1)
    got = loss(head["hidden"].requires_grad_(), head["weight"], head["target"], **inputs)
    assert got.stats["sampled_elements"] > 0
