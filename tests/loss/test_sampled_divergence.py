"""linear_divergence with backward="sampled": gradients of the right mean and variance, alike on all backends.

weight = identity makes hidden the logits and dhidden their gradient, whose elements are the draws themselves.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from two_heads import DEVICE, KINDS, logits, of_logits, run, sample

from rlplus import linear_divergence
from rlplus.kernels import tiling
from rlplus.kernels.tiling import Block
from rlplus.loss.backends.sampled import MOST

EVERY = pytest.mark.parametrize("backend", ["torch", "triton"])
FP32, FP64 = torch.float32, torch.float64
TOPK = 4


def on_logits(n: int, V: int, dtype: torch.dtype) -> dict[str, Any]:
    """Logits as hidden states of identities, peaked as a policy's are."""
    g = torch.Generator().manual_seed(n + V)
    z, teacher = (3 * torch.randn(n, V, generator=g, dtype=FP64) for _ in range(2))
    eye = torch.eye(V, dtype=FP64)
    weights = torch.randn(n, generator=g, dtype=FP64).masked_fill(torch.arange(n) % 4 == 2, 0.0)
    given = {"hidden": z, "weight": eye, "teacher_hidden": teacher, "teacher_weight": eye, "token_weight": weights}
    return {name: x.to(dtype) for name, x in given.items()}


def exact_gradient(inputs: dict[str, Any], kind: dict[str, Any]) -> Tensor:
    z = inputs["hidden"].double().requires_grad_()
    values = of_logits(z, inputs["teacher_hidden"].double(), **kind)
    return torch.autograd.grad((inputs["token_weight"].double() * values).sum(), z)[0]


@pytest.mark.parametrize(("backend", "kind"), [*(("torch", kind) for kind in KINDS), ("triton", "jsd .2")])
def test_every_element_has_the_right_mean_and_variance(backend: str, kind: str) -> None:
    """An element of share q below the threshold t is t with probability q / t: its variance is q (t - q)."""
    options, draws, threshold, n = KINDS[kind], 16 if backend == "triton" else 200, 0.05, 6
    inputs = on_logits(n, 17, FP32 if backend == "triton" else FP64)
    want = exact_gradient(inputs, options)
    total = want.abs().sum(1, keepdim=True)
    share = want.abs() / total.clamp(min=1e-300)
    variance = torch.where(share < threshold, share * (threshold - share), 0.0) * total**2
    found = [run(backend, inputs, **options, backward="sampled", threshold=threshold, seed=s) for s in range(draws)]
    got = torch.stack([each["dhidden"].double() for each in found])
    rounding = 1e-4 * total if backend == "triton" else 1e-12
    assert ((got.mean(0) - want).abs() <= 5.5 * (variance / draws).sqrt() + rounding).all()
    measured = (got - want).square().mean(0).sum()
    assert abs(measured / variance.sum() - 1) < (0.6 if backend == "triton" else 0.35)
    exact = share >= threshold
    assert ((got - want).abs().amax(0)[exact] <= (rounding + 0 * want)[exact]).all()


@EVERY
def test_below_all_elements_it_is_exact(backend: str) -> None:
    inputs = sample(dtype=FP32)
    got, want = (run(backend, inputs, **more) for more in ({"backward": "sampled", "threshold": 1e-12, "seed": 0}, {}))
    assert torch.equal(got["loss"], want["loss"])
    assert torch.equal(got["divergence"], want["divergence"])
    for name in ("dhidden", "dweight", "dbias"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


def test_a_teachers_likeliest_tokens() -> None:
    """The mean over seeds is the exact gradient, and with a threshold below all elements each draw is."""
    inputs = sample(dtype=FP64)
    teacher = logits(inputs, "teacher_").log_softmax(1).topk(TOPK)
    given = {name: inputs[name] for name in ("hidden", "weight", "bias", "token_weight")}
    given["teacher_topk"] = (teacher.indices, teacher.values)
    want = run("torch", given)
    alike = run("torch", given, backward="sampled", threshold=1e-12, seed=1)
    torch.testing.assert_close(alike["dweight"], want["dweight"], rtol=1e-9, atol=1e-12)
    found = torch.stack(
        [run("torch", given, backward="sampled", threshold=0.05, seed=s)["dweight"] for s in range(300)]
    )
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - want["dweight"]).abs() <= 5.5 * error + 1e-12).all()
    assert (found.std(0) > 0).any()


