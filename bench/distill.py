"""python -m bench.distill: time and memory of a divergence from a teacher, beside TRL's, Liger's and full logits.

Time is measured for loss and gradients, over the time of the four bare GEMMs in the same round: CPU time, or with
--device cuda between two events. Memory is the peak beyond the gradients: the growth of the resident set in a fresh
process, or what torch allocated. On a CPU Liger's scratch is computed from its code. TRL and Liger are imported where
they are installed, or from a folder in PYTHONPATH.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rlplus.common.errors import one_line
from rlplus.loss import linear_divergence
from rlplus.loss.objective.divergence import beta_of, divergence

from .__main__ import say
from .cases import DTYPES
from .measure import elapsed, keep_memory, new_peak, order_of, status_mb
from .peers import submodule

Step = Callable[[], object]
KNOWN = 32  # tokens of the teacher per row, where it is known by these


class Heads:
    """hidden (N, H) and weight (V, H) of a student, leaves, and of a teacher that is near it."""

    def __init__(self, N: int, H: int, V: int, dtype: str, kind: str, device: str = "cpu") -> None:
        g = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=g, device=device)
        hidden, weight = normal(N, H), 2 * normal(V, H) / H**0.5
        near = [x + 0.3 * x.std() * normal(x.shape) for x in (hidden, weight)]
        self.hidden, self.weight = (x.to(DTYPES[dtype]).requires_grad_() for x in (hidden, weight))
        self.teacher = (near[0].to(DTYPES[dtype]), near[1].to(DTYPES[dtype]))
        self.token_weight, self.kind = torch.full((N,), 1 / N, device=device), kind
        # All rows at once would leave memory for a method to find.
        few = self.teacher[0].split(16 if device == "cpu" else 512)
        found = [(h @ self.teacher[1].T).float().log_softmax(1).topk(KNOWN, dim=1) for h in few]
        self.topk = (torch.cat([x.indices for x in found]), torch.cat([x.values for x in found]))

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def bare(self) -> None:
        """The four GEMMs, in the inputs' dtype."""
        with torch.no_grad():
            z, t = self.hidden @ self.weight.T, self.teacher[0] @ self.teacher[1].T
            torch.mm(t, self.weight)
            torch.mm(z.T, self.hidden)

    def ours(self, backend: str, max_scratch_mb: float | None) -> None:
        options: dict[str, Any] = {"kind": self.kind, "max_scratch_mb": max_scratch_mb, "backend": backend}
        linear_divergence(
            self.hidden, self.weight, *self.teacher, token_weight=self.token_weight, **options
        ).loss.backward()

    def known(self) -> None:
        """From the teacher's likeliest tokens: without its GEMM, the second of the four bare ones."""
        options: dict[str, Any] = {"kind": self.kind, "backend": "torch", "teacher_topk": self.topk}
        linear_divergence(self.hidden, self.weight, token_weight=self.token_weight, **options).loss.backward()

    def full(self) -> None:
        logp, logq = (
            (hidden @ weight.T).float().log_softmax(1) for hidden, weight in ((self.hidden, self.weight), self.teacher)
        )
        (self.token_weight * divergence(logp, logq, beta_of(self.kind, None))).sum().backward()

    def trl(self) -> None:
        """The kernel of its DistillationTrainer, with its own sizes of chunks."""
        nothing = {"maybe_gather_lm_head_ctx": lambda *_: nullcontext()}  # gathers under ZeRO-3 only
        is_there = {"is_triton_available": lambda: find_spec("triton") is not None}
        stand_ins: dict[str, dict[str, Any]] = {
            "transformers": {},
            "transformers__utils": is_there,
            "trl__trainer__utils": nothing,
        }
        module = submodule("trl.kernels.chunked_divergence", "trl", "trl.trainer", **stand_ins)
        apply = module.ChunkedDivergenceFunction.apply
        teacher = (*self.teacher, None)
        values: Tensor = apply(self.hidden, self.weight, None, *teacher, beta_of(self.kind, None))[0]
        (self.token_weight * values).sum().backward()

    def liger(self) -> None:
        """Its jsd has the student's beta where ours has the teacher's; both KLs are its ends."""
        module = import_module("liger_kernel.transformers")
        beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[self.kind]
        loss = module.LigerFusedLinearJSD(jsd_beta=beta, accum_dtype=torch.float32)
        loss(self.hidden, self.weight, *self.teacher, None).backward()


