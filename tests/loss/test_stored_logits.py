"""`linear_logprob` computes each logit once where memory allows: what the forward pass stores gives the gradients that
computing the logits again gives, and the gradients of float64."""

from typing import Any

import pytest
import quick
import torch
from head_cases import sample
from torch import Tensor

from rlplus import linear_logprob
from rlplus.loss.backends import chunked, cpp, native, triton_chunks
from rlplus.loss.operations import logprob_library

CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
EVERY = pytest.mark.parametrize("backend", ["torch", CPP, "triton"])
N, V, ALL = 40, 70, 1e3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, temperature": {"logit_softcap": 2.0, "temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.5, 2.0, N)},
}


def on(backend: str, x: Any) -> Any:
    return x.to(DEVICE.get(backend, "cpu")) if isinstance(x, Tensor) else x


def leaves(dtype: torch.dtype, backend: str = "torch", frozen: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    head, _ = sample(N, V, dtype=dtype)
    target = head.pop("target")
    target[3] = -100
    leaf = {k: on(backend, v).requires_grad_(k == "hidden" or not frozen) for k, v in head.items()}
    return leaf, on(backend, target)


def slopes(bonus: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    up = torch.randn(N, generator=g), torch.randn(N, generator=g) * bonus
    up[0][::3] = 0  # rows without a gradient, unless of the entropy
    return up


def gradients(backend: str, dtype: torch.dtype, mb: float, bonus: bool = True, **options: Any) -> list[Tensor]:
    leaf, target = leaves(dtype, backend)
    options = {k: on(backend, v) for k, v in options.items()}
    found = linear_logprob(**leaf, target=target, backend=backend, max_scratch_mb=mb, **options)
    loss = sum((on(backend, up) * x).sum() for up, x in zip(slopes(bonus), found, strict=True))
    return [x.detach().cpu().double() for x in (*found, *torch.autograd.grad(loss, list(leaf.values())))]


def exact(dtype: torch.dtype, bonus: bool, logit_softcap: float = 0.0, temperature: Any = 1.0) -> list[Tensor]:
    leaf, target = leaves(dtype)
    leaf = {k: v.detach().double().requires_grad_() for k, v in leaf.items()}
    z = leaf["hidden"] @ leaf["weight"].T + leaf["bias"]
    z = logit_softcap * (z / logit_softcap).tanh() if logit_softcap else z
    z = z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = z.log_softmax(1)
    logprob = logp.gather(1, target.clamp(min=0)[:, None]).squeeze(1).masked_fill(target < 0, 0.0)
    entropy = -(logp.exp() * logp).sum(1)
    loss = sum((up * x).sum() for up, x in zip(slopes(bonus), (logprob, entropy), strict=True))
    return [x.detach() for x in (logprob, entropy, *torch.autograd.grad(loss, list(leaf.values())))]


def part(backend: str, dtype: torch.dtype, rows: float) -> float:
    """max_scratch_mb at which so many rows are stored."""
    leaf, target = leaves(dtype, backend)
    head = logprob_library.Head(leaf["hidden"].detach(), leaf["weight"].detach(), None, target, 1.0)
    stored = logprob_library.implementation(backend).new_stored(head, 1)
    return rows * sum(x.nbytes for x in stored) / 1e6


@pytest.mark.parametrize(
    ("dtype", "transform", "bonus", "backend"),
    quick.pairs([FP32, BF16, FP16], TRANSFORMS, [False, True], ["torch", CPP, "triton"]),
    ids=str,
)
def test_all_rows_some_and_none_give_the_gradients_of_float64(
    dtype: torch.dtype, transform: str, bonus: bool, backend: str
) -> None:
    want = exact(dtype, bonus, **TRANSFORMS[transform])
    bound = 2e-6 if dtype == FP32 else 1.5e-2 if dtype == BF16 else 2e-3
    for rows in (0.5, 11.5, ALL):
        got = gradients(backend, dtype, part(backend, dtype, rows), bonus, **TRANSFORMS[transform])
        for x, y in zip(got, want, strict=True):
            assert (x - y).norm() <= bound * max(y.norm(), 1e-3), rows


@EVERY
def test_no_logit_of_a_stored_row_is_computed_twice(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    module, name = {
        "torch": (chunked, "raw_logits"), "cpp": (cpp, "fill_logits"), "triton": (triton_chunks, "logits_into"),
    }[backend]  # fmt: skip
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda head, *rest: (rows.append(len(head.target)), original(head, *rest))[1])
    for stored, computed in ((0.5, 2 * N), (11.5, 2 * N - 11), (ALL, N)):
        rows.clear()
        gradients(backend, FP32, part(backend, FP32, stored))
        assert sum(rows) == computed, stored


@EVERY
def test_what_is_stored_keeps_to_its_memory(backend: str) -> None:
    leaf, target = leaves(FP32, backend)
    head = logprob_library.Head(*(leaf[k].detach() for k in ("hidden", "weight", "bias")), target, 1.0)
    for rows in (0, 1, 7, N):
        limit = part(backend, FP32, rows + 0.5) * 1e6
        *_, logits, numbers = logprob_library.linear_logprob(*head, limit, backend, True)
        assert len(logits) == len(numbers) == rows
        assert logits.nbytes + numbers.nbytes <= limit
    *_, logits, numbers = logprob_library.linear_logprob(*head, 1e9, backend, False)
    assert len(logits) == len(numbers) == 0, "without a backward pass"


@EVERY
@pytest.mark.parametrize("rows", [11.5, ALL])
def test_a_retained_graph_gives_the_same_bits_again(rows: float, backend: str) -> None:
    leaf, target = leaves(FP32, backend)
    found = linear_logprob(**leaf, target=target, backend=backend, max_scratch_mb=part(backend, FP32, rows))
    loss = sum((on(backend, up) * x).sum() for up, x in zip(slopes(True), found, strict=True))
    first = torch.autograd.grad(loss, list(leaf.values()), retain_graph=True)
    linear_logprob(**leaf, target=target, backend=backend)[0].sum().backward()  # takes what memory there is
    second = torch.autograd.grad(loss, list(leaf.values()))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@EVERY
def test_a_frozen_head_has_no_gradient_of_its_own(backend: str) -> None:
    leaf, target = leaves(FP32, backend, frozen=True)
    logprob, _ = linear_logprob(**leaf, target=target, backend=backend)
    (on(backend, slopes(True)[0]) * logprob).sum().backward()
    want = gradients(backend, FP32, ALL, bonus=False)[2]
    assert leaf["hidden"].grad is not None
    assert leaf["weight"].grad is None
    torch.testing.assert_close(leaf["hidden"].grad.cpu().double(), want, rtol=1e-5, atol=1e-6)


def test_rows_that_are_no_numbers_stay_apart() -> None:
    """A stored row without a slope changes no gradient, whatever it holds."""
    leaf, target = leaves(FP32)
    with torch.no_grad():
        leaf["hidden"][3] = torch.nan
    logprob, _ = linear_logprob(**leaf, target=target, backend="torch")
    logprob.sum().backward()
    assert leaf["weight"].grad is not None
    assert leaf["weight"].grad.isfinite().all()
    assert (leaf["hidden"].grad[3] == 0).all()


@EVERY
def test_hooks_may_own_the_memory_of_what_is_saved(backend: str) -> None:
    """As an offloading buffer does, which holds all saved tensors of a step and is filled anew by the next one."""
    buffer, want = torch.empty(200_000), gradients(backend, FP32, ALL)
    at = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal at
        if x.dtype != FP32 or x.is_cuda:
            return x
        at += x.numel()
        return buffer[at - x.numel() : at].view(x.shape).copy_(x)

    for _ in range(3):
        at = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            got = gradients(backend, FP32, ALL)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
        assert at >= N * V or DEVICE.get(backend) == "cuda"
