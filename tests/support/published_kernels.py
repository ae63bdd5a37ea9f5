"""The error of kernel_estimate.py: its time of kernels of others, beside the time that was published for them.

    python tests/support/published_kernels.py [NAME...]

Each kernel is imported from its package, which PYTHONPATH must have; one that cannot be imported is named. The GPU
was not here: the times are their authors', of whole calls.
"""

import argparse
import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_estimate import CLOCK, row_seconds, tile_seconds
from kernel_table import Compiled, compiling, resources

from rlplus.loss.head.cost import A100, H200

# 3.35 TB/s instead of 4.8, of which the cost model takes 7/8.
H100 = H200._replace(bandwidth=H200.bandwidth * 3.35 / 4.8)


class Published(NamedTuple):
    """milliseconds: of the call that `launch` compiles the kernel of; estimate: seconds, from the compiled kernel."""

    gpu: str
    arch: int
    milliseconds: float
    source: str
    launch: Callable[[], Any]
    estimate: Callable[[Compiled], float]


def liger_cross_entropy() -> None:
    """Loss and gradient of fp32 logits in place, 0.2.1."""
    ops = importlib.import_module("liger_kernel.ops.cross_entropy")
    x, y, loss = torch.empty(2, 131_072), torch.zeros(2, dtype=torch.int64), torch.empty(2)
    sizes = (x.shape[1], 2, -100)
    block = min(ops.MAX_FUSED_SIZE, x.shape[1])
    ops.liger_cross_entropy_kernel[(2,)](
        x, x.stride(0), y, 1, loss, 1, *sizes, BLOCK_SIZE=block, num_warps=32)  # fmt: skip


def liger_tvd() -> None:
    """Distance and gradient of fp32 probabilities."""
    ops = importlib.import_module("liger_kernel.ops.tvd")
    p, q = torch.empty(2, 131_072), torch.empty(2, 131_072)
    ops.tv_distance_forward_triton(p, q, None, "batchmean", -100, False)


def cce_forward() -> None:
    """Logprobs of Gemma 2 2B, with its softcap, and the mean logits that its backward pass sorts by."""
    ops = importlib.import_module("cut_cross_entropy.cce_lse_forward")
    e, c = (torch.empty(n, 2304, dtype=torch.bfloat16) for n in (8192, 256_000))
    ops.cce_lse_forward_kernel(e, c, softcap=30.0, return_logit_avg=True)


def of_rows(machine: Any, clock: float, n: int, V: int) -> Callable[[Compiled], float]:
    def seconds(compiled: Compiled) -> float:
        block = compiled.blocks["BLOCK_SIZE"]
        _, work = resources(compiled.kernel, block / (32 * compiled.warps))
        return n * V * max(row_seconds(work, machine, clock, block, V))

    return seconds


def of_tiles(machine: Any, clock: float, shape: tuple[int, int, int]) -> Callable[[Compiled], float]:
    def seconds(compiled: Compiled) -> float:
        (n, V, H), blocks = shape, compiled.blocks
        _, work = resources(compiled.kernel, blocks["BLOCK_B"] * blocks["BLOCK_V"] / (32 * compiled.warps))
        steps, end = tile_seconds(work, machine, clock, blocks["BLOCK_D"], H)
        return n * V * (max(steps) + max(end))

    return seconds


LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv"
PUBLISHED = {
    "Liger 0.2.1, cross-entropy, 16384 x 131072 fp32": Published(
        "A100-SXM4-80GB", 80, 15.009, f"{LIGER}, 2024-09-03", liger_cross_entropy,
        of_rows(A100, CLOCK["A100"], 16_384, 131_072)),
    "Liger, total variation, 16384 x 131072 fp32": Published(
        "H100 80GB HBM3", 90, 8.501, f"{LIGER}, 2026-03-03", liger_tvd, of_rows(H100, CLOCK["H200"], 16_384, 131_072)),
    "CCE, forward, 8192 x 2304 x 256000 bf16": Published(
        "A100-SXM4", 80, 46.4, "github.com/apple/ml-cross-entropy, README.md", cce_forward,
        of_tiles(A100, CLOCK["A100"], (8192, 256_000, 2304))),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the estimate with published times of kernels of others.")
    parser.add_argument("names", nargs="*", help=f"of {list(PUBLISHED)}; default: all")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in parser.parse_args().names or PUBLISHED:
            one = PUBLISHED[name]
            try:
                with compiling(one.arch) as compiled:
                    one.launch()
            except (ImportError, AttributeError) as error:
                print(f"{name}: not here ({error})")
                continue
            got = 1e3 * one.estimate(compiled[0])
            print(f"{name}, {one.gpu}: {got:.1f} ms by the estimate, {one.milliseconds} published, "
                  f"{100 * (got / one.milliseconds - 1):+.0f} % ({one.source})")  # fmt: skip


if __name__ == "__main__":
    main()
