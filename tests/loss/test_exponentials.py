"""Losses of bf16 inputs from exponentials, and which inputs take which way.

Without CUDA in Triton's interpreter, where bf16 inputs are multiplied in fp32 and exponentials are not rounded.
"""

import contextlib
import itertools
import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, check_precision, on_device, sample, tensors
from quick import pairs
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.bench.case import Case
from rlplus.bench.cases import Head as SampledHead
from rlplus.bench.cases import Inputs
from rlplus.kernels import exponentials
from rlplus.kernels.tiling import TILES, Tile
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends import ways
from rlplus.loss.head import cost
from rlplus.loss.head import gradient_sum as gradients
from rlplus.loss.head.head import Head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KEPT = BF16 if DEVICE == "cuda" else F32  # the dtype of exponentials for bf16 inputs
SCRATCH = [
    pytest.param(1e-9, marks=pytest.mark.slow, id="one row"),  # 23 chunks take the interpreter seconds
    pytest.param(8e-3, id="few rows"),
    pytest.param(None, id="all rows"),
]
EVERY_SCRATCH = pytest.mark.parametrize("max_scratch_mb", SCRATCH)
TILE = TILES[0][1]
PLAIN = Objective("clip", "mis", **(FEATURES["all"] | {"entropy_coef": 0.0}))
OWN_TILE = ways.our_tile  # as it is shipped
GEMMS = [pytest.param(TILE, id="ours"), pytest.param(None, id="vendor's")]
EVERY_GEMM = pytest.mark.parametrize("tile", GEMMS)


@pytest.fixture
def tile() -> Tile | None:
    return TILE


@pytest.fixture(autouse=True)
def chosen(tile: Tile | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "our_tile", lambda head: tile)


@pytest.mark.parametrize(
    ("names", "max_scratch_mb", "tile"),
    pairs([(internal, external) for internal, external, _ in all_objectives(["all"])[::3]], SCRATCH, GEMMS),
)
def test_the_loss_matches_the_closed_form(names: tuple[str, str], max_scratch_mb: float | None) -> None:
    objective = Objective(*names, **FEATURES["all"])
    head, constants = sample(17, V=70, H=16, dtype=BF16)
    got = on_device(DEVICE, head, constants, objective, max_scratch_mb=max_scratch_mb, temperature=0.7)
    check_precision(got, head, constants, objective, 0.7, gemm_dtype=KEPT)


@pytest.mark.parametrize("objective", [PLAIN, EVERYTHING], ids=["no bonus", "bonus"])
@EVERY_GEMM
def test_a_softcap_and_temperatures_of_tokens(objective: Objective) -> None:
    """With a bonus the gradient is made from fp32 logits."""
    head, constants = sample(17, V=70, H=16, dtype=BF16)
    transform = {"temperature": torch.linspace(0.5, 2, 17, dtype=torch.float64), "logit_softcap": 3.0}
    there = transform | {"temperature": transform["temperature"].to(DEVICE, F32)}
    got = on_device(DEVICE, head, constants, objective, **there)
    check_precision(got, head, constants, objective, **transform, gemm_dtype=KEPT)


@pytest.mark.parametrize(("V", "scale"), [(1, 1.0), (64, 1e-4), (64, 30.0), (4096 + 65, 1.0)])
@EVERY_GEMM
def test_flat_and_certain_policies_of_any_vocabulary(V: int, scale: float) -> None:
    head, constants = sample(9, V=V, H=16, dtype=BF16)
    head["weight"] *= scale
    objective = Objective("clip", "mis", gamma=1.7)
    check_precision(on_device(DEVICE, head, constants, objective), head, constants, objective, gemm_dtype=KEPT)


