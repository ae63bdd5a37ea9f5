"""oneDNN's bf16 GEMMs with AMX, in Python: they run the cpp backend's bf16 path on a CPU without either.

An AMX tile holds 32 bf16 values of a row. oneDNN's kernel for a matrix whose rows are further apart than they are long
may load whole tiles at the end of a row and multiply by 0 what it read too much.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import native

DEPTH = 32
_INT, _ADDRESS, _BOOL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool


def _matrix(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    size = ((rows - 1) * stride + columns) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (stride, 1))


def _gemm(M: int, N: int, K: int, lda: int, ldb: int, ldc: int, add: bool, A: int, B: int, C: int, vnni: bool) -> None:
    assert vnni
    assert K % 2 == 0
    pairs = _matrix(B, K // 2, 2 * N, 2 * ldb, torch.bfloat16).view(K // 2, N, 2)
    out = _matrix(C, M, N, ldc, torch.float32)
    product = _matrix(A, M, K, lda, torch.bfloat16).float() @ pairs.transpose(1, 2).reshape(K, N).float()
    out.copy_(out + product if add else product)


_CALLBACKS = (
    ctypes.CFUNCTYPE(None, *(_INT,) * 6, _BOOL, *(_ADDRESS,) * 3, _BOOL)(_gemm),
    ctypes.CFUNCTYPE(None, _BOOL)(lambda vnni: None),
)
_mm = torch.mm


def _tiled_mm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """torch.mm; rows of a bf16 `a` are read up to the next multiple of DEPTH, where there must be zeros."""
    if a.dtype != torch.bfloat16 or a.stride(1) != 1:
        return _mm(a, b, **options)
    M, K = a.shape
    tiles = a.as_strided((M, -(-K // DEPTH) * DEPTH), a.stride())  # an error where it passes the end of the memory
    assert not tiles[:, K:].view(torch.int16).any(), "bits of something else stand behind the rows"
    return _mm(tiles.float(), torch.cat([b.float(), b.new_zeros(tiles.shape[1] - K, b.shape[1]).float()])).to(a.dtype)


def use_amx(monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "torch_gemm", lambda: tuple(ctypes.cast(f, _ADDRESS) for f in _CALLBACKS))
    monkeypatch.setattr(torch, "mm", _tiled_mm)
