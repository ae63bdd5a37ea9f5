"""Properties of the triton backend that only a GPU shows: half precision, streams, graphs, memory, large offsets.

On a GPU test_kernels.py, test_gemm_kernel.py, test_own_tokens.py, test_exponentials.py and others run there as well.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from closed_form import FEATURES, all_objectives
from head_cases import EVERYTHING, GEMMS, Head, check_precision, closed, on_device, on_policy, run, sample, tensors, to
from torch import Tensor

from rlplus import Objective, linear_logprob, linear_policy_loss
from rlplus.loss import selfcheck
from rlplus.loss.backends import selection, triton_chunks, ways
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends.ways import chunk_rows
from rlplus.loss.head import gradient_sum as gradients

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
EPS = torch.finfo(torch.float32).eps
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
Case = tuple[Head, dict[str, Any]]


@pytest.fixture(params=GEMMS)
def gemm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ways, "our_tile", GEMMS[request.param])
    return request.param


def case(n: int, V: int, H: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
    head, constants = sample(n, V, seed, dtype, H)
    return on_policy(head), constants


def on_gpu(case: Case) -> Case:
    return tuple({k: v.to(DEVICE) for k, v in part.items()} for part in case)  # type: ignore[return-value]


def fused(case: Case, **options: Any) -> dict[str, Tensor]:
    return tensors(run(*case, EVERYTHING, backend="triton", **options))


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of those that differ in a bit."""
    return [name for name in first if not torch.equal(first[name], second[name])]


# ---- against float64


