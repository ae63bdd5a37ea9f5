"""The divergence from k tokens of a teacher and all others together: against float64, its laws, and its contract."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from quick import only
from torch import Tensor
from two_heads import (
    KINDS,
    LEAVES,
    Inputs,
    logits,
    nearly_sure,
    of_logits,
    run,
    sample,
    scales,
    to,
    wide,
    within,
)

from rlplus import linear_divergence
from rlplus.loss.backends import chunked
from rlplus.loss.head.head import Head
from rlplus.loss.operations import library

BACKENDS = ["reference", "torch"]
EVERY = pytest.mark.parametrize("backend", BACKENDS)
EVERY_KIND = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, V = 13, 29
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7, "logit_scale": 0.5},
    "softcap": {"logit_softcap": 3.0, "temperature": torch.linspace(0.6, 1.8, N)},
}
CHUNKS = [None, 4 * V * 16 / 1e6, 1e-9]  # megabytes: all rows, four in fp64, one


def distilled(k: int, dtype: torch.dtype = FP64, seed: int = 0, largest: bool = True) -> Inputs:
    """Arguments of linear_divergence: the teacher of `sample`, its k likeliest tokens or its k unlikeliest."""
    whole = sample(seed=seed)
    logprobs = logits(whole, "teacher_").log_softmax(1)
    tokens = logprobs.topk(k, dim=1, largest=largest).indices
    student = {name: whole[name].to(dtype) for name in LEAVES}
    given = (tokens, logprobs.gather(1, tokens).to(wide(dtype)))
    return student | {"token_weight": whole["token_weight"].to(wide(dtype)), "teacher_topk": given}


def classes_of(z: Tensor, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log q (N, V) with the teacher's rest shared as the student shares its own: of the same divergence."""
    k, p = tokens.shape[1], z.softmax(1)
    named = torch.zeros_like(z, dtype=torch.bool).scatter(1, tokens, True)
    q = logprobs.exp() / (logprobs.exp().sum(1, keepdim=True) if k == V else 1)
    spread = (1 - q.sum(1, keepdim=True)) * p / p.masked_fill(named, 0.0).sum(1, keepdim=True)
    return p.log(), (q if k == V else spread).new_zeros(z.shape).where(named, spread).scatter(1, tokens, q).log()


def closed(inputs: Inputs, kind: str, beta: float | None = None, **numbers: Any) -> dict[str, Tensor]:
    """By the textbook, of k + 1 classes, in the inputs' dtype."""
    leaves = {k: inputs[k].detach().clone().requires_grad_() for k in LEAVES if inputs.get(k) is not None}
    tokens, logprobs = inputs["teacher_topk"]
    p, q = logits(inputs | leaves, **numbers).softmax(1), logprobs.exp()
    listed = p.gather(1, tokens)
    if tokens.shape[1] < V:
        others = torch.ones_like(p).scatter(1, tokens, 0.0)
        listed = torch.cat([listed, (p * others).sum(1, keepdim=True)], 1)
        q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    values = of_logits(listed.log(), q.log(), kind, beta)
    loss = (inputs["token_weight"] * values).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"loss": loss.detach(), "divergence": values.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def as_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    tokens, logprobs = inputs["teacher_topk"]
    return to(inputs, dtype) | {"teacher_topk": (tokens, logprobs.to(dtype))}


def check(got: dict[str, Tensor], inputs: Inputs, options: dict[str, Any], **numbers: Any) -> None:
    dtype, exact = inputs["hidden"].dtype, as_dtype(inputs, FP64)
    _, logq = classes_of(logits(exact, **numbers), *exact["teacher_topk"])
    teacher = {"teacher_hidden": logq, "teacher_weight": torch.eye(V, dtype=FP64), "teacher_bias": None}
    sums = scales(exact | teacher, **numbers, teacher_temperature=1.0)
    plain = closed(as_dtype(inputs, wide(dtype)), **options, **numbers)
    within(got, closed(exact, **options, **numbers), plain, sums, dtype)


@pytest.mark.parametrize("numbers", TRANSFORMS.values(), ids=TRANSFORMS)
@EVERY_KIND
@EVERY
def test_values_and_gradients_in_fp64(backend: str, options: dict[str, Any], numbers: dict[str, Any]) -> None:
    for k, largest in ((1, True), (5, True), (5, False), (V - 1, False), (V, False)):
        inputs = distilled(k, largest=largest)
        for max_scratch_mb in CHUNKS if k == 5 else CHUNKS[:1]:
            check(run(backend, inputs, **options, **numbers, max_scratch_mb=max_scratch_mb), inputs, options, **numbers)


