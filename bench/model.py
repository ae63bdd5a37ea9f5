"""The cost model's tables: time of loss and gradients divided by time of the bare GEMMs, for GPUs not present here.

"floor": a GEMM hides all of its memory traffic; "half": half of the shorter of multiplications and traffic shows. With
"waves" the last tiles of a GEMM's result leave processors idle, if the vendor takes tiles of 128 x 256. Our own first
GEMM is taken to be a tenth slower than the vendor's, and its epilogue to be hidden by nothing.
"""

from typing import Any

import torch

from rlplus.kernels.tiling import TILES
from rlplus.loss.backends.ways import Way, chunk_rows
from rlplus.loss.head import cost
from rlplus.loss.head.head import Head

SHAPE = cost.Shape(N=16_384, H=3584, V=151_936)  # Qwen2.5-7B
NARROW = SHAPE._replace(H=1024)
MACHINES = {"A100": cost.A100, "H200": cost.H200}
SCRATCH_MB = (1250, 320, 160)
SHARES = (0.5, 0.25)
BARS = {("A100", 1250): 1.05, ("H200", 1250): 1.06, ("A100", 320): 1.12, ("H200", 320): 1.12}

# Ways from hidden states to what the backward GEMMs read, for bf16 inputs.
PATHS = {
    "fp32 logits, read twice": cost.TWICE,
    "fp32 logits, read once": cost.VENDOR,
    "exponentials by our GEMM": cost.OWN,
}


def bare(machine: cost.Machine, shape: cost.Shape = SHAPE) -> float:
    """Seconds of the three GEMMs' multiplications."""
    return 6 * shape.N * shape.H * shape.V / machine.half


def rows_of(
    mb: float, machine: cost.Machine, shape: cost.Shape = SHAPE, path: cost.Path = cost.OWN, share: float = 1.0
) -> int:
    """Rows of a chunk, as the backend chooses them on that machine."""
    n, dtype = round(share * shape.N), torch.float16 if path is cost.TWICE else torch.bfloat16
    hidden, weight = (torch.empty(k, shape.H, dtype=dtype, device="meta") for k in (n, shape.V))
    head = Head(hidden, weight, None, torch.empty(n, dtype=torch.int64, device="meta"), 1.0)
    tile = TILES[8 if machine.half == cost.A100.half else 9][0] if path.ours else None
    way = Way(None, dlogits=dtype) if path is cost.TWICE else Way(tile, dtype)
    return chunk_rows(head, way, mb * 1e6, machine)


def ratio(machine: cost.Machine, rows: int, shape: cost.Shape = SHAPE, waves: bool = False, **options: Any) -> float:
    """The modelled time divided by the bare GEMMs' time."""
    machine = machine if waves else machine._replace(processors=0)
    return sum(cost.one_pass(machine, shape, rows, **options).values()) / bare(machine, shape)


def _lines(*rows: tuple[str, ...]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rest))


def table() -> str:
    head = ("H", "scratch MB", "rows with a gradient", "GPU", "rows of a chunk x chunks", "floor", "half",
            "half, waves", "bar")  # fmt: skip
    cases = [(SHAPE, mb, 1.0) for mb in SCRATCH_MB] + [(SHAPE, SCRATCH_MB[0], share) for share in SHARES]
    lines: list[tuple[str, ...]] = [head]
    for shape, mb, share in [*cases, (NARROW, SCRATCH_MB[0], 1.0)]:
        for name, machine in MACHINES.items():
            rows = rows_of(mb, machine, shape, share=share)
            values = [
                ratio(machine, rows, shape, waves, share=share, exposed=exposed)
                for exposed, waves in ((0.0, False), (0.5, False), (0.5, True))
            ]
            chunks = -(-round(share * shape.N) // rows)
            bar = 1.12 if shape is NARROW else BARS.get((name, mb), "")
            cells = (str(shape.H), str(mb), f"{share:.0%}", name, f"{rows} x {chunks}")
            lines.append((*cells, *(f"{value:.2f}" for value in values), str(bar) if share == 1 else ""))
    return _lines(*lines)


def parts() -> str:
    """Where the time over the bare GEMMs goes, in per cent of these, by the floor."""
    machines = [(name, machine, mb) for name, machine in MACHINES.items() for mb in SCRATCH_MB[:2]]
    found = [
        cost.one_pass(machine._replace(processors=0), SHAPE, rows_of(mb, machine), exposed=0.0)
        for _, machine, mb in machines
    ]
    lines = [("part", *(f"{name}, {mb} MB" for name, _, mb in machines))]
    for part in found[0]:
        shares = [
            100 * (seconds[part] / bare(machine)) for seconds, (_, machine, _) in zip(found, machines, strict=True)
        ]
        lines.append((part, *(f"{share:.1f}" for share in shares)))
    return _lines(*lines)


def paths() -> str:
    """The way: rows of a chunk, and the ratio from floor to half."""
    lines = [("way", *(f"{name}, {mb} MB" for name in MACHINES for mb in SCRATCH_MB[:2]))]
    for name, path in PATHS.items():
        cells = []
        for machine in MACHINES.values():
            for mb in SCRATCH_MB[:2]:
                rows = rows_of(mb, machine, path=path)
                floor, half = (ratio(machine, rows, exposed=x, path=path) for x in (0.0, 0.5))
                cells.append(f"{rows}: {floor:.2f}–{half:.2f}")
        lines.append((name, *cells))
    return _lines(*lines)
