"""Kept tokens: the loss, logprobs and gradients of a policy renormalised over some tokens of each row, against the
closed form in float64, in which each row has a head of its own: those rows of the weight."""

from typing import Any

import pytest
import torch
from closed_form import logprob_and_entropy
from closed_form import policy_loss as closed_policy_loss
from head_cases import EVERYTHING, Head, run, sample, tensors, to
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.loss.backends import native

CPP = pytest.param("cpp", marks=pytest.mark.skipif(not native.load(), reason="the native library is not built"))
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
EVERY = pytest.mark.parametrize("backend", ["reference", "torch", CPP, "triton"])
V, N = 23, 14
TRANSFORMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "logit_scale": 0.5},
    {"logit_softcap": 3.0, "temperature": torch.linspace(0.5, 2, N, dtype=torch.float64)},
]


def case(dtype: torch.dtype = torch.float64, dense: int = 3) -> tuple[Head, dict[str, Tensor], list[Tensor]]:
    """Rows in turn with 1, 3, 6, ... kept tokens, the target among them; every `dense`-th has the whole vocabulary."""
    head, constants = sample(N, V, dtype=dtype)
    g = torch.Generator().manual_seed(7)
    sets = []
    for i, y in enumerate(head["target"].tolist()):
        others = [v for v in torch.randperm(V, generator=g).tolist() if v != y]
        chosen = [] if dense and i % dense == dense - 1 else [y, *others[: (0, 2, 5, V - 1)[i % 4]]]
        sets.append(torch.tensor(chosen, dtype=torch.int64)[torch.randperm(len(chosen), generator=g)])
    return head, constants, sets


def csr(sets: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, *map(len, sets)])
    return lengths.cumsum(0), torch.cat(sets).int()


def rows_by_the_definition(
    head: Head, sets: list[Tensor], temperature: float | Tensor = 1.0, **transform: float
) -> list[tuple[Tensor, Tensor]]:
    each = torch.as_tensor(temperature, dtype=head["hidden"].dtype).expand(len(sets))
    rows = []
    for i, chosen in enumerate(sets):
        own = chosen if len(chosen) else torch.arange(len(head["weight"]))
        target = (own == head["target"][i]).nonzero().squeeze(1)
        part = {"hidden": head["hidden"][i : i + 1], "weight": head["weight"][own], "bias": head["bias"][own]}
        rows.append(logprob_and_entropy(**part, target=target, temperature=each[i : i + 1], **transform))
    return rows


def exact(
    head: Head, constants: dict[str, Any], objective: Objective, sets: list[Tensor], **transform: Any
) -> dict[str, Any]:
    leaf = {k: v.detach().clone().requires_grad_() for k, v in head.items() if k != "target"}
    rows = rows_by_the_definition(leaf | {"target": head["target"]}, sets, **transform)
    logprob, entropy = (torch.cat(x) for x in zip(*rows, strict=True))
    loss, stats = closed_policy_loss(objective, logprob, entropy, constants)
    grads = torch.autograd.grad(loss, list(leaf.values()))
    out = {"loss": loss, "logprob": logprob.detach(), "entropy": entropy.detach(), "stats": stats}
    return out | {f"d{name}": g for name, g in zip(leaf, grads, strict=True)}