@pytest.mark.parametrize("dtype", only([FP32, BF16], [FP32, BF16, FP16]), ids=str)
@EVERY_KIND
@EVERY
def test_values_and_gradients_in_fewer_bits(backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for numbers in TRANSFORMS.values():
        inputs = distilled(5, dtype, seed=1)
        check(run(backend, inputs, **options, **numbers), inputs, options, **numbers)


def test_leading_shapes_and_tokens_of_32_bits() -> None:
    inputs = distilled(4)
    flat = run("torch", inputs)
    tokens, logprobs = inputs.pop("teacher_topk")
    shaped = {k: v.view(1, N, *v.shape[1:]) if len(v) == N else v for k, v in inputs.items()}
    got = run("torch", shaped | {"teacher_topk": (tokens.int()[None], logprobs[None])})
    assert got["divergence"].shape == (1, N)
    for name, value in flat.items():
        assert torch.equal(got[name].view(value.shape), value), name


# ---- laws


@EVERY_KIND
@EVERY
def test_all_tokens_are_the_whole_vocabulary(backend: str, options: dict[str, Any]) -> None:
    want = run(backend, sample(), **options)
    got = run(backend, distilled(V, largest=False), **options)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@EVERY_KIND
@EVERY
def test_more_tokens_have_no_smaller_divergence_up_to_that_of_the_vocabulary(
    backend: str, options: dict[str, Any]
) -> None:
    found = [run(backend, distilled(k), **options)["divergence"] for k in (1, 2, 5, 20, V)]
    assert (found[0] >= 0).all()
    assert found[0].amax() > 1e-3
    for fewer, more in pairwise(found):
        assert (fewer <= more + 1e-9).all()


@EVERY_KIND
@EVERY
def test_a_student_that_is_its_teacher_has_neither_divergence_nor_gradient(
    backend: str, options: dict[str, Any]
) -> None:
    for dtype, small in ((FP64, 1e-14), (FP32, 1e-5)):
        inputs = distilled(5, dtype)
        logprobs, tokens = logits(inputs).log_softmax(1).topk(5, dim=1)
        got = run(backend, inputs | {"teacher_topk": (tokens, logprobs)}, **options)
        for name, value in got.items():
            assert (value.abs() <= small).all(), name


@EVERY_KIND
@EVERY
def test_order_and_chunks_do_not_matter_and_gradients_of_logits_sum_to_0(backend: str, options: dict[str, Any]) -> None:
    inputs = distilled(6, FP32, seed=2)
    whole = run(backend, inputs, **options)
    assert whole["dbias"].sum().abs() <= 1e-6 * whole["dbias"].abs().sum()
    g = torch.Generator().manual_seed(0)
    rows, words, places = (torch.randperm(n, generator=g) for n in (N, V, 6))
    mixed = {k: v[words if len(v) == V else rows] for k, v in inputs.items() if k != "teacher_topk"}
    tokens, logprobs = (x[rows][:, places] for x in inputs["teacher_topk"])
    mixed["teacher_topk"] = (words.argsort()[tokens], logprobs)
    got = run(backend, mixed, **options, max_scratch_mb=4 * V * 8 / 1e6)
    got |= {k: got[k][rows.argsort()] for k in ("divergence", "dhidden")}
    got |= {k: got[k][words.argsort()] for k in ("dweight", "dbias")}
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)


@EVERY_KIND
@EVERY
def test_rows_of_weight_0_change_no_bit(backend: str, options: dict[str, Any]) -> None:
    inputs, off = distilled(5, FP32), sample()["token_weight"] == 0
    tokens, logprobs = inputs["teacher_topk"]
    dirty = inputs | {
        "hidden": inputs["hidden"].masked_fill(off[:, None], math.nan),
        "teacher_topk": (tokens.masked_fill(off[:, None], -7), logprobs.masked_fill(off[:, None], math.nan)),
    }
    for max_scratch_mb in (None, 4 * V * 8 / 1e6):
        want = run(backend, inputs, **options, max_scratch_mb=max_scratch_mb)
        got = run(backend, dirty, **options, max_scratch_mb=max_scratch_mb)
        for name in ("loss", "dhidden", "dweight", "dbias"):
            assert torch.equal(got[name], want[name]), name
        assert torch.equal(got["divergence"][~off], want["divergence"][~off])


