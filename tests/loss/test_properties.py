"""Properties of every shape, dtype, mask and extreme value, on every backend."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from closed_form import EXTERNAL, FEATURES, INTERNAL, OPTIONAL, logprob_and_entropy, sample_constants
from head_bounds import DEVICE, EVERY, FP32, FP64, Case, Rows, bits, check, check_tensor, dtypes_of, fused
from head_cases import Head, to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlplus import Objective, linear_logprob
from rlplus.kernels import tiling
from rlplus.kernels.tiling import Block

EXAMPLES = {"reference": 60, "torch": 100, "cpp": 100, "triton": 4}  # Triton's interpreter is slow


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """The interpreter runs a block at a time: several in small vocabularies. A GPU runs what is shipped."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(tiling, "STATISTICS", Block(16, 4))
            patch.setattr(tiling, "GRADIENT", Block(16, 8))
        yield


# ---- cases


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], vocabularies: tuple[int, ...]) -> Case:
    n, V = draw(st.sampled_from([7, 5, 2, 1, 0])), draw(st.sampled_from(vocabularies))
    H, dtype = draw(st.sampled_from([1, 2, 3, 5, 8, 72])), draw(st.sampled_from(dtypes))
    spread = draw(st.sampled_from([1e-3, 1.0, 30.0, 1e4]))  # the logits': flat, ordinary, peaked, certain
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = {"hidden": spread**0.5, "weight": (spread / H) ** 0.5, "bias": min(spread, 10.0)}
    shape = {"hidden": (n, H), "weight": (V, H), "bias": (V,)}
    head = {k: (size[k] * torch.randn(shape[k], generator=g, dtype=FP64)).to(dtype) for k in shape}
    head["target"] = torch.randint(V, (n,), generator=g)
    if draw(st.booleans()):
        del head["bias"]
    elif draw(st.booleans()):  # a few tokens that cannot be
        banned = torch.rand(V, generator=g) < 0.3
        banned[head["target"]] = banned[0] = False
        head["target"] = head["target"].where(~banned[head["target"]], 0)
        head["bias"][banned] = -math.inf
    likeliest = draw(st.booleans())
    temperature = draw(st.sampled_from([1.0, 0.5, 1.7]))
    objective = Objective(
        draw(st.sampled_from([*INTERNAL])),
        draw(st.sampled_from([*EXTERNAL])),
        **FEATURES[draw(st.sampled_from([*FEATURES]))],
    )
    scratch = draw(st.sampled_from([1e-9, 3 * 16 * V / 1e6, None]))  # MB
    poison = draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e4]))
    case = Case(head, {}, objective, temperature, scratch, poison)
    if likeliest and n:
        z = to(head, FP64)["hidden"] @ to(head, FP64)["weight"].T + head.get("bias", torch.zeros(V)).double()
        head["target"] = z.argmax(-1)
    case.constants.update(_constants(draw, case, g))
    return case


def _constants(draw: st.DrawFn, case: Case, g: torch.Generator) -> dict[str, Tensor]:
    """Ratios stay below e^6 where the policy is certain: what overflows has tests of its own."""
    n, dtype = len(case.head["target"]), torch.promote_types(case.head["hidden"].dtype, FP32)
    c = sample_constants((n,), draw(st.integers(0, 2**20)))
    logprob, _ = logprob_and_entropy(**case.condensed(FP64)[0], temperature=case.temperature)
    gap = torch.randn(n, generator=g, dtype=FP64)
    if draw(st.booleans()):
        c["old_logprob"], engine = (logprob + gap / 4).clamp(max=0.0), c["engine_logprob"] - c["old_logprob"]
        c["engine_logprob"] = c["old_logprob"] + engine
    c["ref_logprob"] = torch.where(logprob < -4, (logprob + gap).clamp(max=0.0), c["ref_logprob"])
    mask = draw(st.sampled_from(["some", "none", "all", "one"]))
    if mask != "some":
        on = torch.arange(n) < {"none": n, "all": 0, "one": 1}[mask]
        c["token_weight"], c["entropy_weight"] = torch.where(on, 1.1, 0.0).double(), c["entropy_weight"] * on
    absent = draw(st.sets(st.sampled_from(OPTIONAL)))
    needed = {"ref_logprob"} if case.objective.kl_coef else set()
    needed |= {"engine_logprob"} if case.objective.mismatch_cap else set()
    return to({k: v for k, v in c.items() if k not in absent - needed}, dtype)


# ---- properties


@EVERY
def test_any_head_any_objective_any_mask(backend: str) -> None:
    """Values and gradients are right, whatever stands in rows without a weight, and the same each time, bit by bit."""

    @settings(max_examples=EXAMPLES[backend], report_multiple_bugs=False)
    @given(cases(dtypes_of(backend), (61, 17, 3, 2, 1) + ((2049,) if backend == "cpp" else ())))
    def property(case: Case) -> None:
        clean = fused(backend, case.head, case.constants, case.objective, **case.options)
        check(case, clean, backend)
        dirty = fused(backend, *case.poisoned(), case.objective, **case.options)
        pairs = zip(bits(clean, ~case.off), bits(dirty, ~case.off), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert dirty["logprob"][case.off].isnan().all()

    property()


@EVERY
def test_logprob_and_entropy_of_any_head(backend: str) -> None:
    """With any upstream gradients; where both are 0 nothing comes from what stands there."""

    @settings(max_examples=EXAMPLES[backend] // 2, report_multiple_bugs=False)
    @given(cases(dtypes_of(backend), (61, 17, 3, 2, 1)), st.integers(0, 2**20))
    def property(case: Case, seed: int) -> None:
        n, off = len(case.head["target"]), case.off
        wide = torch.promote_types(case.head["hidden"].dtype, FP32)
        g, eps = torch.Generator().manual_seed(seed), torch.finfo(wide).eps
        up = [torch.randn(n, generator=g, dtype=FP64).masked_fill(off, 0.0) for _ in range(2)]

        def run(f: Any, head: Head, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
            leaf = {k: v.detach().clone().requires_grad_() for k, v in head.items() if k != "target"}
            there = {k: v.to(device) for k, v in (head | leaf).items()}
            out = [x.cpu()[~off] for x in f(**there, temperature=case.temperature, **options)]
            total = sum((x * u[~off].to(x)).sum() for x, u in zip(out, up, strict=True))
            grads = zip(leaf, torch.autograd.grad(total, list(leaf.values())), strict=True)
            return {"logprob": out[0].detach(), "entropy": out[1].detach()} | {f"d{k}": g for k, g in grads}

        head = case.head
        if backend != "reference":  # plain autograd, where 0 * NaN is NaN
            head = head | {"hidden": head["hidden"].masked_fill(off[:, None], case.poison)}
        options = {"backend": backend, "max_scratch_mb": case.max_scratch_mb}
        got = run(linear_logprob, head, DEVICE.get(backend, "cpu"), **options)
        exact, plain = (run(logprob_and_entropy, case.condensed(d)[0]) for d in (FP64, wide))
        bounds = Rows.of(case, eps).bounds(*up, torch.zeros(n, dtype=FP64), eps)
        bounds |= {k: bounds[k][~off] for k in ("logprob", "entropy")}
        for name, value in got.items():
            value = value[case.possible] if name in ("dweight", "dbias") else value
            check_tensor(name, value, exact[name], plain[name], bounds, backend)

    property()
