"""Matrix products are in full precision, though torch is told that TF32 or bf16 will do; the setting is restored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from head_bounds import DEVICE, EVERY
from head_cases import EVERYTHING, run, sample, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from rlplus import linear_logprob
from rlplus.loss.backends import reference
from rlplus.loss.guard import scope
from rlplus.loss.guard.scope import full_precision

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def allow_tf32() -> None:
    CUDA.allow_tf32 = True


def for_one_backend() -> None:
    CUDA.fp32_precision = "tf32"


def for_the_cpu() -> None:
    CPU.fp32_precision = "bf16"


def for_all_backends() -> None:
    torch.backends.fp32_precision = "tf32"


WAYS = {
    "default": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    **{f.__name__: f for f in (allow_tf32, for_one_backend, for_the_cpu, for_all_backends)},
}
EVERY_WAY = pytest.mark.parametrize("choose", WAYS.values(), ids=WAYS)


def settings() -> tuple[str, ...]:
    return CUDA.fp32_precision, CPU.fp32_precision, torch.backends.fp32_precision


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    CUDA.fp32_precision = CPU.fp32_precision = torch.backends.fp32_precision = "none"


class Products(TorchDispatchMode):
    """Notes the operations that multiply matrices, and the precision they may have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "dot", "mv", "addmv", "matmul"):
            self.seen.append((name, CUDA.fp32_precision, CPU.fp32_precision))
        return func(*args, **kwargs or {})


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """A mode does not look inside a registered op unless it is entered there."""
    seen = Products()

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        with full_precision(device), seen:
            yield

    monkeypatch.setattr(scope, "full_precision", watched)
    monkeypatch.setattr(reference, "full_precision", watched)
    return seen


def everything(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
    head, constants = ({k: v.to(DEVICE.get(backend, "cpu")) for k, v in x.items()} for x in sample(5, dtype=dtype))
    out = [*tensors(run(head, constants, EVERYTHING, backend=backend)).values()]
    leaves = [head[k].requires_grad_() for k in ("hidden", "weight", "bias")]
    logprob, entropy = linear_logprob(**head, backend=backend)
    return [*out, logprob.detach(), entropy.detach(), *torch.autograd.grad((logprob * entropy).sum(), leaves)]


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrix_products_are_in_full_precision(backend: str, dtype: torch.dtype, products: Products) -> None:
    want = everything(backend, dtype)
    torch.set_float32_matmul_precision("medium")
    products.seen.clear()
    with Products() as outside:
        got = everything(backend, dtype)
    assert products.seen
    assert not outside.seen
    assert {precision for _, *both in products.seen for precision in both} == {"ieee"}
    # Nothing but products with the weight: a product would be a slow way, in lower precision, to a row's sum.
    assert {name for name, *_ in products.seen} <= {"mm", "addmm", "addmm_", "matmul"}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@EVERY_WAY
def test_the_settings_are_restored(choose: Callable[[], None]) -> None:
    choose()
    before = settings()
    everything("torch", torch.float32)
    assert settings() == before
    inside: list[tuple[str, ...]] = []

    def fail() -> None:
        with full_precision(torch.device("cpu")):
            inside.append(settings()[:2])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert set(inside[0]) <= {"ieee", "none"}
    assert settings() == before
    torch.backends.fp32_precision = "ieee"  # a setting that was inherited still is
    assert (CUDA.fp32_precision == "ieee") == (before[0] in ("none", "ieee") or choose is for_all_backends)


@pytest.mark.parametrize("before", [(True, True), (False, True), (False, False)])
def test_bf16_products_are_summed_in_fp32_and_the_setting_restored(before: tuple[bool, bool]) -> None:
    name = "allow_bf16_reduced_precision_reduction"
    try:
        setattr(CUDA, name, before)
        with full_precision(torch.device("cpu")):
            assert getattr(CUDA, name) is False
        assert (getattr(CUDA, name), getattr(CUDA, f"{name}_split_k")) == before
    finally:
        setattr(CUDA, name, (True, True))


def test_the_settings_are_restored_after_the_last_of_several_threads() -> None:
    torch.set_float32_matmul_precision("high")
    before = settings()
    one, other = (full_precision(torch.device("cpu")) for _ in range(2))
    for step in (one.__enter__, other.__enter__):
        step()
        assert CUDA.fp32_precision == "ieee"
    one.__exit__(None, None, None)
    assert CUDA.fp32_precision == "ieee"
    other.__exit__(None, None, None)
    assert settings() == before


def test_the_product_of_the_reference_is_a_well_formed_torch_op() -> None:
    a, b = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    torch.library.opcheck(reference.product, (a, b))
    assert torch.autograd.gradcheck(reference.product, (a, b))
