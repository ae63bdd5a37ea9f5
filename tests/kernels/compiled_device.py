"""Mistakes planted in the losses that only a GPU would show: the simulated device must see each.

Run by tests/kernels/test_ptx_device.py with `-p ptxcheck.device_plugin`.
"""

from typing import Any

import pytest
import torch
from head_cases import EVERYTHING, check_precision, on_policy, run, sample
from ptxcheck.device import Device

from rlplus.kernels import linear_logprob as kernels
from rlplus.loss.backends import triton as backend
from rlplus.loss.backends import ways
from rlplus.loss.head import gradient_sum as gradients
from rlplus.loss.head.head import add_dweight

HEAD, CONSTANTS = sample(150, 300, 1, torch.bfloat16, 64)
HEAD = on_policy(HEAD)
mm, sets, add, finish_rows = torch.mm, backend.sets, backend.ChunkGradients.add_chunk, kernels.finish_rows


def there() -> list[dict[str, torch.Tensor]]:
    return [{k: v.to("cuda") for k, v in part.items()} for part in (HEAD, CONSTANTS)]


def step(device: Device, mb: float = 0.08) -> None:
    """A call as it should be: right, the host reads one number, and nothing is copied to pageable memory."""
    inputs = there()
    device.reset()
    got = run(*inputs, EVERYTHING, backend="triton", max_scratch_mb=mb)
    assert [what for what, _ in device.syncs] == ["_local_scalar_dense"]
    assert not any("pageable" in k and n for k, n in device.log.items())
    got = {k: v.cpu() if torch.is_tensor(v) else v for k, v in got.items()}
    check_precision(got, HEAD, CONSTANTS, EVERYTHING, gemm_dtype=torch.bfloat16)


def vendor(device: Device) -> None:
    """Chunks of logits from the vendor's GEMM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "our_tile", lambda head: None)
        step(device, mb=0.15)


def captured(device: Device) -> None:
    inputs = there()
    device.reset()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(*inputs, EVERYTHING, backend="triton", max_scratch_mb=0.15)
    assert not device.syncs


MISTAKES = {  # owner, name, what stands there, and the call
    "the number of rows is read once more": (
        backend, "sets", lambda may, gradient: (int(may.sum()), sets(may, gradient))[1], step),
    "every chunk waits for its rows": (
        backend.ChunkGradients, "add_chunk", lambda *a: (a[-1].nonzero(), add(*a))[1], step),
    "the rows to compute again are counted by the host": (
        kernels, "finish_rows", lambda values, partial, V, target, marked=None, again=False: (
            finish_rows(values, partial, V, target, marked, again), marked.any().item()), step),
    "the numbers of rows are on the host": (
        backend, "sets", lambda may, gradient: [(x.cpu(), on) for x, on in sets(may, gradient)], step),
    "a count is awaited while a graph is captured": (backend, "_capturing", lambda device: False, captured),
    "logits are rounded to bf16": (
        torch, "mm", lambda a, b, out_dtype=None, out=None: mm(a, b, out_dtype=out_dtype) if out is None else (
            out.copy_(mm(a, b))), vendor),
    "a GEMM of bf16 and fp32": (backend, "dhidden", lambda dz, head: torch.mm(dz.float(), head.weight), step),
    "fp32 is added to without out_dtype": (
        gradients, "add_dweight", lambda total, dz, hidden, beta=1.0: (
            torch.addmm(total, dz.t(), hidden, beta=beta, out=total)), step),
    "beta is 1 on what nobody wrote": (
        gradients, "add_dweight", lambda total, dz, hidden, beta=1.0: add_dweight(total, dz, hidden), step),
    "a kernel gets a tensor of the host": (
        kernels, "check", lambda values, target, *_: target.set_(target.cpu()), step),
}  # fmt: skip


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> None:
    """The device's."""


@pytest.mark.parametrize("call", [step, vendor, captured])
def test_the_call_without_a_mistake(device: Device, call: Any) -> None:
    call(device)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, value, call = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, value)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        call(device)
    device.capture = None
    device.findings.clear()


def test_a_target_outside_the_vocabulary_fails_on_the_device(device: Device) -> None:
    inputs = there()
    inputs[0]["target"] = inputs[0]["target"] + 1000
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(*inputs, EVERYTHING, backend="triton")["loss"].item()
