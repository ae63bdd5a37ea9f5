"""The ways of the `triton` backend from hidden states to what the backward GEMMs read, and their scratch."""

from typing import NamedTuple

import torch

from rlplus.kernels import linear_logprob
from rlplus.kernels.tiling import Tile
from rlplus.loss.head import cost
from rlplus.loss.head.gradient_sum import gradient_dtype
from rlplus.loss.head.head import Head

LINE = 64  # buffers have a multiple of this many columns, so that rows start at multiples of 128 bytes


class Way(NamedTuple):
    """tile: of our first GEMM; None: the vendor's, to fp32 logits. exponentials, dlogits: the dtype of what the
    backward GEMMs read, one or the other; neither: without a gradient. bonus: whether rows have one of the entropy."""

    tile: Tile | None
    exponentials: torch.dtype | None = None
    dlogits: torch.dtype | None = None
    bonus: bool = False

    @property
    def path(self) -> cost.Path:
        if self.dlogits is not None:
            return cost.TWICE if self.dlogits.itemsize == 2 else cost.TWICE_FP32
        return cost.VENDOR if self.tile is None else cost.OWN


def way_of(head: Head, gradient: bool, bonus: bool = False) -> Way:
    """bonus: whether rows may have a gradient of the entropy."""
    # A weight that lies the other way would have to be copied.
    tile = our_tile(head) if head.weight.stride(1) == 1 else None
    kept = gradient and (tile is not None or head.hidden.dtype == torch.bfloat16)
    narrow = gradient_dtype(head) if gradient else None
    if kept and not (bonus and head.softcap is not None):
        return Way(tile, narrow, None, bonus)
    return Way(None if gradient else tile, None, narrow, bonus)


def our_tile(head: Head) -> Tile | None:
    """The tile of our first GEMM, for bf16 on CUDA; None: the first GEMM is the vendor's."""
    if head.hidden.dtype != torch.bfloat16 or not head.hidden.is_cuda:
        return None
    transformed = any(x is not None for x in (head.bias, head.softcap, head.row_temperature))
    return linear_logprob.default_tile(head.hidden, transformed)


def row_bytes(head: Head, way: Way) -> int:
    """Scratch of a row."""
    V, H = head.weight.shape
    wide = head.dtype.itemsize
    narrow = head.hidden.dtype.itemsize
    parts = 1 if way.tile is None else -(-V // way.tile.BLOCK_V)
    logit = wide if way.tile is None else 0
    if way.exponentials is not None:
        logit += way.exponentials.itemsize
    if way.dlogits is not None:
        logit = wide + (way.dlogits.itemsize if way.dlogits != head.dtype else 0)
    return width(head) * logit + parts * linear_logprob.PARTIALS.value * wide + H * (3 * narrow + wide)


def chunk_rows(head: Head, way: Way, scratch_bytes: float, machine: cost.Machine | None = None) -> int:
    """Rows of a chunk of the head's rows. machine: None = the device's."""
    row = row_bytes(head, way)
    if way.exponentials is None and way.dlogits is None:
        return min(cost.whole_tiles(scratch_bytes / row), max(len(head.target), 1))
    return cost.rows_of_chunk(machine or device_machine(head.hidden.device), head.shape, row, scratch_bytes, way.path)


def device_machine(device: torch.device) -> cost.Machine:
    if device.type != "cuda":
        return cost.H200
    found = torch.cuda.get_device_properties(device)
    return (cost.A100 if found.major == 8 else cost.H200)._replace(processors=found.multi_processor_count)


def width(head: Head) -> int:
    return -(-len(head.weight) // LINE) * LINE
