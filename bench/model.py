"""The cost model's table: time of loss and gradients divided by time of the bare GEMMs, for GPUs not present here.

"floor": a GEMM hides all of its memory traffic; "half": half of the shorter of multiplications and traffic shows. With
"waves" the last tiles of a GEMM's result leave processors idle, if the vendor takes tiles of 128 x 256.
"""

from typing import Any

import torch

from rlplus.kernels.tiling import DEFAULT, TILES, Tiling
from rlplus.loss import cost
from rlplus.loss.backends.triton import plan
from rlplus.loss.head import Head

SHAPE = cost.Shape(N=16_384, H=3584, V=151_936)  # Qwen2.5-7B
MACHINES = {"A100": cost.A100, "H200": cost.H200}
SCRATCH_MB = (1250, 320, 160)
SHARES = (0.5, 0.25)
BARS = {1250: 1.08, 320: 1.35}

# Optimisations: how each was before, as arguments of `cost.one_pass`.
CHANGES: dict[str, dict[str, Any]] = {
    "the factor of the backward pass read on the device": {"scaling": 16},
    "the bookkeeping of a chunk's rows in one kernel": {"launches": cost.Launches(chunk=23)},
}

# Ways to the logits, for bf16 inputs; the last two with the tile that stores, if it is as fast as the vendor's GEMM.
PATHS = {
    "the vendor's GEMM, fp32 logits": cost.VENDOR,
    "our GEMM, fp32 logits": cost.OWN,
    "our GEMM, two-byte exponentials": cost.EXPONENTIALS,
}


def bare(machine: cost.Machine, shape: cost.Shape = SHAPE) -> float:
    """Seconds of the three GEMMs' multiplications."""
    return 6 * shape.N * shape.H * shape.V / machine.half


def sizes(
    mb: float, machine: cost.Machine, shape: cost.Shape = SHAPE, path: cost.Path = cost.VENDOR
) -> tuple[int, int]:
    """Rows of a chunk and of the gradient buffer, as the backend chooses them for bf16 on that machine."""
    hidden, weight = (torch.empty(n, shape.H, dtype=torch.bfloat16, device="meta") for n in (shape.N, shape.V))
    target = torch.empty(shape.N, dtype=torch.int64, device="meta")
    tile = TILES[8 if machine.half == cost.A100.half else 9][1]
    tilings = {
        cost.VENDOR: DEFAULT,
        cost.OWN: Tiling(loss=tile),
        cost.EXPONENTIALS: Tiling(loss=tile, exponentials=tile),
    }
    tiling = tilings[path]
    return plan(Head(hidden, weight, None, target, 1.0), mb * 1e6, gradient=True, tiling=tiling, machine=machine)


def ratio(machine: cost.Machine, rows: int, capacity: int, waves: bool = False, **options: Any) -> float:
    """The modelled time divided by the bare GEMMs' time."""
    machine = machine if waves else machine._replace(processors=0)
    return sum(cost.one_pass(machine, SHAPE, rows, capacity, **options).values()) / bare(machine)


def table() -> str:
    head = ("scratch MB", "rows with a gradient", "GPU", "rows of a chunk x chunks", "emptyings", "floor", "half",
            "half, waves", "bar")  # fmt: skip
    lines = [head, tuple("---" for _ in head)]
    for mb, share in [(mb, 1.0) for mb in SCRATCH_MB] + [(SCRATCH_MB[0], share) for share in SHARES]:
        for name, machine in MACHINES.items():
            rows, capacity = sizes(mb, machine)
            values = [
                ratio(machine, rows, capacity, waves, share=share, exposed=exposed)
                for exposed, waves in ((0.0, False), (0.5, False), (0.5, True))
            ]
            chunks, emptyings = -(-SHAPE.N // rows), -(-round(share * SHAPE.N) // capacity)
            bar = str(BARS.get(mb, "")) if share == 1 else ""
            cells = (str(mb), f"{share:.0%}", name, f"{rows} x {chunks}", f"{capacity} x {emptyings}")
            lines.append((*cells, *(f"{value:.2f}" for value in values), bar))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def worth() -> str:
    """The reduction of the floor by each change, in per cent of the bare GEMMs."""
    head = ("change", *(f"{name}, {mb} MB" for name in MACHINES for mb in SCRATCH_MB))
    lines = [head, tuple("---" for _ in head)]
    for change, before in CHANGES.items():
        cells = []
        for machine in MACHINES.values():
            for mb in SCRATCH_MB:
                now = sizes(mb, machine)
                cells.append(ratio(machine, *now, exposed=0.0, **before) - ratio(machine, *now, exposed=0.0))
        lines.append((change, *(f"{100 * cell:.1f}" for cell in cells)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paths() -> str:
    """The way to the logits: rows of a chunk and of the gradient buffer, and the ratio from floor to half."""
    head = ("logits", *(f"{name}, {mb} MB" for name in MACHINES for mb in SCRATCH_MB[:2]))
    lines = [head, tuple("---" for _ in head)]
    for name, path in PATHS.items():
        cells = []
        for machine in MACHINES.values():
            for mb in SCRATCH_MB[:2]:
                rows, capacity = sizes(mb, machine, path=path)
                floor, half = (ratio(machine, rows, capacity, exposed=x, path=path) for x in (0.0, 0.5))
                cells.append(f"{rows}, {capacity}: {floor:.2f}–{half:.2f}")
        lines.append((name, *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
