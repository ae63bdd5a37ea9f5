"""memory="least" and the caller's gradient buffer: other ways to the numbers that test_ops.py pins down."""

import math
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, H, check_precision, closed, run, sample, tensors, to
from quick import pairs

from rlplus import Objective, linear_policy_loss
from rlplus.loss import TokenConstants, library, operations
from rlplus.loss.backends import cpp, least
from rlplus.loss.op_arguments import Options, pack

CPP = pytest.param("cpp", marks=pytest.mark.skipif(cpp.load() is None, reason="rlplus/_C.so is not built"))
BACKENDS = ["torch", CPP, "triton"]
EVERY = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(23, 61), (3, 300), (40, 61)]  # n, V
DEVICE = {name: "cuda" if torch.cuda.is_available() else "cpu" for name in ("torch", "triton")} | {"cpp": "cpu"}


def megabytes(n: int, columns: int) -> float:
    """max_scratch_mb for about so many columns of fp32 logits of n rows at a time."""
    return n * columns * 10 / 1e6


def least_run(inputs: dict, constants: dict, objective: Objective, backend: str, **options: Any) -> dict[str, Any]:
    there = [{k: v.to(DEVICE[backend]) for k, v in x.items()} for x in (inputs, constants)]
    got = run(*there, objective, memory="least", backend=backend, **options)
    return {k: v.cpu() if torch.is_tensor(v) else v for k, v in got.items()}


def gemm_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """To which a backend rounds the gradient of the logits."""
    if DEVICE[backend] == "cuda":
        return dtype
    return dtype if backend == "cpp" and dtype == torch.bfloat16 and cpp._torch_gemm() else torch.float32


