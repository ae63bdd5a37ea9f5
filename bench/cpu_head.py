"""CPU time, memory and accuracy of the head's backends against the bare GEMMs, in one process.

    OMP_NUM_THREADS=1 python bench/cpu_head.py [--repeats 7] [--threads 1] [--output bench/results/cpu_head.json]

Times are CPU time of the process (all threads), forward and backward through `linear_policy_loss`, every gradient
included, divided by that of the three GEMMs of the same dtype into memory that exists already: the measurements are
interleaved, the median of the ratios is given with their least and greatest. Memory is the peak of the resident set
over one call in a fresh process, less dhidden, dweight and, for bf16, one fp32 accumulator of dweight; MB = 10^6 bytes.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rlplus import linear_policy_loss
from rlplus.ops import cpp

N, H, V = 2048, 896, 32_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVE = (1.0, 0.25)


def head(dtype: torch.dtype, noise: float, margin: float) -> dict[str, Tensor]:
    """logits of standard deviation `noise`, the target's higher by `margin`."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=g) / H**0.5
    target = torch.randint(V, (N,), generator=g)
    hidden = noise * torch.randn(N, H, generator=g) + margin * weight[target]
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "target": target}


def tokens(active: float) -> dict[str, Tensor]:
    """Per-token inputs: half of the tokens external, all with an advantage, a share of them with a weight."""
    g = torch.Generator().manual_seed(1)
    return {
        "old_logprob": -2 * torch.rand(N, generator=g),
        "advantage": torch.randn(N, generator=g) + 0.01,
        "token_weight": (torch.rand(N, generator=g).argsort().argsort() < active * N) / N,
        "external": torch.rand(N, generator=g) < 0.5,
    }


def step(inputs: dict[str, Tensor], backend: str) -> Callable[[], None]:
    hidden, weight = (inputs[k].requires_grad_() for k in ("hidden", "weight"))

    def run() -> None:
        hidden.grad = weight.grad = None
        linear_policy_loss(**inputs, backend=backend).loss.backward()

    return run


def bare(inputs: dict[str, Tensor]) -> Callable[[], None]:
    hidden, weight = (inputs[k].detach() for k in ("hidden", "weight"))
    z, dhidden, dweight = hidden.new_empty(N, V), torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=z)
        torch.mm(z, weight, out=dhidden)
        torch.mm(z.t(), hidden, out=dweight)

    return run


def times(dtype: torch.dtype, backends: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of the bare GEMMs, and ratios to them, by backend and share of rows with a gradient."""
    inputs = head(dtype, 1.0, 6.0)
    runs = {"bare": bare(inputs)}
    runs |= {f"{b} {active:g}": step(inputs | tokens(active), b) for b in backends for active in ACTIVE}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if repeat:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    base = seconds.pop("bare")
    ratios = {name: [t / b for t, b in zip(values, base, strict=True)] for name, values in seconds.items()}
    spread = {name: {"median": median(r), "least": min(r), "greatest": max(r)} for name, r in ratios.items()}
    return {"bare_seconds": median(base), "ratio": spread}


def errors(dtype: torch.dtype, backends: list[str]) -> dict[str, dict[str, float]]:
    """Greatest error of a logprob against float64, and that of fp32 statistics of logits rounded to the dtype."""
    out = {}
    for name, shape in {"flat": (1.0, 0.0), "confident": (3.0, 25.0)}.items():
        inputs = head(dtype, *shape)
        hidden, weight, target = inputs.values()

        def gather(z: Tensor, target: Tensor = target) -> Tensor:
            return z.log_softmax(-1).gather(1, target[:, None]).squeeze(1).double()

        exact = torch.cat(
            [
                gather(h.double() @ weight.double().T, t)
                for h, t in zip(hidden.split(256), target.split(256), strict=True)
            ]
        )
        got = {"rounded logits": gather((hidden @ weight.T).float())}
        with torch.no_grad():
            got |= {b: linear_policy_loss(**inputs, **tokens(1.0), backend=b).logprob.double() for b in backends}
        out[name] = {k: (v - exact).abs().max().item() for k, v in got.items()}
    return out


def memory(dtype: torch.dtype, backend: str) -> float:
    """MB above the outputs at the peak of one call; for a fresh process."""
    inputs = head(dtype, 1.0, 6.0) | tokens(1.0)
    warm = {k: v[:2].clone() if v.ndim < 2 else v[:2, :64].clone() for k, v in inputs.items() if k != "weight"}
    step(warm | {"weight": torch.ones(8, 64, dtype=dtype), "target": torch.zeros(2, dtype=torch.int64)}, backend)()
    torch.mm(inputs["hidden"][:8], inputs["weight"].t())
    run = step(inputs, backend)

    def status(field: str) -> float:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) * 1024 / 1e6

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    run()
    outputs = (N * H + V * H) * dtype.itemsize + (V * H * 4 if dtype == torch.bfloat16 else 0)
    return status("VmHWM") - before - outputs / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory", nargs=2, metavar=("DTYPE", "BACKEND"), help="only the memory of one call, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        dtype, backend = arguments.memory
        sys.stdout.write(json.dumps(memory(DTYPES[dtype], backend)))
        return
    backends = ["torch", "cpp"] if cpp.load() else ["torch"]
    result: dict[str, Any] = {
        "shape": {"N": N, "H": H, "V": V}, "threads": arguments.threads, "repeats": arguments.repeats,
        "cpu": torch.backends.cpu.get_cpu_capability(), "bf16_instructions": torch.cpu._is_avx512_bf16_supported(),
        "machine": f"{platform.system()} {platform.machine()}", "torch": torch.__version__,
        "cpp_built": "cpp" in backends,
    }  # fmt: skip
    for name, dtype in DTYPES.items():
        result[name] = times(dtype, backends, arguments.repeats) | {"logprob_error": errors(dtype, backends)}
        command = [sys.executable, __file__, "--threads", str(arguments.threads), "--memory", name]
        result[name]["peak_mb"] = {
            b: json.loads(subprocess.run([*command, b], check=True, capture_output=True, text=True).stdout)
            for b in backends
        }
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