def check(
    got: dict[str, Any], head: Head, constants: dict[str, Tensor], objective: Objective, sets: list[Tensor],
    rounded: torch.dtype | None = None, **transform: Any,
) -> None:  # fmt: skip
    """rounded: the dtype to which the gradient of the logits was rounded for rows with the whole vocabulary."""
    dtype = head["hidden"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    want = exact(to(head, torch.float64), to(constants, torch.float64), objective, sets, **transform)
    plain = exact(to(head, wide), to(constants, wide), objective, sets, **transform)
    for name, value in tensors(want).items():
        size = value.abs().max()
        bound = 2 * (plain[name] - value).abs().max() + 64 * torch.finfo(wide).eps * size
        if name.startswith("d"):
            bound = bound + torch.finfo(dtype).eps * value.abs()
            bound = bound + (torch.finfo(rounded).eps * size if rounded is not None else 0.0)
        error = (got[name].double() - value).abs()
        assert (error <= bound).all(), f"{name}: error {error.max():.1e}, bound {torch.as_tensor(bound).max():.1e}"
    for name, value in want["stats"].items():
        assert abs(float(got["stats"][name]) - float(value)) <= 1e-4 * (1 + abs(float(value))), name


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("mb", [0.0005, None])
def test_loss_and_gradients_in_fp64(transform: dict[str, Any], dense: int, mb: float | None) -> None:
    """Four pairs at a time, or all."""
    head, constants, sets = case(dense=dense)
    got = run(head, constants, EVERYTHING, backend="torch", kept=csr(sets), max_scratch_mb=mb, **transform)
    check(got, head, constants, EVERYTHING, sets, **transform)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_backend(backend: str, dtype: torch.dtype) -> None:
    if backend == "cpp" and dtype == torch.float16:
        return
    head, constants, sets = case(dtype)
    there = DEVICE.get(backend, "cpu")
    moved = ({k: v.to(there) for k, v in x.items()} for x in (head, constants))
    kept = tuple(x.to(there) for x in csr(sets))
    got = run(*moved, EVERYTHING, backend=backend, kept=kept)
    got = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in got.items()}
    check(got, head, constants, EVERYTHING, sets, rounded=dtype)


@EVERY
def test_logprobs_and_their_gradients(backend: str) -> None:
    """-100 is the target of no token, whatever is kept there."""
    dtype = torch.float32 if backend in ("cpp", "triton") else torch.float64
    head, _, sets = case(dtype)
    head["target"][[1, 2]] = -100
    on = head["target"] != -100
    leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
    logprob, entropy = linear_logprob(**leaf, target=head["target"], kept=csr(sets), backend=backend)
    g = torch.Generator().manual_seed(3)
    a, h = (torch.randn(N, generator=g, dtype=dtype) for _ in range(2))
    a, h = a * on, h * on
    got = torch.autograd.grad((a * logprob + h * entropy).sum(), list(leaf.values()))
    wide = {k: v.detach().double().requires_grad_() for k, v in leaf.items()}
    counted = [chosen if counts else chosen[:0] for chosen, counts in zip(sets, on, strict=True)]
    rows = rows_by_the_definition(wide | {"target": head["target"].clamp(min=0)}, counted)
    want = [torch.cat(x) for x in zip(*rows, strict=True)]
    assert (logprob[~on] == 0).all()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logprob[on].double(), want[0][on], rtol=20 * eps, atol=40 * eps)
    torch.testing.assert_close(entropy[on].double(), want[1][on], rtol=20 * eps, atol=40 * eps)
    grads = torch.autograd.grad((a.double() * want[0] + h.double() * want[1]).sum(), list(wide.values()))
    for mine, theirs in zip(got, grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=20 * eps, atol=100 * eps)


def test_all_tokens_kept_is_the_whole_vocabulary() -> None:
    head, constants, _ = case()
    everything = csr([torch.arange(V).flip(0)] * N)
    got, want = (run(head, constants, EVERYTHING, backend="torch", kept=kept) for kept in (everything, None))
    for name, value in tensors(want).items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-12)


def test_one_kept_token_is_sure() -> None:
    """Its logprob is 0, and nothing has a gradient."""
    head, constants, _ = case(torch.float32)
    got = run(head, constants, EVERYTHING, backend="torch", kept=csr([y[None] for y in head["target"]]))
    for name in ("logprob", "entropy", "dhidden", "dweight", "dbias"):
        assert (got[name] == 0).all(), name


