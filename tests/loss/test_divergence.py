"""The divergence of two heads: every backend against float64, the laws of divergences, and its contract."""

import math
from typing import Any

import pytest
import torch
from quick import only
from torch import Tensor
from two_heads import DEVICE, KINDS, LEAVES, check, closed, nearly_sure, of_logits, run, sample, to

import rlplus
from rlplus import linear_divergence
from rlplus.loss.backends import chunked, native
from rlplus.loss.head.head import Head
from rlplus.loss.operations import library

BACKENDS = ["reference", "torch", "triton"]
EVERY = pytest.mark.parametrize("backend", only(BACKENDS[:2], BACKENDS))  # many calls of interpreted kernels
EVERY_KIND = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROW_TEMPERATURE = torch.linspace(0.6, 1.8, 13)
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "two heads": {"logit_scale": 0.5, "teacher_logit_scale": 2.0, "teacher_temperature": 1.3},
    "softcaps": {"logit_softcap": 3.0, "teacher_logit_softcap": 2.0, "temperature": 0.7, "logit_scale": 1.5},
    "of rows": {"temperature": ROW_TEMPERATURE, "logit_softcap": 4.0},
}
CHUNKS = [None, 4 * 29 * 24 / 1e6, 1e-9]  # megabytes: all rows, four with `torch`, one


def on(backend: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE.get(backend, "cpu")) if isinstance(v, Tensor) else v for k, v in numbers.items()}


@pytest.mark.parametrize("numbers", TRANSFORMS.values(), ids=TRANSFORMS)
@EVERY_KIND
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_values_and_gradients_in_fp64(backend: str, options: dict[str, Any], numbers: dict[str, Any]) -> None:
    inputs = sample()
    for max_scratch_mb in CHUNKS:
        got = run(backend, inputs, **options, **numbers, max_scratch_mb=max_scratch_mb)
        check(got, inputs, options, **numbers)


@pytest.mark.parametrize("dtype", only([FP32, BF16], [FP32, BF16, FP16]), ids=str)
@pytest.mark.parametrize("numbers", [TRANSFORMS["plain"], TRANSFORMS["softcaps"], TRANSFORMS["of rows"]], ids=str)
@EVERY_KIND
@EVERY
def test_values_and_gradients_in_fewer_bits(
    backend: str, options: dict[str, Any], numbers: dict[str, Any], dtype: torch.dtype
) -> None:
    inputs = sample(dtype=dtype, seed=1)
    rounded = dtype if DEVICE.get(backend) == "cuda" else FP32
    for max_scratch_mb in CHUNKS[:2]:
        got = run(backend, inputs, **options, **on(backend, numbers), max_scratch_mb=max_scratch_mb)
        check(got, inputs, options, rounded, **numbers)