METHODS: dict[str, Callable[[Heads], Step]] = {
    "four bare GEMMs": lambda x: x.bare,
    "torch": lambda x: partial(x.ours, "torch", None),
    "torch 40 MB": lambda x: partial(x.ours, "torch", 40.0),
    f"top {KNOWN}": lambda x: x.known,
    "full logits": lambda x: x.full,
    "TRL": lambda x: x.trl,
}
ON_CUDA: dict[str, Callable[[Heads], Step]] = METHODS | {
    "triton": lambda x: partial(x.ours, "triton", None),
    "triton 320 MB": lambda x: partial(x.ours, "triton", 320.0),
    "Liger": lambda x: x.liger,
}
del ON_CUDA["torch 40 MB"]
PEERS = ("TRL", "Liger")


def liger_mb(N: int, H: int, V: int) -> float:
    """Scratch of liger-kernel 0.8.5's fused JSD before Blackwell: six fp32 buffers of a chunk, by its code."""
    chunk = min(N, 1 << (-(-N // -(-V // H)) - 1).bit_length())
    return 6 * 4 * chunk * V / 1e6


def peak(method: str, heads: Heads, small: Heads) -> float:
    """MB, for a fresh process."""
    METHODS[method](small)()  # libraries load before
    torch.mm(heads.hidden[:8].detach(), heads.weight.detach().T)
    before = new_peak()
    METHODS[method](heads)()
    return status_mb("VmHWM") - before - gradient_mb(heads)


def peak_on_cuda(step: Step, heads: Heads) -> float:
    heads.clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e6 - gradient_mb(heads)


def gradient_mb(heads: Heads) -> float:
    made = (x for x in (heads.hidden, heads.weight) if x.grad is not None)
    return sum(x.numel() * x.element_size() for x in made) / 1e6


def take_turns(steps: dict[str, Step], heads: Heads, rounds: int, cuda: bool) -> dict[str, list[float]]:
    """ms of each step in each round; a peer that cannot be imported or fails is left out, with its reason."""
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        if turn == 1:  # the first round loads what is loaded once
            times.clear()
        for name, step in [list(steps.items())[i] for i in order_of(turn, len(steps))]:
            heads.clear()
            try:
                times.setdefault(name, []).append(elapsed(step, cuda))
            except (ImportError, RuntimeError, AttributeError) as error:
                if name not in PEERS:
                    raise
                say(f"{name}: not measured: {one_line(error)}")
                del steps[name]
                times.pop(name, None)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.distill", description=__doc__)
    for name, default in (("tokens", 512), ("hidden", 448), ("vocabulary", 16_000), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--kind", choices=("reverse_kl", "forward_kl", "jsd"), default="reverse_kl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory-of", choices=tuple(METHODS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no CUDA device")
    torch.set_num_threads(1)
    sizes = (options.tokens, options.hidden, options.vocabulary)
    heads = Heads(*sizes, options.dtype, options.kind, options.device)
    if options.memory_of:
        say(f"{peak(options.memory_of, heads, Heads(16, 64, 64, options.dtype, options.kind)):.1f}")
        return
    if not cuda:
        keep_memory(10 * 4 * options.tokens * options.vocabulary)
    steps = {name: method(heads) for name, method in (ON_CUDA if cuda else METHODS).items()}
    times = take_turns(steps, heads, options.rounds, cuda)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if cuda else "one thread"
    say(f"{options.kind}, {options.dtype}, N={sizes[0]}, H={sizes[1]}, V={sizes[2]}, {where}")
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, times["four bare GEMMs"], strict=True)]
        if cuda:
            memory = f"{peak_on_cuda(steps[name], heads):.1f}"
        else:
            command = [sys.executable, "-m", "bench.distill", *sys.argv[1:], "--memory-of", name]
            memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
        ms = f"{median(taken):8.2f} ms " if cuda else ""
        say(f"{name:16} {ms}{median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})  {memory} MB")
    if not cuda:
        say(f"Liger's fused JSD, computed: {liger_mb(*sizes):.1f} MB of logits in chunks; no time, it needs a GPU")


if __name__ == "__main__":
    main()
