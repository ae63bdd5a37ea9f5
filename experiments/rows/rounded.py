"""How far off the gradients are if the operands of the two backward GEMMs are rounded, the target's column aside.

d hidden = slope (weight[target] - p weight), and d weight likewise: only the products with p are GEMMs, and only their
operands are rounded here. Operands of 8 bits are scaled, along the axis that the GEMM does not sum over, to the largest
number of their dtype. Both GEMMs read one rounded p: its scales are factors of the rows of hidden states.
"""

import torch
from torch import Tensor

from .filtered import Samples

ROUNDINGS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "p in e4m3, the others in bf16": (torch.float8_e4m3fn, torch.bfloat16),
    "both operands in e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "p in e5m2, the others in e4m3": (torch.float8_e5m2, torch.float8_e4m3fn),
}


def rounded(x: Tensor, dtype: torch.dtype, summed: int) -> Tensor:
    """x (two axes) to the nearest numbers of dtype and back; float64."""
    if dtype.itemsize > 1:
        return x.to(dtype).double()
    scale = x.abs().amax(summed, keepdim=True).clamp(min=1e-300) / torch.finfo(dtype).max
    return (x / scale).to(dtype).double() * scale


def errors(samples: Samples, logprobs: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[float, float]:
    """Errors of d hidden and d weight, relative to their norms."""
    hidden, weight = samples.hidden.double(), samples.weight.double()
    slope = (-samples.advantage.double() / len(samples.target))[:, None]
    p = logprobs.exp().scatter(1, samples.target[:, None], 0.0)  # its target's column is patched in full precision
    others = p.sum(1, keepdim=True)
    left, right = dtypes
    products = (p @ weight, p.T @ (slope * hidden))
    p = rounded(p, left, 1)
    near = (p @ rounded(weight, right, 0), p.T @ rounded(slope * hidden, right, 0))
    at_target = others * slope * weight[samples.target]
    dhidden = at_target - slope * products[0]
    dweight = torch.zeros_like(weight).index_add(0, samples.target, others * slope * hidden) - products[1]
    return (
        ((slope * (near[0] - products[0])).norm() / dhidden.norm()).item(),
        ((near[1] - products[1]).norm() / dweight.norm()).item(),
    )