@pytest.mark.parametrize("named", [True, False], ids=["named", "among the others"])
@EVERY_KIND
@EVERY
def test_nearly_sure_tokens_keep_their_digits(backend: str, options: dict[str, Any], named: bool) -> None:
    """1 - p from 1e-2 to 1e-7 under both. weight = identity: the logits are exact, and dhidden is their gradient."""
    size, gaps = 300, torch.linspace(4.6, 16.1, 12, dtype=FP64)
    z, teacher = (nearly_sure(gap, size, seed).float() for seed, gap in enumerate((gaps, gaps + 0.3)))
    tokens = torch.arange(3).expand(12, 3) if named else torch.arange(7, 10).expand(12, 3)
    logq = sure_logprobs(teacher.double())
    given = (tokens, logq.gather(1, tokens))
    inputs = {"hidden": z, "weight": torch.eye(size), "token_weight": torch.ones(12), "teacher_topk": given}
    got = run(backend, inputs, **options)
    leaf = z.double().requires_grad_()
    others = torch.ones(size, dtype=torch.bool).scatter(0, tokens[0], False)
    pair = [
        torch.cat([x.gather(1, tokens), x[:, others].logsumexp(1, keepdim=True)], 1) for x in (leaf, teacher.double())
    ]
    want = of_logits(*pair, **options)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    top = slope.abs().amax(1, keepdim=True)
    if named:  # the teacher's rest is a sum of other tokens; else it is a sum of 1, and epsilon is of that
        torch.testing.assert_close(got["divergence"].double(), want.detach(), rtol=1e-4, atol=0)
    assert ((got["dhidden"] - slope).abs() <= 1e-4 * top).all()
    assert want[-1] < 1e-6


def sure_logprobs(z: Tensor) -> Tensor:
    """log softmax (n, V) whose first token keeps the digits of 1 - p."""
    rest = z[:, 1:].logsumexp(1) - z[:, 0]
    return z.log_softmax(1).index_copy(1, torch.tensor([0]), -torch.nn.functional.softplus(rest)[:, None])


@EVERY
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_teacher_that_is_sure_by_rounding_leaves_epsilon_to_the_others(backend: str, dtype: torch.dtype) -> None:
    inputs, eps = distilled(2, FP32), torch.finfo(dtype).eps
    tokens, _ = inputs["teacher_topk"]
    sure = torch.tensor([0.0, -math.inf], dtype=dtype).expand(N, 2)
    got = run(backend, inputs | {"teacher_topk": (tokens, sure)}, kind="forward_kl")["divergence"]
    p = logits(to(inputs, FP64)).softmax(1)
    named = p.gather(1, tokens)
    pair = torch.stack([named[:, 0], 1 - named.sum(1)], 1)
    q = torch.tensor([1.0, eps], dtype=FP64) / (1 + eps)
    torch.testing.assert_close(got.double(), (q * (q / pair).log()).sum(1), rtol=1e-5, atol=1e-6)


@EVERY
@pytest.mark.parametrize("where", ["named", "other", "all others"])
def test_tokens_that_the_student_cannot_have(backend: str, where: str) -> None:
    """As with logits of -60, which stand for the same."""
    inputs = distilled(5, FP32)
    named = torch.arange(5).expand(N, 5)
    inputs["teacher_topk"] = (named, logits(sample(), "teacher_").log_softmax(1)[:, :5].float())
    gone = {"named": slice(3, 4), "other": slice(9, 10), "all others": slice(5, None)}[where]
    there = {**inputs, "bias": inputs["bias"].clone()}
    there["bias"][gone] = -math.inf
    for options in (KINDS["jsd"], {"kind": "reverse_kl"}):
        got = run(backend, there, **options)
        assert all(value.isfinite().all() for value in got.values())
        assert got["dweight"][gone].abs().max() == 0
        far = {**inputs, "bias": inputs["bias"].clone()}
        far["bias"][gone] = -60.0
        want = closed(as_dtype(far, FP64), **options)
        for key, value in want.items():
            torch.testing.assert_close(got[key].double(), value, rtol=1e-4, atol=1e-5)


# ---- contract


def test_it_takes_the_scratch_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    products = chunked.raw_logits
    monkeypatch.setattr(chunked, "raw_logits", lambda head: (seen.append(len(head.target)), products(head))[1])
    run("torch", distilled(5, FP32), max_scratch_mb=3 * V * 8 / 1e6)
    assert seen == [3, 3, 3, 3, 1]  # two buffers a row of 4 bytes, and one product


@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_it_is_a_well_formed_torch_op(needs: list[bool]) -> None:
    inputs = distilled(5, FP32)
    head = Head(
        inputs["hidden"], inputs["weight"].bfloat16(), inputs["bias"], torch.zeros(N, dtype=torch.int64), 0.7, 2.0
    )
    arguments = (needs, *head, *inputs["teacher_topk"], inputs["token_weight"], 0.3, 4000.0)
    torch.library.opcheck(library.linear_topk_divergence, arguments)