@EVERY
def test_heads_of_two_dtypes(backend: str) -> None:
    """A student of fp32 with a weight of bf16, and a teacher of bf16 with a weight of fp32, which is rounded."""
    inputs = sample(dtype=FP32)
    mixed = inputs | {"weight": inputs["weight"].to(BF16), "teacher_hidden": inputs["teacher_hidden"].to(BF16)}
    got = run(backend, mixed, kind="jsd")
    assert got["dweight"].dtype == BF16
    same = {k: v.to(BF16).float() if k.startswith("teacher_") else v for k, v in mixed.items()}
    want = run(backend, same | {"weight": mixed["weight"].float()}, kind="jsd")
    assert torch.equal(got["dweight"], want["dweight"].to(BF16))
    for name in ("loss", "divergence", "dhidden", "dbias"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_leading_shapes_and_no_bias() -> None:
    inputs = sample(12)
    inputs["bias"] = inputs["teacher_bias"] = None
    want = closed(inputs, kind="jsd")
    shaped = {k: v.view(3, 4, *v.shape[1:]) if v is not None and len(v) == 12 else v for k, v in inputs.items()}
    got = run("torch", shaped, kind="jsd")
    assert got["divergence"].shape == (3, 4)
    for name, value in want.items():
        torch.testing.assert_close(got[name].reshape(value.shape), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_rows_of_several_blocks(beta: float) -> None:
    """More of the vocabulary than a kernel processes at a time, and a largest logit in each part of it."""
    from rlplus.kernels import divergence_rows

    V = 2 * divergence_rows.ROWS.BLOCK_V + 37
    inputs = sample(3, V, dtype=FP32)
    steps = torch.arange(V) / divergence_rows.ROWS.BLOCK_V
    inputs["bias"] += 3 * steps
    inputs["teacher_bias"] -= 2 * steps
    inputs["token_weight"] += 0.5
    numbers = {"teacher_temperature": ROW_TEMPERATURE[:3], "teacher_logit_softcap": 9.0}
    options = {"kind": "jsd", "beta": beta}
    exact = {"kind": {0.0: "forward_kl", 1.0: "reverse_kl"}[beta]} if beta in (0.0, 1.0) else options
    check(run("triton", inputs, **options, **on("triton", numbers)), inputs, exact, **numbers)


# ---- laws


@EVERY_KIND
@EVERY
def test_a_student_that_is_its_teacher_has_neither_divergence_nor_gradient(
    backend: str, options: dict[str, Any]
) -> None:
    inputs = sample(dtype=FP32)
    inputs |= {f"teacher_{name}": inputs[name] for name in LEAVES}
    got = run(backend, inputs, **options)
    for name, value in got.items():
        assert (value.abs() <= (0 if backend != "reference" else 1e-5)).all(), name


def swapped(inputs: dict[str, Any]) -> dict[str, Any]:
    there = {f"teacher_{name}": inputs[name] for name in LEAVES}
    return inputs | there | {name: inputs[f"teacher_{name}"] for name in LEAVES}


@EVERY
def test_the_roles_can_be_changed(backend: str) -> None:
    inputs = sample(dtype=FP32)
    pairs = (({"kind": "reverse_kl"}, {"kind": "forward_kl"}), ({"kind": "jsd"}, {"kind": "jsd"}),
             ({"kind": "jsd", "beta": 0.2}, {"kind": "jsd", "beta": 0.8}))  # fmt: skip
    for one, other in pairs:
        got, want = run(backend, inputs, **one), run(backend, swapped(inputs), **other)
        torch.testing.assert_close(got["divergence"], want["divergence"], rtol=1e-5, atol=1e-6)


@EVERY
def test_the_ends_of_a_jsd_are_the_two_divergences_and_approached_from_inside(backend: str) -> None:
    inputs = sample(dtype=FP32)
    forward, reverse = (run(backend, inputs, kind=kind) for kind in ("forward_kl", "reverse_kl"))
    for beta, want in ((0, forward), (1, reverse)):
        got = run(backend, inputs, kind="jsd", beta=beta)
        assert all(torch.equal(got[name], want[name]) for name in want)
    for beta, factor, want in ((1e-5, 1e-5, forward), (1 - 2.0**-14, 2.0**-14, reverse)):
        got = run(backend, inputs, kind="jsd", beta=beta)
        torch.testing.assert_close(got["divergence"] / factor, want["divergence"], rtol=2e-2, atol=1e-3)
        torch.testing.assert_close(got["dhidden"] / factor, want["dhidden"], rtol=2e-2, atol=1e-2)
    jsd = run(backend, inputs | {"hidden": 100 * inputs["hidden"]}, kind="jsd")["divergence"]
    assert (jsd <= math.log(2) + 1e-6).all()
    assert (jsd >= 0).all()


@EVERY_KIND
@EVERY
def test_order_and_chunks_do_not_matter_and_gradients_of_logits_sum_to_0(backend: str, options: dict[str, Any]) -> None:
    inputs = sample(dtype=FP32, seed=2)
    whole = run(backend, inputs, **options)
    assert whole["dbias"].sum().abs() <= 1e-6 * whole["dbias"].abs().sum()
    g = torch.Generator().manual_seed(0)
    rows, words = torch.randperm(13, generator=g), torch.randperm(29, generator=g)
    mixed = {k: v[words if len(v) == 29 else rows] for k, v in inputs.items()}
    got = run(backend, mixed, **options, max_scratch_mb=CHUNKS[1])
    got |= {k: got[k][rows.argsort()] for k in ("divergence", "dhidden")}
    got |= {k: got[k][words.argsort()] for k in ("dweight", "dbias")}
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)


@EVERY_KIND
@EVERY
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_rows_of_weight_0_change_no_bit(backend: str, options: dict[str, Any], poison: float) -> None:
    inputs = sample(dtype=FP32) | {"temperature": ROW_TEMPERATURE.clone()}
    for max_scratch_mb in CHUNKS[:2]:
        want = run(backend, inputs, **options, max_scratch_mb=max_scratch_mb)
        off = inputs["token_weight"] == 0
        assert off.any()
        dirty = {k: inputs[k].masked_fill(off[:, None], poison) for k in ("hidden", "teacher_hidden")}
        dirty["temperature"] = ROW_TEMPERATURE.masked_fill(off, -poison)
        got = run(backend, inputs | dirty, **options, max_scratch_mb=max_scratch_mb)
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(got[name], want[name]), name
        assert torch.equal(got["divergence"][~off], want["divergence"][~off])


@EVERY_KIND
@EVERY
def test_nearly_sure_tokens_keep_their_digits(backend: str, options: dict[str, Any]) -> None:
    """1 - p from 1e-2 to 1e-7 under both. weight = identity: the logits are exact, and dhidden is their gradient."""
    V, gaps = 300, torch.linspace(4.6, 16.1, 12, dtype=FP64)
    z, teacher = (nearly_sure(gap, V, seed).float() for seed, gap in enumerate((gaps, gaps + 0.3)))
    eye, ones = torch.eye(V), torch.ones(12)
    inputs = {"hidden": z, "weight": eye, "teacher_hidden": teacher, "teacher_weight": eye, "token_weight": ones}
    got = run(backend, inputs, **options)
    leaf = z.double().requires_grad_()
    want = of_logits(leaf, teacher.double(), **options)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    torch.testing.assert_close(got["divergence"].double(), want.detach(), rtol=1e-4, atol=0)
    top = slope.abs().amax(1, keepdim=True)
    assert ((got["dhidden"] - slope).abs() <= 1e-4 * top).all()
    assert want[-1] < 1e-6


@EVERY
def test_a_small_divergence_is_no_difference_of_larger_numbers(backend: str) -> None:
    """Logits that differ by 1e-3: the error of the logits, 1e-6 of them, is squared away in the divergence."""
    inputs = sample(dtype=FP32, H=7, V=300)
    inputs |= {f"teacher_{name}": inputs[name] for name in LEAVES}
    inputs["teacher_hidden"] = inputs["hidden"] * 1.001
    for options in KINDS.values():
        got = run(backend, inputs, **options)["divergence"].double()
        want = closed(to(inputs, FP64), **options)["divergence"]
        assert (want < 1e-4).all()
        assert ((got - want).abs() <= 1e-2 * want).all()


@EVERY_KIND
@EVERY
def test_near_models_have_divergences_and_gradients_to_their_digits(backend: str, options: dict[str, Any]) -> None:
    """Logits that differ by 1e-4. weight = identity: they are exact, and dhidden is their gradient."""
    g = torch.Generator().manual_seed(3)
    z, noise = (torch.randn(9, 300, generator=g) for _ in range(2))
    teacher = z + 1e-4 * noise
    eye, ones = torch.eye(300), torch.ones(9)
    inputs = {"hidden": z, "weight": eye, "teacher_hidden": teacher, "teacher_weight": eye, "token_weight": ones}
    got = run(backend, inputs, **options)
    leaf = z.double().requires_grad_()
    want = of_logits(leaf, teacher.double(), **options)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    assert (want < 1e-8).all()
    torch.testing.assert_close(got["divergence"].double(), want.detach(), rtol=1e-2, atol=0)
    assert (got["dhidden"] - slope).norm() <= 1e-2 * slope.norm()


@EVERY
def test_tokens_that_one_of_the_two_cannot_have(backend: str) -> None:
    """Neither can have token 3, only the student token 5: a forward divergence and a jsd are what they would be."""
    inputs = sample(dtype=FP32)
    inputs["bias"][3] = inputs["teacher_bias"][3] = inputs["teacher_bias"][5] = -math.inf
    exact = to(inputs, FP64)
    for name, options in KINDS.items():
        got = run(backend, inputs, **options)
        assert all(value.isfinite().all() for value in got.values())
        assert got["dweight"][3].eq(0).all()
        if name == "reverse":
            p = (exact["hidden"] @ exact["weight"].T + exact["bias"]).softmax(1)[:, 5]
            torch.testing.assert_close(got["divergence"].double(), 1e30 * p, rtol=1e-4, atol=0)
            continue
        finite = {k: v.clamp(min=-60) if "bias" in k else v for k, v in exact.items()}
        want = closed(finite, **options)
        for key, value in want.items():
            torch.testing.assert_close(got[key].double(), value, rtol=1e-4, atol=1e-5)


# ---- contract


def test_the_torch_backend_takes_the_scratch_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    products = chunked.raw_logits
    monkeypatch.setattr(chunked, "raw_logits", lambda head: (seen.append(len(head.target)), products(head))[1])
    run("torch", sample(20, dtype=FP32), max_scratch_mb=3 * 29 * 24 / 1e6)
    assert seen == [*(3,) * 12, 2, 2]  # the student's and the teacher's of each chunk: six buffers a row of 4 bytes


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_triton_backend_takes_the_scratch_that_it_is_given(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of half precision, which a GPU has, are in a buffer of their own."""
    from rlplus.loss.backends import divergence_chunks

    monkeypatch.setattr(divergence_chunks, "gradient_dtype", lambda head: dtype)
    head, _ = (library.Head(*(sample(20, dtype=dtype)[k] for k in LEAVES), torch.zeros(20), 1.0) for _ in range(2))
    each = 64 * (8 if dtype == FP32 else 10) + 2 * 5 * (dtype.itemsize + 4)
    for gradient, n in ((True, 3), (False, 3)):
        chunks = list(divergence_chunks._chunks(head, 3 * each, gradient))
        rows, (logits, teacher, out) = chunks[0]
        assert rows == slice(0, n if dtype == FP32 or gradient else 3 * each // (each - 128))
        assert logits.shape == teacher.shape == out.shape == (rows.stop, 64)
        assert (out is logits or out.data_ptr() == logits.data_ptr()) == (dtype == FP32 or not gradient)
        assert logits.data_ptr() != teacher.data_ptr()
        assert chunks[-1][0].stop == 20


@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
@pytest.mark.parametrize("backend", only(["torch"], BACKENDS[1:]))
def test_it_is_a_well_formed_torch_op(backend: str, needs: list[bool]) -> None:
    inputs = {k: v.to(DEVICE.get(backend, "cpu")) for k, v in sample(dtype=FP32).items()}
    target = torch.zeros(13, dtype=torch.int64, device=inputs["hidden"].device)
    head = Head(inputs["hidden"], inputs["weight"].bfloat16(), inputs["bias"], target, 0.7, 2.0)
    teacher = Head(inputs["teacher_hidden"], inputs["teacher_weight"], None, target, 1.0)
    arguments = (needs, *head, *teacher, inputs["token_weight"], 0.3, 4000.0, backend)
    torch.library.opcheck(library.linear_divergence, arguments)


@pytest.mark.parametrize("backend", only(["torch"], BACKENDS))
def test_it_compiles_into_one_graph_and_is_differentiated_once(backend: str) -> None:
    inputs = {k: v.to(DEVICE.get(backend, "cpu")) for k, v in sample(dtype=FP32).items()}
    leaf = inputs.pop("hidden").requires_grad_()

    def call(hidden: Tensor) -> Tensor:
        return 2 * linear_divergence(hidden, **inputs, kind="jsd", backend=backend).loss

    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf)
    (got,), (want,) = (torch.autograd.grad(x, leaf) for x in (loss, call(leaf)))
    torch.testing.assert_close(got, want)
    if backend != "reference":
        with pytest.raises(RuntimeError, match="want create_graph=False"):
            torch.autograd.grad(call(leaf), leaf, create_graph=True)


def test_a_factor_of_the_loss_scales_its_gradients_and_nothing_else_is_differentiable() -> None:
    inputs = sample(dtype=FP32)
    inputs["teacher_weight"].requires_grad_()
    leaf = inputs["hidden"].requires_grad_()
    out = linear_divergence(**inputs, backend="torch")
    assert not out.divergence.requires_grad
    once = torch.autograd.grad(out.loss, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(8 * out.loss, leaf)[0], 8 * once)
    assert linear_divergence(**inputs, backend="torch").loss.backward() is None
    assert inputs["teacher_weight"].grad is None


def test_auto_on_a_cpu_is_torch_and_cpp_says_which_backends_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = sample(dtype=FP32)
    calls: list[str] = []
    found = library.divergence
    monkeypatch.setattr(library, "divergence", lambda name: (calls.append(name), found(name))[1])
    linear_divergence(**inputs)
    assert calls == ["torch"]
    if native.load() is not None:
        with pytest.raises(ValueError, match="want backend reference, torch, triton for a divergence; got 'cpp'"):
            linear_divergence(**inputs, backend="cpp")


N, V = 13, 29
BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "kl"}, "want kind one of reverse_kl, forward_kl, jsd; got 'kl'"),
    ({"kind": 1.0}, "want kind one of .*; got 1.0"),
    ({"beta": 0.5}, "want beta with kind 'jsd' only; got beta=0.5 with 'reverse_kl'"),
    ({"kind": "jsd", "beta": 1.1}, r"want beta in \[0, 1\].*; got 1.1"),
    ({"kind": "jsd", "beta": -0.1}, r"want beta in \[0, 1\]"),
    ({"kind": "jsd", "beta": math.nan}, r"want beta in \[0, 1\].*; got nan"),
    ({"kind": "jsd", "beta": "0.5"}, r"want beta in \[0, 1\].*; got '0.5'"),
    ({"hidden": torch.zeros(N, 4)}, r"want hidden \(..., H\) and weight \(V, H\).*got float32 \(13, 4\)"),
    ({"hidden": None}, r"want hidden \(..., H\).*; got NoneType"),
    ({"teacher_hidden": torch.zeros(N, 4)}, r"the teacher's head: want hidden .*got float32 \(13, 4\)"),
    ({"teacher_hidden": torch.zeros(N - 1, 7)}, r"of the student's tokens.*\(13,\), 29 and cpu; got float32 \(12, 7\)"),
    ({"teacher_weight": torch.zeros(V + 1, 7), "teacher_bias": None}, r"of the student's tokens.*float32 \(30, 7\)"),
    ({"teacher_hidden": torch.zeros(N, 7, device="meta")}, "the teacher's head: want hidden and weight .* one device"),
    ({"teacher_hidden": torch.zeros(N, 7, requires_grad=True)}, "want teacher_hidden without a gradient"),
    ({"teacher_bias": torch.zeros(3)}, "the teacher's head: want bias .*"),
    ({"teacher_logit_softcap": 0.0}, "the teacher's head: want logit_softcap a finite number > 0; got 0.0"),
    ({"temperature": 0.0}, "want temperature a finite number > 0; got 0.0"),
    ({"token_weight": torch.ones(N - 1)}, r"want token_weight a tensor, floating \(13,\) on cpu; got float32 \(12,\)"),
    ({"token_weight": None}, "want token_weight .*; got NoneType"),
    ({"token_weight": torch.full((N,), math.nan)}, "want token_weight finite everywhere; got NaN or Inf"),
    ({"temperature": torch.full((N,), math.inf)}, "want temperature finite and > 0 wherever"),
    ({"teacher_temperature": torch.full((N,), -1.0)}, "want temperature finite and > 0 wherever"),
    ({"max_scratch_mb": 0}, "want max_scratch_mb a finite number > 0; got 0"),
    ({"backend": "torhc"}, "want backend 'auto' or one of .*; got 'torhc'"),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "message"), BAD)
def test_it_says_what_it_wanted_and_what_came(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_divergence(**(sample(dtype=FP32) | {"backend": backend} | change))


def test_the_names_are_public() -> None:
    assert rlplus.linear_divergence is linear_divergence
    assert isinstance(linear_divergence(**sample()), rlplus.DivergenceLoss)
