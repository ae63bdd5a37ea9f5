"""The simulated device: what it runs and refuses; test_ptx_launcher.py runs this with `-p ptxcheck.device_plugin`."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ptxcheck.checked_memory import POISON
from ptxcheck.device import Device, SynchronisationError
from ptxcheck.simulate import simulated


@triton.jit
def double(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, i < n, 0.0), i < n)


def on_gpu(*shape: int, **options: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to("cuda", **options)


def test_a_device_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="want a simulated device of arch 80 or 90, got 120"), simulated(120):
        pass


def test_tensors_know_where_they_are() -> None:
    x = torch.randn(5, 3)
    y = x.to("cuda")
    assert (x.is_cuda, y.is_cuda, y[1:].is_cuda, y.t().device.type, (y + 1).device.index) == (
        False,
        True,
        True,
        "cuda",
        0,
    )
    assert not y.cpu().is_cuda
    assert torch.equal(y.cpu(), x)
    assert torch.zeros(3, device="cuda").is_cuda
    assert torch.tensor([1.0], device="cuda").is_cuda
    assert y.new_empty(2).is_cuda
    assert torch.empty_like(y).cpu().view(torch.int16).eq(POISON - 65536).all()
    with pytest.raises(TypeError, match="can't convert cuda"):
        y.numpy()


def test_a_kernel_runs_on_its_tensors_and_gradients_flow(device: Device) -> None:
    x = on_gpu(300)
    out = torch.empty_like(x)
    double[(3,)](out, x, 300, 128)
    assert device.launches == {"double": 1}
    assert torch.equal(out.cpu(), 2 * x.cpu())
    leaf = on_gpu(4, 4).requires_grad_()
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.is_cuda
    assert torch.equal(leaf.grad.cpu(), 2 * leaf.detach().cpu())
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        double[(3,)](out, torch.randn(300), 300, 128)


class Second(torch.autograd.Function):
    """Two results, one of which gets no gradient: autograd makes zeros for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        assert first.is_cuda
        return first + second


def test_a_gradient_that_autograd_makes_is_on_the_device() -> None:
    leaf = on_gpu(4).requires_grad_()
    Second.apply(leaf)[1].sum().backward()
    assert torch.equal(leaf.grad.cpu(), torch.ones(4))


def test_an_operation_of_others_has_its_results_on_the_device() -> None:
    with torch.profiler.record_function("named"):
        x = on_gpu(4)
    assert x.is_cuda


def test_a_finding_of_the_executor_is_kept(device: Device) -> None:
    x = on_gpu(300)
    double[(3,)](torch.empty(299, device="cuda"), x, 300, 128)
    (found,) = device.findings
    device.findings.clear()
    assert found[0] == "double"
    assert "out of bounds: store" in found[1]


WAITS = {
    "item": lambda x: x.sum().item(), "a number that decides": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(), "cpu": lambda x: x.cpu(), "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a number from the host": lambda x: torch.randn(3).to("cuda"),
    "indices from the host": lambda x: x[torch.tensor([0, 1])],
    "a mask from the host": lambda x: x[torch.tensor([True, False, True, False, False])],
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_is_counted_and_refused(device: Device, name: str) -> None:
    x = on_gpu(5)
    device.reset()
    WAITS[name](x)
    assert len(device.syncs) >= 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(SynchronisationError, match="synchronizing"):
            WAITS[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_make_the_host_wait(device: Device) -> None:
    x = on_gpu(5, 5)
    device.reset()
    y = x @ x + torch.arange(5, device="cuda")
    torch.where(y > 0, y, 0.0).sum(1)
    assert device.syncs == []
    assert sum(device.ops.values()) >= 5
    assert "mm" in device.table()


REFUSED = {
    "tensors of two devices": (lambda x: x + torch.ones(4, 4), "same device"),
    "values from the host": (lambda x: x.__setitem__(x > 0, torch.ones(16)), "same device"),
    "products of two dtypes": (lambda x: torch.mm(x.bfloat16(), x), "same dtype"),
    "a sum of another dtype": (lambda x: torch.addmm(x, x.half(), x.half(), out=x), "expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        call(on_gpu(4, 4))


def test_half_precision_is_summed_in_fp32() -> None:
    a = torch.full((1, 4096), 1.0).bfloat16().to("cuda")
    assert torch.mm(a, a.t()).item() == 4096
    assert torch.mm(a, a.t(), out_dtype=torch.float32).dtype == torch.float32


def test_a_copy_to_pinned_memory_arrives_when_its_event_is_awaited(device: Device) -> None:
    there, here = torch.tensor([7], device="cuda"), torch.zeros(1, dtype=torch.int64, pin_memory=True)
    event = torch.cuda.Event()
    here.copy_(there, non_blocking=True)
    event.record()
    assert here.item() == 0
    assert not event.query()
    event.synchronize()
    assert here.item() == 7
    assert device.waits == {"waits for an event": 1}


def test_an_assertion_fails_at_the_next_synchronisation(device: Device) -> None:
    torch._assert_async(torch.tensor(False, device="cuda"), "wrong")
    with pytest.raises(RuntimeError, match=r"device-side assert triggered \(wrong\)"):
        torch.cuda.synchronize()
    device.failed = None


def test_a_graph_is_replayed_with_later_inputs(device: Device) -> None:
    x = on_gpu(300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.empty_like(x)
        double[(3,)](out, x, 300, 128)
        total = (out @ out).sqrt()
    x.copy_(torch.arange(300.0).to("cuda"))
    graph.replay()
    assert torch.equal(out.cpu(), 2 * torch.arange(300.0))
    torch.testing.assert_close(total.cpu(), (2 * torch.arange(300.0)).norm())
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="when stream is capturing"):
        x.sum().item()


def test_memory_is_counted_as_the_allocator_counts() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4096