@pytest.mark.parametrize("backend", ["torch", CPP])
def test_nearly_sure_tokens(backend: str) -> None:
    """1 - p = 1e-7 in fp32, to 1e-4 of itself."""
    head = {"hidden": torch.ones(1, 1), "weight": torch.tensor([[0.0], [-16.5], [3.0]]), "target": torch.tensor([0])}
    head["weight"].requires_grad_()
    kept = (torch.tensor([0, 2]), torch.tensor([1, 0]))
    logprob, _ = linear_logprob(**head, kept=kept, backend=backend)
    (grad,) = torch.autograd.grad(logprob.sum(), head["weight"])
    rest = torch.tensor(-16.5, dtype=torch.float64).exp()
    torch.testing.assert_close(logprob.double(), -rest.log1p()[None], rtol=1e-5, atol=0.0)
    want = rest / (1 + rest)
    torch.testing.assert_close(grad.squeeze(1).double(), torch.stack([want, -want, want * 0]), rtol=1e-5, atol=0.0)


def test_order_of_kept_tokens_and_contents_of_rows_without_weight() -> None:
    head, constants, sets = case()
    constants["token_weight"][[0, 2, 5]] = 0.0
    constants.pop("entropy_weight", None)
    want = run(head, constants, EVERYTHING, backend="torch", kept=csr(sets))
    garbage = {k: v.clone() for k, v in head.items()}
    garbage["hidden"][[0, 2, 5]] = torch.nan
    got = run(garbage, constants, EVERYTHING, backend="torch", kept=csr(sets))
    assert torch.equal(got["loss"], want["loss"])
    for name in ("dweight", "dbias"):
        assert torch.equal(got[name], want[name])
    turned = run(head, constants, EVERYTHING, backend="torch", kept=csr([s.flip(0) for s in sets]))
    for name, value in tensors(want).items():
        torch.testing.assert_close(turned[name], value, rtol=1e-11, atol=1e-12)


def test_the_gradient_of_the_weight_may_be_added_to_one_that_is_there() -> None:
    head, constants, sets = case(torch.bfloat16)
    there = torch.linspace(-1, 1, V)[:, None].repeat(1, head["weight"].shape[1])
    total, leaf = there.clone(), head | {"hidden": head["hidden"].clone().requires_grad_()}
    kept = csr(sets)
    linear_policy_loss(
        **leaf, **constants, objective=EVERYTHING, kept=kept, weight_grad=total, backend="torch"
    ).loss.backward()
    want = exact(to(head, torch.float64), to(constants, torch.float64), EVERYTHING, sets)
    error = (total - there - want["dweight"]).abs().max()
    assert error <= 1e-5 * want["dweight"].abs().max()


OFFSETS, TOKENS = torch.tensor([0, 2, 2]), torch.tensor([1, 4])
WRONG: list[tuple[Any, str]] = [
    (OFFSETS, "want kept a pair of tensors, offsets and tokens; got int64"),
    ((OFFSETS[:2], TOKENS), r"want kept offsets a tensor, int64 \(3,\) on cpu; got int64 \(2,\)"),
    ((OFFSETS, TOKENS.float()), r"want kept tokens a tensor, int64 \(2,\) on cpu; got float32"),
    ((torch.tensor([0, 1, 1]), TOKENS), "want kept offsets that rise from 0 to the number of tokens, 2; got others"),
    ((torch.tensor([0, 3, 2]), TOKENS), "want kept offsets that rise"),
    ((OFFSETS, torch.tensor([1, V])), rf"want kept tokens in \[0, {V}\); got one outside"),
    ((OFFSETS, torch.tensor([1, 1])), "want each kept token of a row once; got one twice"),
    ((OFFSETS, torch.tensor([2, 4])), "want the target among its row's kept tokens; got one that is not"),
]


@pytest.mark.parametrize(("kept", "message"), WRONG, ids=[m[:40] for _, m in WRONG])
def test_wrong_kept_tokens(kept: Any, message: str) -> None:
    head, _ = sample(2, V)
    head["target"] = torch.tensor([1, 3])
    with pytest.raises(ValueError, match=message):
        linear_logprob(**head, kept=kept, backend="torch")


def test_a_row_that_does_not_count_may_lack_its_target() -> None:
    head, constants = sample(2, V)
    head["target"] = torch.tensor([2, 3])
    constants["token_weight"] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    got = run(head, constants, Objective("clip", "mis"), kept=(OFFSETS, TOKENS), backend="torch")
    assert got["loss"].isfinite()
    assert got["dhidden"][0].eq(0).all()