@pytest.mark.parametrize(
    ("sure", "share", "bonus"),
    [
        (False, 1.0, 0.0),
        (True, 1.0, 0.1),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in ((False, 1.0, 1e-3), (False, 0.5, 0.0), (False, 0.5, 1e-3), (True, 1.0, 0.0))),
    ],
)  # fmt: skip
def test_errors_beside_those_of_a_plain_bf16_gradient(
    sure: bool, share: float, bonus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a third; for nearly sure tokens, of whose gradients few others are half, three quarters. Rounded at the
    end, little more than that rounding alone. What is rounded on CUDA is rounded."""
    if DEVICE == "cpu":
        f, g = backend.dhidden, gradients.add_dweight
        monkeypatch.setattr(backend, "dhidden", lambda dz, head: f(dz.bfloat16().float(), head))
        monkeypatch.setattr(
            gradients, "add_dweight", lambda dw, dz, h, **o: g(dw, dz.bfloat16().float(), h.bfloat16().float(), **o)
        )
    # A GPU's generator would draw others.
    data = Inputs(SampledHead(Case("errors", N=128, H=64, V=1000, dtype="bfloat16", methods=()), "cpu"), share)
    states, target, given = data.hidden.detach(), data.target, dict(data.constants)
    if sure:
        states = 2 * states
        logp = (states.double() @ data.weight.detach().double().T).log_softmax(1)
        given["old_logprob"], target = (x.to(DEVICE) for x in logp.float().max(1))
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in (states, data.weight)]
    given, target = {k: v.to(DEVICE) for k, v in given.items()}, target.to(DEVICE)
    hidden, weight = (x.detach().double() for x in leaves)
    objective = Objective(entropy_coef=bonus)
    constants = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    one = torch.eye(1000, dtype=torch.float64, device=DEVICE)
    logits = (hidden @ weight.T).requires_grad_()
    loss = linear_policy_loss(logits, one, target, **constants, objective=objective, backend="reference").loss
    (dz,) = torch.autograd.grad(loss, [logits])
    rounded, total = dz.bfloat16().double(), torch.zeros_like(weight, dtype=F32)  # not rounded to bf16 at the end
    options: dict[str, Any] = {"backend": "triton", "weight_grad": total, "objective": objective}
    out = linear_policy_loss(*leaves, target, **given, **options)
    (dhidden,) = torch.autograd.grad(out.loss, leaves[:1])
    exact, plain = (dz @ weight, dz.T @ hidden), (rounded @ weight, rounded.T @ hidden)
    for got, want, usual in zip((dhidden, total), exact, plain, strict=True):
        rows = (got, usual, got.bfloat16(), want.bfloat16())
        error, other, last, least = (((x - want).norm() / want.norm()).item() for x in rows)
        assert last <= min(1.2 * least, 2.5e-3)
        if got.dtype == F32:
            assert 1e-5 < error <= other * (0.75 if sure else 1 / 3)


@EVERY_GEMM
def test_every_kernel_is_launched_on_the_device_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, which may be another."""
    inside, outside, original = [], [], backend.on_device

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        with original(device):
            inside.append(device)
            yield
            inside.pop()

    monkeypatch.setattr(backend, "on_device", entered)
    for module in (exponentials, backend.own_tokens, backend.linear_kernels, backend.token_kernels):
        for name in (name for name, kernel in vars(module).items() if name.endswith("_kernel")):
            kernel = vars(module)[name]

            class Watched:
                def __getitem__(self, grid: Any, kernel: Any = kernel, name: str = name) -> Any:
                    outside.extend([name] * (not inside))
                    return kernel[grid]

            monkeypatch.setattr(module, name, Watched())
    head, constants = sample(9, dtype=BF16)
    on_device(DEVICE, head, constants, EVERYTHING)
    leaf = head["hidden"].to(DEVICE).requires_grad_()
    weight, target = head["weight"].to(DEVICE).requires_grad_(), head["target"].to(DEVICE)
    linear_logprob(leaf, weight, target, backend="triton")[0].sum().backward()
    assert not outside


@EVERY_SCRATCH
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_rows_of_weight_0_change_no_bit(max_scratch_mb: float | None, poison: float) -> None:
    head, constants = sample(23, dtype=BF16)
    off = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert off.any()
    want = on_device(DEVICE, head, constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    head["hidden"][off], head["target"][off] = poison, -100
    got = on_device(DEVICE, head, constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    assert all(torch.equal(got[name], want[name]) for name in ("loss", "dhidden", "dweight", "dbias"))
    assert got["logprob"][off].isnan().all()


@EVERY_SCRATCH
@EVERY_GEMM
def test_in_a_cuda_graph_every_row_takes_part(max_scratch_mb: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    head, constants = sample(23, dtype=BF16)
    head["hidden"][constants["token_weight"] == 0] = math.nan
    want = on_device(DEVICE, head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    monkeypatch.setattr(backend, "_capturing", lambda device: True)
    got = on_device(DEVICE, head, constants, PLAIN, max_scratch_mb=max_scratch_mb)
    torch.testing.assert_close(tensors(got), tensors(want), equal_nan=True, rtol=1e-5, atol=1e-5)


# ---- which way


def head_of(dtype: torch.dtype = BF16, n: int = 200, V: int = 300, H: int = 64, **fields: Any) -> Head:
    hidden, weight = (torch.empty(k, H, dtype=dtype) for k in (n, V))
    return Head(hidden, weight, None, torch.empty(n, dtype=torch.int64), 1.0)._replace(**fields)


@pytest.mark.parametrize(
    ("head", "bonus", "tile", "want"),
    [
        (head_of(), False, TILE, ways.Way(TILE, F32)),
        (head_of(), True, TILE, ways.Way(TILE, F32, bonus=True)),
        (head_of(), False, None, ways.Way(None, F32)),
        (head_of(softcap=9.0), False, TILE, ways.Way(TILE, F32)),
        (head_of(softcap=9.0), True, TILE, ways.Way(None, dlogits=F32, bonus=True)),
        (head_of(weight=torch.empty(64, 300, dtype=BF16).T), False, TILE, ways.Way(None, F32)),
        (head_of(F16), False, None, ways.Way(None, dlogits=F32)),
        (head_of(F32), False, None, ways.Way(None, dlogits=F32)),
    ],
)
def test_which_inputs_take_which_way(head: Head, bonus: bool, want: ways.Way) -> None:
    assert ways.way_of(head, True, bonus) == want


@pytest.mark.parametrize(("head", "tile"), [(head_of(), TILE), (head_of(F16), None), (head_of(F32), None)])
def test_logprobs_alone_take_our_gemm_where_there_is_one(head: Head, tile: Tile | None) -> None:
    assert ways.way_of(head, False) == ways.Way(tile)


@pytest.mark.parametrize(
    ("tile", "dtype", "path"),
    [(TILE, BF16, cost.OWN), (None, BF16, cost.VENDOR), (None, F16, cost.TWICE), (None, F32, cost.TWICE_FP32)],
)
def test_half_precision_is_kept_in_half_on_a_gpu(
    dtype: torch.dtype, path: cost.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "gradient_dtype", lambda head: head.hidden.dtype)
    way = ways.way_of(head_of(dtype), True)
    assert way.path == path
    assert (way.exponentials, way.dlogits) == ((dtype, None) if dtype == BF16 else (None, dtype))


@pytest.mark.parametrize("fields", [{}, {"softcap": 9.0}, {"bias": 1}, {"row_temperature": 1}], ids=str)
@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_our_gemm_is_for_bf16_on_cuda(major: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for device, dtype in itertools.product(("cpu", "cuda"), (BF16, F16, F32)):
        hidden = types.SimpleNamespace(dtype=dtype, device=device, is_cuda=device == "cuda")
        tile = TILES[major][bool(fields)] if (device, dtype) == ("cuda", BF16) else None
        assert OWN_TILE(head_of()._replace(hidden=hidden, **fields)) == tile


def test_logprobs_are_differentiated_from_exponentials_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient of the entropy no row is read for one."""
    bonuses: list[bool] = []
    original = exponentials.close_rows
    monkeypatch.setattr(exponentials, "close_rows", lambda *a, **o: (bonuses.append(a[8]), original(*a, **o))[1])
    head, _ = sample(23, 70, dtype=BF16, H=16)
    leaves = {k: v.to(DEVICE) for k, v in head.items()}
    leaves["hidden"].requires_grad_()
    logprob, entropy = linear_logprob(**leaves, backend="triton")
    for total in (logprob.sum(), (logprob + entropy).sum()):
        (got,) = torch.autograd.grad(total, [leaves["hidden"]], retain_graph=True)
        wide: dict[str, Tensor] = {k: v.detach().double() if v.is_floating_point() else v for k, v in leaves.items()}
        wide["hidden"].requires_grad_()
        exact = linear_logprob(**wide, backend="reference")
        whole = exact[0].sum() + (exact[1].sum() if bonuses[-1] else 0.0)
        (want,) = torch.autograd.grad(whole, [wide["hidden"]])
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
    assert bonuses == [False, True]
