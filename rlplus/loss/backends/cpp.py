"""The `cpp` backend: the one pass of `chunked` on the CPU, with the native kernels in csrc/.

One buffer (rows, V) of fp32 holds a chunk's logits and, in the place of rows without a gradient, the gradients of the
chunks before it. When little room is left, the two backward GEMMs process all of them at once: they stay large even if
few rows of a chunk have a gradient. Between the two row kernels the objective is `token_loss` itself.

fp32 and fp16 inputs: GEMMs and gradient rows in fp32. bf16 inputs: bf16 GEMMs that accumulate in fp32; the logits stay
fp32 (torch's oneDNN kernel returns them so), their gradient is rounded to bf16 once. If that kernel or the
instructions are missing, or H is odd, bf16 inputs take the path of fp16, which is as exact but slower.

Scratch: rows = min(CHUNK_ROWS, max_scratch_mb * 10^6 / (4 V)). Every chunk's GEMMs read and pack the whole weight.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplus.loss import MISMATCH_STATS, STATS, Objective, TokenConstants, token_loss
from rlplus.loss.head import (
    Gradients,
    Head,
    RunningStatistics,
    Statistics,
    add_dweight,
    dhidden,
    logits_into,
)

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parents[2] / "_C.so"
FUNCTIONS = ("row_statistics", "row_gradient", "logits_bf16", "dweight_bf16", "may_be_reclaimed", "draw", "interface_5")
CHUNK_ROWS = {torch.float32: 2048, torch.bfloat16: 512, torch.float16: 2048}  # the tiles of bf16 are made for 512
DTYPES = tuple(CHUNK_ROWS)
PACKED_BYTES = 2**18  # bytes of weight at a time, for the bf16 GEMM: half of a second-level cache
# Shapes of the bf16 GEMM, each compiled at its first use: few of them, and tiles that fit the caches.
PANEL_ROWS = 64
GRADIENT_COLUMNS = 128  # columns of dz that are transposed at a time
GRADIENT_WIDTH = 448  # columns of hidden at a time: with 512 rows half of a second-level cache
DEPTH_STEP = 64  # rows of dz are filled up with zeros to a multiple of it
DEPTH = 32  # bf16 values in a row of an AMX tile, as in csrc/rows.cpp

Slopes = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""rows, logprob (n,), entropy (n,) -> dlogprob (n,), dentropy (n,) or None."""


@cache
def load() -> ctypes.CDLL | None:
    """The native library; None, with the reason logged once, if it was not built or does not load."""
    try:
        library = ctypes.CDLL(str(LIBRARY))  # torch is loaded: they share its OpenMP
        for name in FUNCTIONS:
            getattr(library, f"rlplus_{name}").restype = None
        library.rlplus_gemm_works.restype = ctypes.c_int
    except (OSError, AttributeError) as error:  # missing, or another version
        logger.info("backend 'cpp' is not available, 'auto' is 'torch' on the CPU too: %s", error)
        return None
    return library


def check(device: str, dtype: torch.dtype) -> None:
    """ValueError unless this backend can process tensors of that device type and dtype here."""
    if load() is None:
        raise ValueError(
            f"want backend 'cpp' built: {LIBRARY} is missing or does not load; "
            "install a C++ compiler and run RLPLUS_EXT=1 pip install -e . (or make setup)"
        )
    if device != "cpu" or dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(
            f"want CPU tensors of {names} for backend 'cpp'; got {str(dtype).removeprefix('torch.')} on {device}"
        )


