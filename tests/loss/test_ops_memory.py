"""The caller's gradient buffer: another way to the numbers that test_ops.py pins down."""

from typing import Any

import pytest
import torch
from head_cases import EVERYTHING, H, closed, sample, to
from quick import pairs

from rlplus import linear_policy_loss
from rlplus.loss import TokenConstants
from rlplus.loss.backends import native
from rlplus.loss.operations import library
from rlplus.loss.operations.library import Options, pack

CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
BACKENDS = ["torch", CPP, "triton"]
EVERY = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = {name: "cuda" if torch.cuda.is_available() else "cpu" for name in ("torch", "triton")} | {"cpp": "cpu"}


def gemm_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """To which a backend rounds the gradient of the logits."""
    if DEVICE[backend] == "cuda":
        return dtype
    return dtype if backend == "cpp" and dtype == torch.bfloat16 and native.torch_gemm() else torch.float32


@pytest.mark.parametrize(("backend", "dtype"), pairs(BACKENDS, DTYPES), ids=str)
def test_weight_grad_accumulates_over_calls(backend: str, dtype: torch.dtype) -> None:
    head, constants = ({k: v.to(DEVICE[backend]) for k, v in x.items()} for x in sample(23, V=61, dtype=dtype))
    leaf = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in head.items()}
    buffer = torch.full((61, H), 0.25, device=DEVICE[backend])
    options: dict[str, Any] = {"objective": EVERYTHING, "backend": backend, "max_scratch_mb": 4e-3}
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


@pytest.mark.parametrize("backend", ["torch", CPP])
def test_is_a_well_formed_torch_op(backend: str) -> None:
    head, constants = sample(9, dtype=torch.float32)
    names = ["advantage", "token_weight", "external", "old_logprob", "ref_logprob", "entropy_weight", "engine_logprob"]
    parts = library.Head(**head, temperature=0.7), TokenConstants(**{k: constants[k] for k in names})
    arguments = pack(*parts, EVERYTHING, Options(400.0, backend))
    torch.library.opcheck(library.linear_policy_loss, ([True, True, True], *arguments))
    torch.library.opcheck(library.linear_policy_loss_into, (torch.zeros(23, H), [True, False, True], *arguments))


def test_wrong_use_is_refused() -> None:
    head, constants = sample(9, dtype=torch.float32)

    def call(**options: Any) -> None:
        linear_policy_loss(**head, **constants, objective=EVERYTHING, **options)

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
    with pytest.raises(ValueError, match="backend 'reference' keeps the full logits"):
        call(backend="reference", weight_grad=torch.zeros(23, 7))
