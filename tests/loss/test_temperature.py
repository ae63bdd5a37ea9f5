"""A temperature per token: every backend agrees with float64, and with a number where all are equal."""

import math
from typing import Any

import pytest
import torch
from head_bounds import CPP, DEVICE, EVERY
from head_cases import EVERYTHING, Head, check_fp64, check_precision, own_gemm, run, sample, tensors, to
from head_rows import DENTROPY, DLOGPROB, WIDTH, closed, statistics
from quick import pairs
from torch import Tensor

from rlplus import Objective, RLPlusLoss, linear_logprob, linear_policy_loss
from rlplus.kernels import exponentials as row_kernels
from rlplus.kernels import linear_logprob as linear_kernels
from rlplus.kernels.tiling import Block
from rlplus.loss.backends import triton as triton_backend
from rlplus.loss.backends import ways
from rlplus.loss.backends.ways import Way
from rlplus.loss.head.head import Head as OpHead

N, V = 15, 41
FEW_ROWS = 6 * V * 12e-6  # MB
BACKENDS = ["torch", CPP, "triton"]
CAPPED = {"logit_scale": 3.0, "logit_softcap": 4.0}
TRANSFORMS = pytest.mark.parametrize("transform", [{}, CAPPED], ids=["plain", "scale and softcap"])


def temperatures(n: int = N, dtype: torch.dtype = torch.float64) -> Tensor:
    """Between .4 and 2.4."""
    return 0.4 + 2 * torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=dtype)


def fused(backend: str, head: Head, constants: dict[str, Any], temperature: Any, **options: Any) -> dict[str, Any]:
    """`run` on the backend's device; the results are on the CPU."""
    device = DEVICE.get(backend, "cpu")
    head, constants = ({k: v.to(device) for k, v in x.items()} for x in (head, constants))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(device)
    got = run(head, constants, EVERYTHING, temperature=temperature, backend=backend, **options)
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in got.items()}


@TRANSFORMS
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", {}),
        ("torch", {}),
        ("torch", {"max_scratch_mb": 4 * 16 * V * 1e-6}),
    ],
    ids=["reference", "torch", "torch, chunks"],
)
def test_matches_the_closed_form_in_fp64(backend: str, options: dict[str, Any], transform: dict[str, float]) -> None:
    head, constants = sample(N, V)
    got = fused(backend, head, constants, temperatures(), **options, **transform)
    check_fp64(got, head, constants, EVERYTHING, temperatures(), **transform)


@pytest.mark.parametrize(("dtype", "backend"), pairs([torch.float32, torch.bfloat16, torch.float16], BACKENDS), ids=str)
def test_low_precision_inputs_keep_the_errors_of_fp32(backend: str, dtype: torch.dtype) -> None:
    head, constants = sample(N, V, dtype=dtype)
    transform = {} if dtype == torch.float32 else CAPPED
    T = temperatures(dtype=torch.float32)
    got = fused(backend, head, constants, T, max_scratch_mb=FEW_ROWS, **transform)
    rounds = (backend == "cpp" and dtype == torch.bfloat16) or DEVICE.get(backend) == "cuda"
    check_precision(got, head, constants, EVERYTHING, T.double(), dtype if rounds else torch.float32, **transform)