@EVERY
def test_rows_without_weight_touch_nothing_and_a_row_that_is_no_number_is_seen(backend: str) -> None:
    inputs, options = sample(dtype=FP32), {"backward": "sampled", "threshold": 0.05, "seed": 3}
    want = run(backend, inputs, **options)
    off = inputs["token_weight"] == 0
    hidden = inputs["hidden"].clone()
    hidden[off] = math.nan
    got = run(backend, inputs | {"hidden": hidden}, **options)
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name
    hidden[0] = math.nan
    broken = run(backend, inputs | {"hidden": hidden}, **options)
    assert broken["dweight"].isnan().any()
    assert torch.equal(broken["dhidden"][1:], want["dhidden"][1:])


@EVERY
def test_a_seed_says_all_and_chunks_say_nothing(backend: str) -> None:
    inputs, options = sample(40, 70, dtype=FP32), {"backward": "sampled", "threshold": 0.03}
    one, again, other = (run(backend, inputs, **options, seed=seed) for seed in (5, 5, 6))
    small = run(backend, inputs, **options, seed=5, max_scratch_mb=0.02)
    for name in ("dhidden", "dweight", "dbias"):
        assert torch.equal(one[name], again[name]), name
        torch.testing.assert_close(small[name], one[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(one["dweight"], other["dweight"])


def test_both_backends_keep_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "DRAWN", Block(16, 4))  # three tiles a row
    inputs, options = on_logits(9, 40, FP32), {"backward": "sampled", "threshold": 0.02, "seed": 1}
    numbers = torch.rand(9, generator=torch.Generator(DEVICE["triton"]).manual_seed(1), device=DEVICE["triton"])
    if not torch.equal(numbers.cpu(), torch.rand(9, generator=torch.Generator().manual_seed(1))):
        pytest.skip("the device's generator has other numbers than the CPU's")
    a, b = (run(backend, inputs, **options)["dhidden"] for backend in ("torch", "triton"))
    assert torch.equal(a != 0, b != 0)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_flat_row_keeps_no_more_than_its_share() -> None:
    inputs = on_logits(3, 4000, FP32)
    inputs["hidden"] = inputs["hidden"] * 0.01
    inputs["teacher_hidden"] = inputs["hidden"] + 0.1 * torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    got = run("torch", inputs, backward="sampled", threshold=1e-6, seed=0)["dhidden"]
    counts, weights = (got != 0).sum(1), inputs["token_weight"]
    assert (counts[weights != 0] <= MOST + 2).all()
    assert (counts[weights != 0] > MOST / 2).all()


def test_the_variable_chooses_it_and_reference_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = sample(dtype=FP32)
    exact = run("torch", inputs)
    monkeypatch.setenv("RLPLUS_BACKWARD", "sampled")
    assert not torch.equal(run("torch", inputs, threshold=0.05, seed=0)["dweight"], exact["dweight"])
    assert torch.equal(run("torch", inputs, backward="exact")["dweight"], exact["dweight"])
    with torch.no_grad():
        linear_divergence(**inputs, backend="reference")  # without a gradient there is nothing to sample
    inputs["hidden"].requires_grad_()
    with pytest.raises(ValueError, match="want backward 'exact' with backend 'reference'; got 'sampled', from RLPLUS"):
        linear_divergence(**inputs, backend="reference")
    with pytest.raises(ValueError, match=r"want threshold in \(0, 1\); got 2"):
        linear_divergence(**inputs, backend="torch", threshold=2)