@cache
def _torch_gemm() -> tuple[ctypes.c_void_p, ctypes.c_void_p] | None:
    """torch's GEMM from bf16 to fp32 and its clean-up; None if torch or the CPU has none.

    Not a public function, so it is looked up by its C++ name, which encodes the types of its arguments: a torch in
    which they differ does not have it.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    names = "brgemmEllllllbPKN3c108BFloat16ES5_Pfb", "brgemm_releaseEb"
    try:
        gemm, release = (getattr(library, f"_ZN2at6native7cpublas{i}{n}") for i, n in zip((6, 14), names, strict=True))
    except AttributeError:
        logger.info("this torch has no bf16 GEMM with fp32 results; bf16 inputs are widened to fp32")
        return None
    return ctypes.cast(gemm, ctypes.c_void_p), ctypes.cast(release, ctypes.c_void_p)


def policy_loss(
    head: Head,
    constants: TokenConstants,
    objective: Objective,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """-> loss (0-d), logprob (N,), entropy (N,), stats (S,), gradients of hidden, weight and bias where needed.

    With `weight_grad` (V, H) fp32, the gradient of weight is added there.
    """
    names = STATS if constants.engine_logprob is None else STATS + MISMATCH_STATS
    loss, stats = head.hidden.new_zeros((), dtype=head.dtype), head.hidden.new_zeros(len(names), dtype=head.dtype)

    def slopes(rows: slice, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        part = constants.rows(rows)
        out = token_loss(logprob, entropy, part, objective)
        loss.add_(out.loss)
        stats.add_(torch.stack(list(out.stats.values())))
        return out.dlogprob, out.dentropy if objective.entropy_coef else None

    one = _OnePass(head, scratch_bytes, needs, weight_grad)
    one.run(slopes)
    return loss, one.logprob, one.entropy, stats, one.finish()


def logprob(head: Head, scratch_bytes: float) -> tuple[Tensor, Tensor]:
    """-> logprob (N,), entropy (N,)."""
    one = _OnePass(head, scratch_bytes, [False] * 3)
    one.run(None)
    return one.logprob, one.entropy


def logprob_backward(
    head: Head,
    dlogprob: Tensor,
    dentropy: Tensor,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(dlogprob * logprob + dentropy * entropy), as in `policy_loss`; recomputes the logits."""
    one = _OnePass(head, scratch_bytes, needs, weight_grad)
    one.run(lambda rows, *_: (dlogprob[rows], dentropy[rows]))
    return one.finish()