@pytest.mark.parametrize("bias", [True, False])
@TRANSFORMS
def test_in_our_own_gemm(transform: dict[str, float], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles, with and without stored logits; 40 rows: the last tile of rows is not full."""
    monkeypatch.setattr(ways, "our_tile", own_gemm)
    head, constants = sample(40, 70, dtype=torch.float32, H=16)
    T = temperatures(40, torch.float32)
    check_precision(fused("triton", head, constants, T, **transform), head, constants, EVERYTHING, T, **transform)
    if not bias:
        del head["bias"]
    there = {k: v.to(DEVICE["triton"]) for k, v in head.items()}
    got = linear_logprob(**there, temperature=T.to(DEVICE["triton"]), backend="triton", **transform)
    want = linear_logprob(**to(head, torch.float64), temperature=T, backend="reference", **transform)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


@EVERY
def test_equal_ones_are_a_number(backend: str) -> None:
    """To the bit: the reciprocal and the softcap divided are exact."""
    head, constants = sample(N, V, dtype=torch.float32)
    got, want = (fused(backend, head, constants, T, **CAPPED) for T in (torch.full((N,), 0.5), 0.5))
    torch.testing.assert_close(tensors(got), tensors(want), rtol=0, atol=0)


@EVERY
def test_rows_of_weight_0_may_hold_anything(backend: str) -> None:
    head, constants = sample(N, V, dtype=torch.float32)
    for name in ("token_weight", "entropy_weight"):
        constants[name][5:9] = 0.0
    T = temperatures()
    T[5:9] = torch.tensor([math.nan, math.inf, 0.0, -2.0])
    got, want = (fused(backend, head, constants, t, max_scratch_mb=FEW_ROWS) for t in (T, temperatures()))
    for name in ("loss", "dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name
    assert {k: v.item() for k, v in got["stats"].items()} == {k: v.item() for k, v in want["stats"].items()}


def test_in_a_cuda_graph_where_every_row_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_capturing", lambda device: True)
    head, constants = sample(N, V, dtype=torch.float32)
    idle = (constants["token_weight"] == 0) & (constants["entropy_weight"] == 0)
    assert idle.any()
    got = fused("triton", head, constants, temperatures().masked_fill(idle, math.nan))
    want = fused("triton", head, constants, temperatures().masked_fill(idle, 1.0))
    for name in ("dhidden", "dweight", "dbias"):
        assert torch.equal(got[name], want[name]), name


@TRANSFORMS
@EVERY
def test_logprobs_are_differentiable(backend: str, transform: dict[str, float]) -> None:
    head, _ = sample(11, dtype=torch.float32)
    T, out = temperatures(11, torch.float32), []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        device = DEVICE.get(name, "cpu")
        leaf = {k: v.to(device, copy=True).requires_grad_(k != "target") for k, v in to(head, dtype).items()}
        given = T.to(device, copy=True).requires_grad_()
        logprob, entropy = linear_logprob(**leaf, temperature=given, backend=name, **transform)
        (logprob.sum() - 2 * entropy.square().sum()).backward()
        assert given.grad is None  # it is a constant
        out.append([logprob, entropy, *(leaf[k].grad for k in ("hidden", "weight", "bias"))])
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_gradient_is_the_slope_of_the_logprobs(backend: str) -> None:
    head, _ = sample(4, 9)

    def logprobs(*leaves: Tensor) -> tuple[Tensor, ...]:
        names = ("hidden", "weight", "bias")
        inputs = dict(zip(names, leaves, strict=True)) | {"target": head["target"], "temperature": temperatures(4)}
        return linear_logprob(**inputs, logit_softcap=3.0, backend=backend)

    assert torch.autograd.gradcheck(logprobs, [head[k].requires_grad_() for k in ("hidden", "weight", "bias")])


@EVERY
def test_ignored_targets_need_no_temperature(backend: str) -> None:
    device = DEVICE.get(backend, "cpu")
    head = {k: v.to(device) for k, v in sample(9, dtype=torch.float32)[0].items()}
    ignored = torch.arange(9, device=device) % 4 == 0
    T = temperatures(9).float().to(device)
    target = head["target"].masked_fill(ignored, -100)
    out = []
    for given in (T, T.masked_fill(ignored, math.nan)):
        leaf = {k: v.clone().requires_grad_() for k, v in head.items() if k != "target"}
        logprob, _ = linear_logprob(**leaf, target=target, temperature=given, backend=backend)
        logprob.sum().backward()
        out.append((logprob, *(x.grad for x in leaf.values())))
    assert (out[1][0][ignored] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))


def test_one_graph_takes_other_temperatures() -> None:
    inputs = {k: v for x in sample(9, dtype=torch.float32) for k, v in x.items()}

    def step(temperature: Tensor) -> Tensor:
        return linear_policy_loss(**inputs, objective=EVERYTHING, temperature=temperature, backend="torch").loss

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 0.5):
        T = factor * temperatures(9)
        torch.testing.assert_close(compiled(T), step(T))


def test_shapes_are_those_of_the_tokens_and_a_module_takes_them() -> None:
    head, constants = sample(6)
    T, shaped = temperatures(6), {k: v.view(2, 3) for k, v in constants.items()}
    want = run(head, constants, EVERYTHING, temperature=T)
    batch = {"hidden": head["hidden"].view(2, 3, -1), "target": head["target"].view(2, 3)}
    got = RLPlusLoss(EVERYTHING)(**head | batch, **shaped, temperature=T.view(2, 3))
    assert torch.equal(got.loss, want["loss"])
    assert torch.equal(got.logprob.flatten(), want["logprob"])


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-60])
@pytest.mark.parametrize("backend", ["reference", "torch", CPP])
def test_values_that_are_no_temperature_are_refused_where_they_count(backend: str, value: float) -> None:
    head, constants = sample(9, dtype=torch.float32)
    message = r"want temperature finite and > 0 wherever the token's weight is not 0; got 0, less, NaN or Inf"
    T = torch.ones(9, dtype=torch.float64)
    T[3] = value  # 1e-60 is 0 in fp32
    for name, other in (("token_weight", "entropy_weight"), ("entropy_weight", "token_weight")):
        given = constants | {name: torch.ones(9), other: torch.zeros(9)}
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(**head, **given, objective=EVERYTHING, temperature=T, backend=backend)
    without_bonus = Objective("clip", "mis")
    linear_policy_loss(**head, **given, objective=without_bonus, temperature=T, backend=backend)
    with pytest.raises(ValueError, match="want temperature finite and > 0 wherever the target is not -100"):
        linear_logprob(**head, temperature=T, backend=backend)


@pytest.mark.parametrize(
    ("temperature", "message"),
    [
        (torch.ones(2), r"want temperature a tensor, floating \(9,\) on cpu; got float32 \(2,\) on cpu"),
        (torch.ones(9, dtype=torch.int64), r"want temperature a tensor, floating \(9,\) on cpu; got int64 \(9,\)"),
        (torch.ones(9, device="meta"), r"want temperature a tensor, floating \(9,\) on cpu; got float32 .* on meta"),
        ([1.0] * 9, r"want temperature a finite number > 0; got \[1\.0"),
    ],
)
def test_what_is_no_temperature_per_token_is_refused(temperature: Any, message: str) -> None:
    head, constants = sample(9, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**head, **constants, objective=EVERYTHING, temperature=temperature)
    with pytest.raises(ValueError, match=message):
        linear_logprob(**head, temperature=temperature)


def test_a_tensor_without_dimensions_is_read_on_the_cpu_and_stays_on_a_device() -> None:
    head, constants = sample(9, dtype=torch.float32)
    there = {k: v.to("meta") for x in (head, constants) for k, v in x.items()}
    assert linear_policy_loss(**there, temperature=torch.tensor(0.5, device="meta")).logprob.shape == (9,)
    got, want = (fused("torch", head, constants, T) for T in (torch.tensor(0.5), 0.5))
    assert torch.equal(got["loss"], want["loss"])


def test_the_kernels_want_it_contiguous_and_fp32() -> None:
    target, values, x = torch.zeros(3, dtype=torch.int64), torch.empty(3, WIDTH), torch.zeros(3, 1)
    for wrong in (torch.ones(2), torch.ones(3).double(), torch.ones(6)[::2]):
        with pytest.raises(ValueError, match=r"want row_temperature \(3,\) fp32, contiguous; got torch\.float"):
            linear_kernels.target_logits(values, x, x, target, None, 1.0, None, wrong)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_row_kernels(softcap: float | None) -> None:
    """Statistics at once, in parts and by our GEMM, and the gradient from logits and from exponentials; a row without
    slopes has the temperature NaN."""
    device, n, V = DEVICE["triton"], 6, 300
    logits, bias, T = 3 * torch.randn(n, V), torch.randn(V), temperatures(n).float()
    target, slopes = torch.randint(V, (n,)), torch.randn(2, n)
    slopes[:, 2], T[2] = 0.0, math.nan
    rest = (bias.to(device), 0.8, softcap, T.to(device))
    raw, y, e = logits.to(device), target.to(device), torch.empty(n, V, device=device)
    values = statistics(raw, y, V, rest, kept=e)
    parts = statistics(raw, y, V, rest, parts=2, block=Block(128, 4))
    tiles = []
    for tile in linear_kernels.TILES[0]:
        head = OpHead(raw, torch.eye(V, device=device), rest[0], y, *rest[1:])
        tiles.append(next(triton_backend.Work(head, Way(tile), None, 1e9).chunks())[2])
    x = logits.double().requires_grad_()
    z = (x + bias.double()) / 0.8
    z = (z if softcap is None else softcap * (z / softcap).tanh()) / T.double()[:, None]
    logp = z.log_softmax(1)
    want = torch.stack([logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)])
    for got in (values, parts, *tiles):
        torch.testing.assert_close(got[:, :2].T.cpu().double(), want.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    if softcap is not None:
        slopes[1] = 0.0  # exponentials hide the derivative of the softcap
    values[:, DLOGPROB : DENTROPY + 1] = slopes.T.to(device)
    dlogits = torch.empty(n, V, device=device)
    row_kernels.row_gradient(dlogits, values, raw, V, y, *rest)
    known = torch.arange(n) != 2
    (want,) = torch.autograd.grad((slopes * want)[:, known].sum(), x)
    for got in (dlogits, closed(values, e, V, y, 0.8, rest[3], entropy=softcap is None)):
        torch.testing.assert_close(got.cpu()[known].double(), want[known], rtol=1e-4, atol=1e-6)
    assert (dlogits[2] == 0).all()
    assert (e[2] == 0).all()
