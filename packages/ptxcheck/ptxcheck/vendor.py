"""The vendor's GEMMs with the checks of the CUDA ones, and fp32 sums of half-precision inputs."""

from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)
GEMMS = {"mm", "addmm", "bmm", "addmm_"}


def gemm(func: Any, name: str, args: Any, kwargs: Any, compute: bool) -> Any:
    """The product; without `compute` only what holds it."""
    *c, a, b = args[:3] if name.startswith("addmm") else args[:2]
    out_dtype = args[len(c) + 2] if "dtype" in func._overloadname else None
    out = c[0] if name == "addmm_" else kwargs.get("out")
    check(name, a, b, c, out, out_dtype)
    result = out_dtype or a.dtype
    wide = torch.float32 if a.dtype in HALF else a.dtype
    if not compute:
        return out if out is not None else a.new_empty(*a.shape[:-1], b.shape[-1], dtype=result)
    value = torch.matmul(a.to(wide), b.to(wide)) * kwargs.get("alpha", 1)
    if c and kwargs.get("beta", 1) != 0:  # with 0 the old contents are not read
        value = value + kwargs.get("beta", 1) * c[0].to(wide)
    if out is None:
        return value.to(result)
    if out.shape != value.shape:
        raise RuntimeError(f"out has shape {tuple(out.shape)}; {tuple(value.shape)} is needed (the real one resizes)")
    return out.copy_(value)


def check(name: str, a: Any, b: Any, c: Any, out: Any, out_dtype: torch.dtype | None) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {a.dtype} and {b.dtype}")
    if out_dtype is not None:
        if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
            raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
        if out is not None and out.dtype != out_dtype:
            raise RuntimeError("out_dtype must be the same as the dtype of the provided out tensor")
        if c and c[0].dtype not in (out_dtype, a.dtype):
            raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")
    elif any(x is not None and x.dtype != a.dtype for x in (*c, out)):
        raise RuntimeError(
            f"{name}: expected {a.dtype}; got {[x.dtype for x in c]}, out {out is not None and out.dtype}"
        )
    if a.ndim != b.ndim or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    if a.ndim == 2 and max(*a.shape, *b.shape, *a.stride(), *b.stride()) >= 2**31:
        raise RuntimeError("cuBLAS: a dimension or a stride is no 32-bit number")