class _OnePass:
    """The chunk buffer, the gradient rows that wait at its front, and the outputs."""

    def __init__(self, head: Head, scratch_bytes: float, needs: list[bool], weight_grad: Tensor | None = None) -> None:
        N, V = len(head.target), len(head.weight)
        rows = max(1, min(N, CHUNK_ROWS[head.hidden.dtype], int(scratch_bytes // (4 * V))))
        self.library, self.weight_grad = native(), weight_grad
        self.head = head._replace(hidden=dense(head.hidden), weight=dense(head.weight), target=head.target.contiguous())
        self.bias = wide_bias(head)
        self.gemm = gemm_of(head)
        self.needs = [needs[0], needs[1] or weight_grad is not None, needs[2]]
        # Not dweight: its first term is written, not added to zeros.
        self.grads = Gradients.zeros(head, [needs[0], False, needs[2]])
        shape = head.weight.shape if self.needs[1] else torch.Size([0])
        own = shape.numel() if self.gemm and weight_grad is None else 0
        self.scratch = take_scratch(rows * V + own)
        self.buffer = self.scratch[: rows * V].view(rows, V)
        # dweight of bf16 inputs accumulates in fp32 and is rounded into this buffer.
        self.rounded = head.hidden.new_empty(shape if own else (0,))
        if weight_grad is not None:
            self.dweight = weight_grad
        elif self.gemm is None:
            self.dweight = head.hidden.new_empty(shape, dtype=torch.float32)
        else:
            self.dweight = self.scratch[rows * V :][:own].view(shape)
        self.started = weight_grad is not None  # whether dweight has its first term
        self.logprob, self.entropy = (head.hidden.new_empty(N, dtype=torch.float32) for _ in range(2))
        self.waiting = head.target[:0]  # the tokens whose gradient rows are at the front of the buffer

    def run(self, slopes: Slopes | None) -> None:
        start, N, rows = 0, len(self.logprob), len(self.buffer)
        while start < N:
            if 4 * (rows - len(self.waiting)) < rows:
                self._multiply(last=False)
            filled = len(self.waiting)
            part = slice(start, min(N, start + rows - filled))
            z = self.buffer[filled : filled + part.stop - start]
            head = self.head.rows(part)
            fill_logits(head, self.gemm, z)
            statistics = row_statistics(z, head, self.bias)
            self.logprob[part], self.entropy[part] = statistics[:, 2], statistics[:, 3]
            if slopes is not None:
                slope = slopes(part, self.logprob[part], self.entropy[part])
                if any(self.needs):
                    self._gradient(part, z, statistics, *slope)
            start = part.stop
        if any(self.needs):
            self._multiply(last=True)
        self.library.rlplus_may_be_reclaimed(pointer(self.scratch), int64(self.scratch.nbytes))
        kept_scratch[:] = [self.scratch]

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        dweight = self.dweight if self.gemm is None else self.rounded
        return self.grads._replace(weight=dweight).finish(self.head, self.weight_grad)

    def _gradient(self, rows: slice, z: Tensor, statistics: Tensor, dlogprob: Tensor, dentropy: Tensor | None) -> None:
        """Write the gradients of the rows that have one to the front of z."""
        active = dlogprob != 0
        if dentropy is not None:
            active |= dentropy != 0
        source = _slots(active)
        _row_gradient(z, source, self.head.rows(rows), self.bias, statistics, dlogprob, dentropy, self.gemm is not None)
        self.waiting = torch.cat([self.waiting, source + rows.start])

    def _multiply(self, last: bool) -> None:
        """Add the contributions of the waiting rows, if any, to the gradients of hidden, weight and bias."""
        index, dz = self.waiting, self.buffer[: len(self.waiting)]
        self.waiting = index[:0]
        if self.gemm is not None:
            dz = dz.view(torch.bfloat16)[:, : dz.shape[1]]
        if self.needs[0]:
            self.grads.hidden[index] = _dhidden(dz, self.head).to(self.head.hidden.dtype)
        if self.needs[1]:
            self._add_dweight(dz, self.head.hidden[index], last)
        if self.needs[2]:
            self.grads.bias.add_(dz.sum(0, dtype=torch.float32))

    def _add_dweight(self, dz: Tensor, hidden: Tensor, last: bool) -> None:
        first, self.started = not self.started, True
        if self.gemm is None:
            if first:
                torch.mm(dz.t(), hidden.to(dz.dtype), out=self.dweight)
            else:
                add_dweight(self.dweight, dz, hidden)
            return
        last = last and self.weight_grad is None  # then the sum is rounded to `rounded`, and not kept
        n = len(hidden)
        depth = max(1, -(-n // DEPTH_STEP)) * DEPTH_STEP
        self.library.rlplus_dweight_bf16(
            *self.gemm, pointer(dz), int64(dz.stride(0)), pointer(hidden), int64(n), int64(depth),
            *map(int64, reversed(self.head.weight.shape)), pointer(self.dweight), pointer(self.rounded),
            *map(int64, (GRADIENT_COLUMNS, PANEL_ROWS, GRADIENT_WIDTH)), int(first), int(last), torch.get_num_threads(),
        )  # fmt: skip


def native() -> ctypes.CDLL:
    library = load()
    assert library is not None, "`choose` has checked that the library is there"
    return library


def gemm_of(head: Head) -> tuple[ctypes.c_void_p, ctypes.c_void_p] | None:
    """The GEMM for these inputs; None where they are multiplied in fp32."""
    if head.hidden.dtype != torch.bfloat16 or head.hidden.shape[1] % 2 or (gemm := _torch_gemm()) is None:
        return None
    # Asked every time: torch.backends.mkldnn can be switched off, as DNNL_MAX_CPU_ISA can.
    return gemm if native().rlplus_gemm_works(*gemm) else None


def fill_logits(head: Head, gemm: tuple[ctypes.c_void_p, ctypes.c_void_p] | None, z: Tensor) -> Tensor:
    """Written to z (n, V); hidden and weight `dense` where a GEMM is given."""
    if gemm is None:
        return logits_into(head, z)
    hidden, weight = head.hidden, head.weight
    V, H = weight.shape
    columns = max(32, min(256, PACKED_BYTES // (2 * H) // 32 * 32))
    native().rlplus_logits_bf16(
        *gemm, pointer(hidden), int64(hidden.stride(0)), pointer(weight), int64(weight.stride(0)),
        int64(len(hidden)), int64(H), int64(V), pointer(z), int64(columns), int64(PANEL_ROWS),
        torch.get_num_threads(),
    )  # fmt: skip
    return z


def cap_of(head: Head) -> ctypes.c_float:
    """The bound of z + bias; the softcap bounds (z + bias) / temperature."""
    return ctypes.c_float(0 if head.softcap is None else head.softcap * head.temperature)


def inverse_temperature(head: Head) -> Tensor:
    """1 / temperature (n,), fp32, of each row."""
    inverse = torch.full((len(head.target),), 1 / head.temperature, dtype=torch.float32)
    return inverse if head.row_temperature is None else inverse / head.row_temperature


def row_statistics(z: Tensor, head: Head, bias: Tensor | None) -> Tensor:
    """(n, 4): max of z + bias, capped, sum of exponentials without the largest, logprob, entropy; bias fp32."""
    out, inverse = z.new_empty(len(z), 4), inverse_temperature(head)
    native().rlplus_row_statistics(
        pointer(z), pointer(bias), pointer(head.target), int64(len(z)), int64(z.shape[1]),
        pointer(inverse), cap_of(head), pointer(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _row_gradient(
    z: Tensor, source: Tensor, head: Head, bias: Tensor | None, statistics: Tensor, dlogprob: Tensor,
    dentropy: Tensor | None, narrow: bool,
) -> None:  # fmt: skip
    """Row s of z becomes the gradient of row source[s], fp32 or, in the front half of the row's memory, bf16.

    DEPTH - 1 zeros follow a bf16 row, as far as its memory has room.
    """
    dlogprob, dentropy = dlogprob.contiguous(), None if dentropy is None else dentropy.contiguous()
    inverse = inverse_temperature(head)
    native().rlplus_row_gradient(
        pointer(z), pointer(bias), pointer(source), int64(len(source)), int64(z.shape[1]), pointer(head.target),
        pointer(inverse), cap_of(head), pointer(statistics), pointer(dlogprob), pointer(dentropy),
        int(narrow), torch.get_num_threads(),
    )  # fmt: skip


# ---- a block of the vocabulary, for rlplus.loss.backends.least

OVERWRITES = False


def scratch_per_logit(dtype: torch.dtype, device: str, capped: bool = False) -> int:
    """One buffer: the gradient overwrites the logits."""
    return torch.promote_types(dtype, torch.float32).itemsize


def block_logits(head: Head) -> Tensor:
    head = head._replace(hidden=dense(head.hidden), weight=dense(head.weight))
    z = head.hidden.new_empty(len(head.hidden), len(head.weight), dtype=torch.float32)
    return fill_logits(head, gemm_of(head), z)


def block_statistics(head: Head, z: Tensor) -> Statistics:
    top, rest, logprob, entropy = row_statistics(z, head, wide_bias(head)).unbind(1)
    return Statistics(top / head.divisor, rest.log1p(), logprob, entropy)


def running_statistics(head: Head) -> RunningStatistics:
    return RunningStatistics(head, block_statistics)


def known_rows(head: Head, rows: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
    known = torch.stack([rows.reference * head.divisor, rows.logsum.expm1(), rows.logprob, rows.entropy], 1)
    return torch.arange(len(known)), known, dlogprob, dentropy


def block_gradient(head: Head, z: Tensor, known: tuple[Any, ...]) -> Tensor:
    """In fp32, as its products are: a product of bf16 matrices is rounded to bf16, and blocks are added up."""
    source, statistics, dlogprob, dentropy = known
    _row_gradient(z, source, head, wide_bias(head), statistics, dlogprob, dentropy, narrow=False)
    return z


def add_dhidden(total: Tensor, dz: Tensor, head: Head) -> None:
    total += _dhidden(dz, head)


def _dhidden(dz: Tensor, head: Head) -> Tensor:
    if dz.dtype != head.weight.dtype:
        return dhidden(dz, head)
    # The vendor's kernel for AMX may read up to DEPTH - 1 values past a row. `_row_gradient` leaves zeros there where
    # the row's memory, V fp32 logits, has room for them.
    V = dz.shape[1]
    return torch.mm(dz if V >= DEPTH - 1 else torch.nn.functional.pad(dz, (0, DEPTH - V))[:, :V], head.weight)


def wide_bias(head: Head) -> Tensor | None:
    return None if head.bias is None else head.bias.to(torch.float32).contiguous()


kept_scratch: list[Tensor] = []


def take_scratch(size: int) -> Tensor:
    """Uninitialised fp32 memory, an earlier call's if it is large enough.

    The first touch of fresh memory would take a tenth of a bf16 pass. Memory kept between calls is marked MADV_FREE, so
    the operating system can reclaim it.
    """
    try:
        kept = kept_scratch.pop()  # taken out while in use: calls may run in several threads
    except IndexError:
        return torch.empty(size, dtype=torch.float32, device="cpu")
    return kept if len(kept) >= size else torch.empty(size, dtype=torch.float32, device="cpu")


def _slots(active: Tensor) -> Tensor:
    """The row whose gradient goes to each slot: active rows stay if they can, others replace inactive rows."""
    rows = active.nonzero().squeeze(1)
    slots = torch.arange(len(rows), device=active.device)
    slots[~active[: len(rows)]] = rows[rows >= len(rows)]
    return slots


def dense(matrix: Tensor) -> Tensor:
    """Rows without gaps between elements, starting at even offsets: the kernels read bf16 in pairs."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) % 2 == 0 else matrix.contiguous()


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


int64 = ctypes.c_int64