@EVERY
def test_it_compiles_into_one_graph_and_is_differentiated_once(backend: str) -> None:
    inputs = distilled(5, FP32)
    leaf = inputs.pop("hidden").requires_grad_()

    def call(hidden: Tensor) -> Tensor:
        return 2 * linear_divergence(hidden, **inputs, kind="jsd", backend=backend).loss

    loss = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf)
    (got,), (want,) = (torch.autograd.grad(x, leaf) for x in (loss, call(leaf)))
    torch.testing.assert_close(got, want)
    if backend == "torch":
        with pytest.raises(RuntimeError, match="want create_graph=False"):
            torch.autograd.grad(call(leaf), leaf, create_graph=True)


def test_auto_is_torch_whatever_the_environment_has_for_other_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = distilled(5, FP32)
    calls: list[str] = []
    found = chunked.topk_divergence
    monkeypatch.setattr(chunked, "topk_divergence", lambda *given: (calls.append("torch"), found(*given))[1])
    linear_divergence(**inputs)
    assert calls == ["torch"]
    monkeypatch.setenv("RLPLUS_BACKEND", "triton")
    with pytest.raises(ValueError, match="want backend reference or torch with teacher_topk; got 'triton'"):
        linear_divergence(**inputs)


LOGPROBS = torch.full((N, 2), -1.0)
TOKENS = torch.tensor([[3, 8]] * N)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"teacher_topk": TOKENS}, r"want teacher_topk a pair of tensors, .* \(..., k\); got int64 \(13, 2\)"),
    ({"teacher_topk": (TOKENS, None)}, "want teacher_topk a pair of tensors"),
    ({"teacher_topk": (TOKENS.float(), LOGPROBS)}, "want teacher_topk tokens a tensor, int64 .*; got float32"),
    ({"teacher_topk": (TOKENS[1:], LOGPROBS)}, r"want teacher_topk tokens .* \(13, 2\) on cpu; got int64 \(12, 2\)"),
    ({"teacher_topk": (TOKENS, LOGPROBS[:, :1])}, r"want teacher_topk logprobs .* \(13, 2\) on cpu; .* \(13, 1\)"),
    ({"teacher_topk": (TOKENS[:, :0], LOGPROBS[:, :0])}, r"tokens \(..., k\), k from 1 to 29; got int64 \(13, 0\)"),
    ({"teacher_topk": (TOKENS.repeat(1, 15), LOGPROBS.repeat(1, 15))}, r"k from 1 to 29; got int64 \(13, 30\)"),
    ({"teacher_topk": (TOKENS + 21, LOGPROBS)}, r"want teacher_topk tokens in \[0, 29\) wherever .*; got one outside"),
    ({"teacher_topk": (TOKENS - 4, LOGPROBS)}, r"want teacher_topk tokens in \[0, 29\)"),
    ({"teacher_topk": (TOKENS * 0, LOGPROBS)}, "want each of a row's teacher_topk tokens once .*; got one twice"),
    ({"teacher_topk": (TOKENS, LOGPROBS.exp())}, "logprobs in nats, of probabilities that add up to at most 1 "),
    ({"teacher_topk": (TOKENS, LOGPROBS * math.nan)}, "add up to at most 1 .*; got more than 1.001, or NaN"),
    ({"teacher_topk": (TOKENS, LOGPROBS.new_tensor([0.6, 0.402]).log().expand(N, 2))}, "got more than 1.001, or NaN"),
    ({"teacher_topk": (TOKENS, LOGPROBS.new_tensor([0.6, 0.44]).log().expand(N, 2).bfloat16())}, "more than 1.03125"),
    ({"teacher_hidden": torch.zeros(N, 7)}, "want teacher_topk alone of the teacher's arguments; got others beside it"),
    ({"teacher_temperature": torch.ones(N)}, "want teacher_topk alone"),
    ({"teacher_logit_softcap": 1.0}, "want teacher_topk alone"),
    ({"teacher_topk": None}, r"the teacher's head: want hidden \(..., H\).*; got NoneType and NoneType"),
    ({"token_weight": torch.full((N,), math.nan)}, "want token_weight finite everywhere; got NaN or Inf"),
    ({"temperature": torch.full((N,), math.inf)}, "want temperature finite and > 0 wherever"),
]  # fmt: skip


@EVERY
@pytest.mark.parametrize(("change", "message"), BAD)
def test_it_says_what_it_wanted_and_what_came(change: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_divergence(**(distilled(2, FP32) | {"backend": backend} | change))