@DTYPES
@pytest.mark.parametrize(("internal", "external", "features"), all_objectives(["all"]))
def test_every_objective_in_every_precision(
    internal: str, external: str, features: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = len(internal + external)
    if number % 2:
        monkeypatch.setattr(ways, "our_tile", GEMMS["triton"])
    objective = Objective(internal, external, **FEATURES[features])
    head, constants = case(40, 200, 64, dtype, number)
    got = on_device(DEVICE, head, constants, objective, temperature=0.7, max_scratch_mb=(None, 0.05)[number % 3 // 2])
    check_precision(got, head, constants, objective, 0.7, gemm_dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("n", "V", "H"), [(300, 2048, 128), (129, 1001, 80), (65, 130, 72), (3, 1, 7)])
def test_every_shape_in_every_precision(gemm: str, n: int, V: int, H: int, dtype: torch.dtype) -> None:
    """Whole tiles and tails in every direction; rows of 80 and 72 numbers are aligned for TMA, 7 are not."""
    head, constants = case(n, V, H, dtype)
    for mb in (None, 4e-4 * V):
        got = on_device(DEVICE, head, constants, EVERYTHING, max_scratch_mb=mb)
        check_precision(got, head, constants, EVERYTHING, gemm_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sampled_backward_pass_is_exact_or_right_in_the_mean(gemm: str, dtype: torch.dtype) -> None:
    """Drawn from our GEMM's exponentials, with its tiles' sums, or from logits."""
    draws, inputs = 12, case(40, 500, 64, dtype, 3)
    want = closed(*(to(part, torch.float64) for part in inputs), EVERYTHING)
    exact = fused(on_gpu(inputs), backward="sampled", threshold=1e-30, seed=0)
    few = [fused(on_gpu(inputs), backward="sampled", threshold=2.0**-6, seed=i) for i in range(draws)]
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-5
    for name in ("dhidden", "dweight"):
        size, each = want[name].norm(), torch.stack([one[name].double().cpu() - want[name] for one in few])
        assert (exact[name].double().cpu() - want[name]).norm() <= rounding * size
        assert 0.01 < (one := float(each.flatten(1).norm(dim=1).square().mean().sqrt() / size)) < 0.5
        assert each.mean(0).norm() / size <= 1.4 * one / draws**0.5 + rounding, name


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_fp16_gradients_of_small_weights_do_not_vanish(name: str) -> None:
    head, constants = case(40, 200, 64, torch.float16)
    for weight in ("token_weight", "entropy_weight"):
        constants[weight] = constants[weight] * 2.0**-16
    got = run(*on_gpu((head, constants)), EVERYTHING, backend=name)
    exact = closed(to(head, torch.float64), to(constants, torch.float64), EVERYTHING)
    for gradient in ("dhidden", "dweight", "dbias"):
        bound = 0.02 * exact[gradient].abs().max() + 2.0**-24  # half a step of fp16's subnormal numbers
        assert (got[gradient].cpu().double() - exact[gradient]).abs().max() <= bound, gradient


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["flat", "confident"])
def test_logprobs_are_as_exact_as_fp32_logits(gemm: str, scale: float, dtype: torch.dtype) -> None:
    n, V, H = 500, 20_001, 896
    hidden, weight = (torch.randn(*s, device=DEVICE) for s in ((n, H), (V, H)))
    hidden, weight = hidden.to(dtype), (scale * H**-0.5 * weight).to(dtype)
    target = (hidden.float() @ weight.float().T + torch.randn(n, V, device=DEVICE)).argmax(1)
    got = linear_logprob(hidden, weight, target, backend="triton")
    terms = (hidden.double().abs() @ weight.double().abs().T).max()

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logp = (hidden.to(dtype) @ weight.to(dtype).T).log_softmax(1)
        return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)

    exact = plain(torch.float64)
    for g, e, p in zip(got, exact, plain(torch.float32), strict=True):
        assert (g - e).abs().max() <= 2 * (p - e).abs().max() + 8 * EPS * terms


@DTYPES
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_factor_of_the_backward_pass_is_multiplied_once(name: str, dtype: torch.dtype) -> None:
    head, constants = on_gpu(case(40, 200, 64, dtype))
    leaf = {k: v.requires_grad_(v.is_floating_point()) for k, v in head.items()}

    def gradients(factor: float) -> tuple[Tensor, ...]:
        out = linear_policy_loss(**leaf, **constants, objective=EVERYTHING, backend=name)
        return torch.autograd.grad(factor * out.loss, [leaf[k] for k in ("hidden", "weight", "bias")])

    by = torch.tensor(0.37, device=DEVICE)
    for got, one in zip(gradients(0.37), gradients(1.0), strict=True):
        assert torch.equal(got, (one.float() * by).to(dtype))


def test_one_chunk_needs_no_accumulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: the GEMM's sums are rounded, and again with the targets' elements; an accumulator of two chunks once."""
    inputs = on_gpu(case(150, 300, 64))
    allocated: list[torch.dtype] = []
    sizes: list[Tensor] = []
    original, add = gradients.add_dweight, backend.own_tokens.add_to_weight

    def recorded(total: Tensor, *rest: Tensor) -> None:
        sizes.append(total.float().abs())
        add(total, *rest)
        sizes.append(total.float().abs())

    def noted(total: Tensor, *rest: Any, **options: Any) -> None:
        allocated.append(total.dtype)
        original(total, *rest, **options)

    monkeypatch.setattr(gradients, "add_dweight", noted)
    monkeypatch.setattr(backend.own_tokens, "add_to_weight", recorded)
    whole = fused(inputs)
    assert not allocated
    size = sizes[0] + sizes[1]
    parts = fused(inputs, max_scratch_mb=0.1)
    assert set(allocated) == {torch.float32}
    assert ((whole["dweight"] - parts["dweight"]).abs() <= torch.finfo(torch.bfloat16).eps * size + 1e-7).all()


# ---- the choice of the backend


@DTYPES
def test_auto_takes_the_kernels_once_a_child_process_has_checked_them(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLUS_CACHE", str(tmp_path))
    monkeypatch.setattr(selection, "_on_cuda", {})
    monkeypatch.setattr(selection, "_agreeing", set())
    inputs = on_gpu(case(300, 5003, 136, dtype))
    chosen = selection.choose("auto", inputs[0]["hidden"].device, dtype)
    assert chosen.backend == "triton", chosen.reason
    (verdict,) = tmp_path.glob("*.json")
    assert json.loads(verdict.read_text())["status"] == "passed"
    assert equal(fused(inputs), tensors(run(*inputs, EVERYTHING))) == []
    assert len(selection._agreeing) == 1  # the call was compared


@DTYPES
def test_the_self_check_passes(dtype: torch.dtype) -> None:
    assert selfcheck.check(torch.device(DEVICE, 0), dtype) == ""


# ---- small shapes, for compute-sanitizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "V", "H"), [(150, 300, 128), (33, 131, 72)])
def test_small(gemm: str, n: int, V: int, H: int, dtype: torch.dtype) -> None:
    head, constants = on_gpu(case(n, V, H, dtype))
    for mb in (None, 0.05):
        got = fused((head, constants), max_scratch_mb=mb)
        assert all(value.isfinite().all() for value in got.values())
    logprob, entropy = linear_logprob(**head, backend="triton")
    torch.testing.assert_close((logprob, entropy), (got["logprob"], got["entropy"]))


# ---- large offsets


@pytest.mark.parametrize("n", [43_000])
def test_more_than_2_to_the_31_logits(gemm: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, with hidden states that lie apart; against small chunks, and the last rows against float64."""
    V, H, last = 50_000, 16, slice(n - 50, n)
    assert n * V > 2**31
    monkeypatch.setattr(
        triton_chunks, "chunk_rows", lambda head, way, scratch: n if scratch == 1e11 else chunk_rows(head, way, scratch)
    )
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=g, device=DEVICE).bfloat16() for s in ((n, 2 * H), (V, H)))
    hidden, weight = hidden[:, :H], weight.requires_grad_()
    hidden = hidden.detach().requires_grad_()
    target = torch.randint(V, (n,), generator=g, device=DEVICE)

    def loss_and_gradients(max_scratch_mb: float) -> tuple[Tensor, ...]:
        on = torch.ones(n, device=DEVICE)
        out = linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=on, token_weight=on, external=on < 0,
            objective=Objective("reinforce"), backend="triton", max_scratch_mb=max_scratch_mb,
        )  # fmt: skip
        return out.logprob, out.entropy, *torch.autograd.grad(out.loss, (hidden, weight))

    logprob, entropy, dhidden, dweight = loss_and_gradients(1e5)
    small = loss_and_gradients(500)
    torch.testing.assert_close((logprob, entropy), small[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dhidden, small[2], rtol=0.02, atol=0.02)
    torch.testing.assert_close(dweight, small[3], rtol=0.02, atol=0.02 * small[3].abs().max().item())
    logp = (hidden[last].double() @ weight.double().T).log_softmax(1)
    torch.testing.assert_close(logprob[last, None].double(), logp.gather(1, target[last, None]), rtol=1e-5, atol=1e-5)
    want = logp.exp() @ weight.double() - weight[target[last]].double()
    torch.testing.assert_close(dhidden[last].double(), want, rtol=0.02, atol=0.02)


def test_a_weight_of_more_than_2_to_the_31_numbers(gemm: str) -> None:
    n, V, H = 5, 262_400, 8208
    assert V * H > 2**31
    hidden, weight = torch.randn(n, H, device=DEVICE).bfloat16(), torch.empty(V, H, device=DEVICE).bfloat16()
    torch.nn.init.normal_(weight, std=2 * H**-0.5)
    target = torch.tensor([V - 1, V - 2, V - 129, 0, V // 2], device=DEVICE)
    logprob, _ = linear_logprob(hidden, weight, target, backend="triton")
    blocks = [hidden.double() @ block.double().T for block in weight.split(20_000)]
    exact = torch.cat(blocks, 1).log_softmax(1).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-5, atol=1e-5)


# ---- the device's order of things


def test_same_inputs_give_the_same_bits(gemm: str) -> None:
    inputs = on_gpu(case(3000, 5003, 256))
    first, second = (fused(inputs, max_scratch_mb=30) for _ in range(2))
    assert equal(first, second) == []


def test_runs_on_the_current_stream(gemm: str) -> None:
    """Inputs that arrive late on a stream: a kernel on another would read what was there before."""
    head, constants = on_gpu(case(500, 3001, 128))
    want = fused((head, constants))
    late = {k: torch.zeros_like(v) for k, v in head.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, value in late.items():
            value.copy_(head[name])
        got = fused((late, constants))
    torch.cuda.current_stream().wait_stream(stream)
    assert equal(want, got) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_runs_on_the_device_of_its_inputs(gemm: str) -> None:
    inputs = on_gpu(case(100, 301, 64))
    want = fused(inputs)
    there = tuple({k: v.to("cuda:1") for k, v in part.items()} for part in inputs)
    assert torch.cuda.current_device() == 0
    got = fused(there)  # type: ignore[arg-type]
    assert equal(want, {k: v.to("cuda:0") for k, v in got.items()}) == []


@pytest.mark.parametrize("max_scratch_mb", [None, 0.3])
def test_a_graph_replays_what_eager_mode_computes(gemm: str, max_scratch_mb: float | None) -> None:
    """Inputs that came after its capture, with other rows of weight 0."""
    static, static_constants = on_gpu(case(100, 500, 64))
    later, later_constants = case(100, 500, 64, seed=1)
    leaf = {k: v.requires_grad_(v.is_floating_point()) for k, v in static.items()}

    def step() -> dict[str, Tensor]:
        out = linear_policy_loss(
            **leaf, **static_constants, objective=EVERYTHING, backend="triton", max_scratch_mb=max_scratch_mb
        )
        names = ("hidden", "weight", "bias")
        grads = torch.autograd.grad(out.loss, [leaf[name] for name in names])
        result = {"loss": out.loss, "logprob": out.logprob, "entropy": out.entropy}
        return result | {f"d{name}": value for name, value in zip(names, grads, strict=True)}

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and lets cuBLAS take its workspace
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for to, values in ((static, later), (static_constants, later_constants)):
            for name, value in values.items():
                to[name].copy_(value)
    for _ in range(2):
        graph.replay()
        got: dict[str, Any] = {name: value.cpu() for name, value in captured.items()}
        check_precision(got, later, later_constants, EVERYTHING, gemm_dtype=torch.bfloat16)
    eager = on_device(DEVICE, later, later_constants, EVERYTHING, max_scratch_mb=max_scratch_mb)
    torch.testing.assert_close(got["logprob"], eager["logprob"])


def test_the_host_waits_for_one_number_of_rows(gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = [0]

    def counted(wait: Any) -> Any:
        def count(x: Tensor) -> Any:
            waits[0] += 1
            torch.cuda.set_sync_debug_mode("default")
            out = wait(x)
            torch.cuda.set_sync_debug_mode("error")
            return out

        return count

    head, constants = on_gpu(case(600, 3001, 128))
    objective = Objective("clip", "mis", kl_coef=0.1, dual_clip=3.0)
    options = {"backend": "triton", "max_scratch_mb": 3}
    run(head, constants, objective, **options)  # compiles
    linear_logprob(**head, backend="triton")
    for name in ("nonzero", "__int__"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(head, constants, objective, **options)
        linear_logprob(**head, backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits[0] == 1


def peak(call: Any) -> tuple[int, Any]:
    """Bytes allocated beyond what was there, at most, and the result."""
    call()  # compiles, and lets cuBLAS take its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


@DTYPES
@pytest.mark.parametrize("mb", [80, 320])
@pytest.mark.parametrize(("name", "gemm"), [("triton", "vendor"), ("triton", "triton"), ("torch", "vendor")])
def test_memory_stays_within_the_scratch(
    name: str, gemm: str, mb: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "our_tile", GEMMS[gemm])
    n, V, H = 4096, 32_001, 1024
    hidden, weight = torch.randn(n, H, device=DEVICE).to(dtype), (0.1 * torch.randn(V, H, device=DEVICE)).to(dtype)
    target, on = torch.randint(V, (n,), device=DEVICE), torch.ones(n, device=DEVICE)
    tokens = 400 * n + 1_000_000  # bytes of per-token constants and results
    bytes_used, _ = peak(lambda: linear_logprob(hidden, weight, target, backend=name, max_scratch_mb=mb))
    assert bytes_used <= mb * 1e6 + tokens
    hidden.requires_grad_()
    weight.requires_grad_()

    def both_ways() -> Any:
        out = linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=on, token_weight=on, external=on < 0,
            backend=name, max_scratch_mb=mb,
        )  # fmt: skip
        return out, torch.autograd.grad(0.5 * out.loss, (hidden, weight))

    bytes_used, (out, _) = peak(both_ways)
    accumulator = 4 * V * H if dtype != torch.float32 else 0
    assert bytes_used <= mb * 1e6 + accumulator + (n + V) * H * dtype.itemsize + tokens
    assert out.loss.isfinite()


def test_logprobs_need_little_memory_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "our_tile", GEMMS["triton"])
    hidden, weight = (torch.randn(*s, device=DEVICE).bfloat16() for s in ((4096, 256), (151_936, 256)))
    target = torch.randint(151_936, (4096,), device=DEVICE)
    bytes_used, _ = peak(lambda: linear_logprob(hidden, weight, target, backend="triton", max_scratch_mb=20))
    assert bytes_used <= 20e6 + 400 * 4096 + 1e6