@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["all"]))
def test_least_matches_the_closed_form_in_fp64(internal: str, external: str, features: str) -> None:
    objective = Objective(internal, external, **FEATURES[features])
    head, constants = sample(19, seed=len(internal + external))
    want = closed(head, constants, objective, 0.7)
    for columns in (1, 5, 1000):
        got = run(
            head, constants, objective, temperature=0.7, backend="torch", memory="least",
            max_scratch_mb=megabytes(19, columns),
        )  # fmt: skip
        torch.testing.assert_close(tensors(got), tensors(want), rtol=1e-11, atol=1e-12)
        stats = {name: got["stats"][name].item() for name in want["stats"]}
        assert stats == pytest.approx(want["stats"], rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("objective", [EVERYTHING, pytest.param(Objective.preset("dapo"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "dtype", "size"), pairs(BACKENDS, DTYPES, SIZES), ids=str)
def test_least_is_as_exact_as_one_pass(
    backend: str, dtype: torch.dtype, size: tuple[int, int], objective: Objective
) -> None:
    """Where dhidden lies in the memory lent by dweight, with few rows, too, and where it does not."""
    n, V = size
    head, constants = sample(n, V=V, dtype=dtype)
    for columns in (16 if backend == "triton" else 7, 64):  # the interpreter takes its time for a block
        got = least_run(head, constants, objective, backend=backend, max_scratch_mb=megabytes(n, columns))
        check_precision(got, head, constants, objective, gemm_dtype=gemm_dtype(backend, dtype))


@pytest.mark.parametrize("backend", ["torch", CPP])
def test_an_fp32_sum_of_the_weights_gradient_is_not_rounded_to_bf16(backend: str) -> None:
    """Into the caller's fp32 buffer, and for a weight of fp32: as exact as one pass, and no bf16 numbers."""
    head, constants = sample(200, V=61, dtype=torch.bfloat16, H=8)
    exact = closed(to(head, torch.float64), to(constants, torch.float64), EVERYTHING)["dweight"]
    errors = {}
    for memory in ("fast", "least"):
        options: dict[str, Any] = {"backend": backend, "memory": memory, "max_scratch_mb": megabytes(200, 16)}
        total = torch.zeros(61, head["hidden"].shape[1])
        leaf = head | {"hidden": head["hidden"].clone().requires_grad_()}
        inputs = {"old_logprob": None} | constants | {"objective": EVERYTHING}
        linear_policy_loss(**leaf, **inputs, weight_grad=total, **options).loss.backward()
        wide = run(head | {"weight": head["weight"].float()}, constants, EVERYTHING, **options)["dweight"]
        assert wide.dtype == torch.float32
        for got in (total, wide):
            assert not torch.equal(got, got.bfloat16().float())
            errors.setdefault(memory, []).append((got - exact).norm() / exact.norm())
    assert max(errors["least"]) <= 1.5 * max(errors["fast"]) + 1e-6


def test_dhidden_borrows_the_memory_of_dweight() -> None:
    for n, V, lent in ((23, 61, True), (3, 300, True), (40, 61, False)):
        head, _ = sample(n, V=V, dtype=torch.bfloat16)
        second = least._SecondPass.__new__(least._SecondPass)
        second.whole = library.Head(head["hidden"], head["weight"], None, head["target"], 1.0)
        second.weight = torch.empty_like(head["weight"])
        total, first = second._accumulator(n)
        assert (total.untyped_storage().data_ptr() == second.weight.untyped_storage().data_ptr()) == lent
        assert (first < V) == lent
        assert total.shape == (n, H)
        if lent:
            assert first * H <= total.storage_offset() * 2 < (first + 1) * H


@EVERY
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_rows_of_weight_0_change_no_bit(backend: str, poison: float) -> None:
    head, constants = sample(23, V=61, dtype=torch.float32)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert off.any()
    options: dict[str, Any] = {"backend": backend, "max_scratch_mb": megabytes(23, 16)}
    want = least_run(head, constants, EVERYTHING, **options)
    dirty = head | {"target": head["target"].masked_fill(off, -100)}
    dirty["hidden"] = head["hidden"].masked_fill(off[:, None], poison)
    got = least_run(dirty, constants, EVERYTHING, **options)
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name


@EVERY
def test_blocks_that_a_bias_of_minus_infinity_empties(backend: str) -> None:
    """A vocabulary padded with forbidden words: whole blocks, and a whole row where nothing else is left."""
    head, constants = sample(9, V=64, dtype=torch.float32)
    constants["token_weight"] += 0.5
    head["bias"][:20] = head["bias"][40:] = -math.inf
    head["target"] = torch.randint(20, 40, (9,), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"backend": backend, "max_scratch_mb": megabytes(9, 8)}
    got = least_run(head, constants, EVERYTHING, **options)
    inner = {k: v[20:40] if k in ("weight", "bias") else v for k, v in head.items()}
    inner["target"] = head["target"] - 20
    want = closed(to(inner, torch.float64), to(constants, torch.float64), EVERYTHING)
    for name in ("loss", "logprob", "entropy", "dhidden"):
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got["dweight"][20:40].double(), want["dweight"], rtol=1e-4, atol=1e-5)
    assert not got["dweight"][:20].any()
    assert not got["dbias"][40:].any()


@pytest.mark.parametrize("way", ["fast", "least"])
@EVERY
def test_the_faster_way_is_one_of_the_two(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode that memory=None selects on CUDA if the scratch is given."""
    inputs = [{k: v.to(DEVICE[backend]) for k, v in x.items()} for x in sample(9, dtype=torch.float32)]
    asked: list[tuple[Any, float]] = []
    monkeypatch.setattr(library, "faster_memory", lambda *a: (asked.append(a), way)[1])
    monkeypatch.setattr(operations, "_way", lambda memory, *_: memory or "faster")
    got, want = (run(*inputs, EVERYTHING, backend=backend, max_scratch_mb=3e-3, memory=m) for m in (None, way))
    assert asked == [((9, H, 23, 4, 4), 3e3)]
    assert all(torch.equal(got[name], want[name]) for name in ("loss", "dhidden", "dweight", "dbias"))


def test_memory_none_is_fast_where_nothing_speaks_for_least() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ways = [operations._way(None, *given) for given in ((None, cpu), (100.0, cpu), (None, cuda), (100.0, cuda))]
    assert ways == ["fast", "fast", "fast", "faster"]
    assert operations._way("least", 1e4, cuda) == "least"


@EVERY
@pytest.mark.parametrize("n", [0, 1])
def test_least_with_next_to_nothing(backend: str, n: int) -> None:
    head, constants = sample(n, V=1, dtype=torch.float32)
    got = least_run(head, constants, EVERYTHING, backend=backend)
    assert got["logprob"].eq(0).all()
    assert not any(got[name].any() for name in ("entropy", "dhidden", "dweight", "dbias"))


@EVERY
def test_least_computes_what_is_needed_alone(backend: str) -> None:
    head, constants = sample(9, dtype=torch.float32)
    want = least_run(head, constants, EVERYTHING, backend=backend)
    for name in ("hidden", "weight", "bias"):
        leaf = {k: v.to(DEVICE[backend]) for k, v in (head | constants).items()}
        leaf[name].requires_grad_()
        out = linear_policy_loss(**leaf, objective=EVERYTHING, backend=backend, memory="least")
        (got,) = torch.autograd.grad(out.loss, leaf[name])
        torch.testing.assert_close(got.cpu(), want[f"d{name}"])


# ---- the caller's gradient buffer


@pytest.mark.parametrize(("backend", "dtype", "memory"), pairs(BACKENDS, DTYPES, ["fast", "least"]), ids=str)
def test_weight_grad_accumulates_over_calls(backend: str, dtype: torch.dtype, memory: str) -> None:
    head, constants = ({k: v.to(DEVICE[backend]) for k, v in x.items()} for x in sample(23, V=61, dtype=dtype))
    leaf = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in head.items()}
    buffer = torch.full((61, H), 0.25, device=DEVICE[backend])
    options: dict[str, Any] = {"objective": EVERYTHING, "backend": backend, "memory": memory, "max_scratch_mb": 4e-3}
    for part in (slice(0, 9), slice(9, 23)):
        rows = {k: leaf[k][part] for k in ("hidden", "target")} | {k: v[part] for k, v in constants.items()}
        out = linear_policy_loss(weight=leaf["weight"], bias=leaf["bias"], **rows, **options, weight_grad=buffer)
        (3 * out.loss).backward()  # the factor reaches what the backward pass hands out, not the buffer
    assert leaf["weight"].grad is None
    got = {"dweight": (buffer - 0.25), "dhidden": leaf["hidden"].grad / 3, "dbias": leaf["bias"].grad / 3}
    exact = closed(*(to({k: v.cpu() for k, v in x.items()}, torch.float64) for x in (head, constants)), EVERYTHING)
    eps = max(torch.finfo(gemm_dtype(backend, dtype)).eps, 1e-6)
    for name, value in got.items():
        rounding = torch.finfo(dtype).eps if name != "dweight" else 0.0
        bound = 8 * (eps + rounding) * exact[name].abs().max() + 1e-5
        assert (value.cpu().double() - exact[name]).abs().max() <= bound, name


@EVERY
def test_weight_grad_in_one_graph(backend: str) -> None:
    head, constants = sample(9, dtype=torch.float32)
    hidden = head["hidden"].to(DEVICE[backend]).requires_grad_()
    head["weight"].requires_grad_()  # it gets none, and nothing is allocated for one
    rest = {k: v.to(DEVICE[backend]) for k, v in (head | constants).items() if k != "hidden"}

    def step(hidden: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return 2 * linear_policy_loss(hidden, **rest, objective=EVERYTHING, backend=backend, weight_grad=buffer).loss

    torch._dynamo.reset()
    results = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        buffer = torch.ones(23, H, device=DEVICE[backend])
        (gradient,) = torch.autograd.grad(f(hidden, buffer), hidden)
        results.append((gradient, buffer))
    torch.testing.assert_close(*results)
    assert (results[0][1] != 1).any()


@pytest.mark.parametrize("memory", ["fast", "least"])
@pytest.mark.parametrize("backend", ["torch", CPP])
def test_is_a_well_formed_torch_op(backend: str, memory: str) -> None:
    head, constants = sample(9, dtype=torch.float32)
    names = ["advantage", "token_weight", "external", "old_logprob", "ref_logprob", "entropy_weight", "engine_logprob"]
    parts = library.Head(**head, temperature=0.7), TokenConstants(**{k: constants[k] for k in names})
    arguments = pack(*parts, EVERYTHING, Options(400.0, backend, memory))
    torch.library.opcheck(library.linear_policy_loss, ([True, True, True], *arguments))
    torch.library.opcheck(library.linear_policy_loss_into, (torch.zeros(23, H), [True, False, True], *arguments))


def test_wrong_use_is_refused() -> None:
    head, constants = sample(9, dtype=torch.float32)

    def call(**options: Any) -> None:
        linear_policy_loss(**head, **constants, objective=EVERYTHING, **options)

    with pytest.raises(ValueError, match="want memory 'fast', 'least' or None; got 'low'"):
        call(memory="low")
    with pytest.raises(ValueError, match=r"want weight_grad a tensor, float32 \(23, 7\) on cpu; got float32 \(7, 23\)"):
        call(weight_grad=torch.zeros(7, 23))
    with pytest.raises(ValueError, match=r"want weight_grad a tensor, float32 .* got bfloat16"):
        call(weight_grad=torch.zeros(23, 7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"want weight_grad contiguous .*; got strides \(1, 23\), requires_grad False"):
        call(weight_grad=torch.zeros(7, 23).T)
    with pytest.raises(ValueError, match=r"want weight_grad contiguous .*; got strides \(7, 1\), requires_grad True"):
        call(weight_grad=torch.zeros(23, 7, requires_grad=True))
    arena = torch.zeros(40, 7)
    for shared in ({"weight": arena[:23]}, {"weight": arena[17:]}, {"hidden": arena[5:14]}):
        with pytest.raises(ValueError, match="want weight_grad in memory that no input uses"):
            linear_policy_loss(**(head | shared), **constants, weight_grad=arena[:23])
    for before in ({"weight": arena[:23]}, {"hidden": arena[9:18]}):
        with pytest.raises(ValueError, match="want weight_grad in memory that no input uses"):
            linear_policy_loss(**(head | before), **constants, weight_grad=arena[17:])
    for options in ({"memory": "least"}, {"weight_grad": torch.zeros(23, 7)}):
        with pytest.raises(ValueError, match="backend 'reference' keeps the full logits"):
            call(backend="reference", **options)
