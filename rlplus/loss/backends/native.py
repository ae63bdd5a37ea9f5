"""The native library of the `cpp` backend as Python sees it: csrc/rows.cpp and csrc/gemm.cpp through ctypes.

fp32 and fp16 inputs: GEMMs and gradient rows in fp32. bf16 inputs: bf16 GEMMs that accumulate in fp32; the logits stay
fp32 (torch's oneDNN kernel returns them so), their gradient is rounded to bf16 once. If that kernel or the
instructions are missing, or H is odd, bf16 inputs take the path of fp16, which is as exact but slower.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rlplus.loss.head.head import Head, logits_into

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parents[2] / "_C.so"
FUNCTIONS = ("row_statistics", "row_gradient", "logits_bf16", "dweight_bf16", "may_be_reclaimed", "draw", "interface_6")
CHUNK_ROWS = {torch.float32: 2048, torch.bfloat16: 512, torch.float16: 2048}  # the tiles of bf16 are made for 512
DTYPES = tuple(CHUNK_ROWS)
PANEL_ROWS = 64  # rows of a bf16 GEMM, which is compiled for each of its few shapes at its first use
LOGPROB = 2  # columns of `row_statistics`
ENTROPY = 3
PACKED_BYTES = 2**18  # bytes of weight at a time, for the bf16 GEMM: half of a second-level cache


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
def torch_gemm() -> tuple[ctypes.c_void_p, ctypes.c_void_p] | None:
    """torch's GEMM from bf16 to fp32 and its clean-up; None if torch or the CPU has none.

    It is no public function, so it is looked up by its C++ name, which encodes the types of its arguments: a torch in
    which they differ does not have it. No plain way is as fast. On the CPU torch.mm has no out_dtype (2.13) and rounds
    to bf16. torch's C++ header would tie our library, which one build serves, to one torch. MKL's documented
    GEMM_BF16BF16F32, which is in libtorch_cpu, takes 4.6 times as long.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    namespace = "_ZN2at6native7cpublas"
    try:
        gemm = getattr(library, f"{namespace}6brgemmEllllllbPKN3c108BFloat16ES5_Pfb")
        release = getattr(library, f"{namespace}14brgemm_releaseEb")
    except AttributeError:
        logger.info("this torch has no bf16 GEMM with fp32 results; bf16 inputs are widened to fp32")
        return None
    return ctypes.cast(gemm, ctypes.c_void_p), ctypes.cast(release, ctypes.c_void_p)


def native() -> ctypes.CDLL:
    library = load()
    assert library is not None, "`choose` has checked that the library is there"
    return library


def gemm_of(head: Head) -> tuple[ctypes.c_void_p, ctypes.c_void_p] | None:
    """The GEMM for these inputs; None where they are multiplied in fp32."""
    if head.hidden.dtype != torch.bfloat16 or head.hidden.shape[1] % 2 or (gemm := torch_gemm()) is None:
        return None
    # Asked every time: torch.backends.mkldnn can be switched off, as DNNL_MAX_CPU_ISA can.
    return gemm if native().rlplus_gemm_works(*gemm) else None


def fill_logits(head: Head, gemm: tuple[ctypes.c_void_p, ctypes.c_void_p] | None, z: Tensor) -> Tensor:
    """Written to z (n, V); hidden and weight `dense` where a GEMM is given."""
    if gemm is None:
        return logits_into(head, z)
    hidden = head.hidden
    weight = head.weight
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
    out = z.new_empty(len(z), 4)
    inverse = inverse_temperature(head)
    native().rlplus_row_statistics(
        pointer(z), pointer(bias), pointer(head.target), int64(len(z)), int64(z.shape[1]),
        pointer(inverse), cap_of(head), pointer(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


def row_gradient(
    z: Tensor, out: Tensor, source: Tensor, head: Head, bias: Tensor | None, statistics: Tensor, dlogprob: Tensor,
    dentropy: Tensor | None, narrow: bool,
) -> None:  # fmt: skip
    """Row s of out, which may be z, becomes the gradient of row source[s] of z: fp32, or bf16 in the front half of the
    row's memory.

    DEPTH - 1 zeros follow a bf16 row, as far as its memory has room.
    """
    dlogprob = dlogprob.contiguous()
    dentropy = None if dentropy is None else dentropy.contiguous()
    inverse = inverse_temperature(head)
    native().rlplus_row_gradient(
        pointer(z), pointer(out), pointer(bias), pointer(source), int64(len(source)), int64(z.shape[1]),
        pointer(head.target), pointer(inverse), cap_of(head), pointer(statistics), pointer(dlogprob), pointer(dentropy),
        int(narrow), torch.get_num_threads(),
    )  # fmt: skip


def wide_bias(head: Head) -> Tensor | None:
    return None if head.bias is None else head.bias.to(torch.float32).contiguous()


kept_scratch: list[Tensor] = []


def take_scratch(size: int) -> Tensor:
    """Uninitialised fp32 memory, an earlier call's if it is large enough.

    The first touch of fresh memory would take a tenth of a bf16 pass.
    """
    try:
        kept = kept_scratch.pop()  # taken out while in use: calls may run in several threads
    except IndexError:
        return torch.empty(size, dtype=torch.float32, device="cpu")
    return kept if len(kept) >= size else torch.empty(size, dtype=torch.float32, device="cpu")


def give_back(scratch: Tensor) -> None:
    """Keep what `take_scratch` gave; it is marked MADV_FREE, so that the operating system can reclaim it."""
    native().rlplus_may_be_reclaimed(pointer(scratch), int64(scratch.nbytes))
    kept_scratch[:] = [scratch]


def dense(matrix: Tensor) -> Tensor:
    """Rows without gaps between elements, starting at even offsets: the kernels read bf16 in pairs."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) % 2 == 0 else matrix.contiguous()


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


int64 = ctypes.c_int64
