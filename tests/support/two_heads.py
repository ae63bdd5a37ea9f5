"""Inputs of a student's and a teacher's head, their divergence by an independent computation, and how exact it is."""

import math
from typing import Any

import torch
from torch import Tensor

from rlplus import linear_divergence

KINDS: dict[str, dict[str, Any]] = {
    "reverse": {"kind": "reverse_kl"},
    "forward": {"kind": "forward_kl"},
    "jsd": {"kind": "jsd"},
    "jsd .2": {"kind": "jsd", "beta": 0.2},
}
LEAVES = ("hidden", "weight", "bias")
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
Inputs = dict[str, Any]


def sample(
    n: int = 13, V: int = 29, seed: int = 0, dtype: torch.dtype = torch.float64, H: int = 5, G: int = 7
) -> Inputs:
    """Arguments of linear_divergence; the teacher is a student that knows more, and some weights are 0."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    heads = {
        "hidden": normal(n, H), "weight": 1.6 * H**-0.5 * normal(V, H), "bias": normal(V),
        "teacher_hidden": normal(n, G), "teacher_weight": 1.6 * G**-0.5 * normal(V, G), "teacher_bias": normal(V),
    }  # fmt: skip
    weights = normal(n).masked_fill(torch.arange(n) % 4 == 2, 0.0)
    return {k: v.to(dtype) for k, v in heads.items()} | {"token_weight": weights.to(wide(dtype))}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def to(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def run(backend: str, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """loss, divergence, dhidden, dweight, dbias, on the CPU."""
    there = {k: v.to(DEVICE.get(backend, "cpu")) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    leaves = {k: there[k].detach().requires_grad_() for k in LEAVES if there.get(k) is not None}
    out = linear_divergence(**(there | leaves), backend=backend, **options)
    grads = torch.autograd.grad(out.loss, list(leaves.values()))
    found = {"loss": out.loss.detach(), "divergence": out.divergence}
    found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {k: v.cpu() for k, v in found.items()}


def logits(inputs: Inputs, prefix: str = "", **numbers: Any) -> Tensor:
    scale, cap = numbers.get(f"{prefix}logit_scale", 1.0), numbers.get(f"{prefix}logit_softcap")
    temperature = numbers.get("temperature", 1.0)
    if prefix:
        temperature = numbers.get("teacher_temperature", temperature)
    z = inputs[f"{prefix}hidden"] @ inputs[f"{prefix}weight"].T
    if inputs.get(f"{prefix}bias") is not None:
        z = z + inputs[f"{prefix}bias"]
    z = scale * z
    z = z if cap is None else cap * (z / cap).tanh()
    return z / torch.as_tensor(temperature, dtype=z.dtype).expand(len(z))[:, None]


def of_logits(z: Tensor, teacher: Tensor, kind: str, beta: float | None = None) -> Tensor:
    """(N,), by the textbook."""
    s, t = z.log_softmax(1), teacher.log_softmax(1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b).where(a.exp() > 0, 0.0)).sum(1)

    if kind != "jsd":
        return kl(s, t) if kind == "reverse_kl" else kl(t, s)
    b = 0.5 if beta is None else beta
    m = (b * t.exp() + (1 - b) * s.exp()).log()
    return b * kl(t, m) + (1 - b) * kl(s, m)


def closed(inputs: Inputs, kind: str, beta: float | None = None, **numbers: Any) -> dict[str, Tensor]:
    """The results of `run`, in the inputs' dtype."""
    leaves = {k: inputs[k].detach().clone().requires_grad_() for k in LEAVES if inputs.get(k) is not None}
    z = logits(inputs | leaves, **numbers)
    values = of_logits(z, logits(inputs, "teacher_", **numbers), kind, beta)
    loss = (inputs["token_weight"] * values).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"loss": loss.detach(), "divergence": values.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def scales(inputs: Inputs, **numbers: Any) -> dict[str, Tensor]:
    """Sums of absolute terms, of fp64 inputs: the scale of the rounding errors that no order of summation avoids.

    "rounded dhidden" and so on: the same of the gradient of the logits alone, the scale of the errors of rounding it.
    """
    plain = {k: v for k, v in numbers.items() if not k.endswith("softcap")}  # a cap shrinks errors
    sizes = {k: v.abs() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    size = max(logits(sizes, prefix, **plain).max() for prefix in ("", "teacher_"))
    student, teacher = (logits(inputs, prefix, **numbers).log_softmax(1) for prefix in ("", "teacher_"))
    weights, p, q = inputs["token_weight"].abs(), student.exp(), teacher.exp()
    apart = (student - teacher).abs().clamp(max=1e4)
    value = ((p + q) * (1 + apart)).sum(1)
    T = torch.as_tensor(numbers.get("temperature", 1.0), dtype=torch.float64).expand(len(p))
    slope = (weights * numbers.get("logit_scale", 1.0) / T)[:, None]
    dz = slope * (p + q) * (1 + apart + (p * apart).sum(1, keepdim=True))
    out = {"divergence": size * value, "loss": size * (weights * value).sum()}
    for name, dx in (("", size * dz.clamp(min=dz.amax(1, keepdim=True))), ("rounded ", dz)):
        out |= {
            f"{name}dhidden": dx @ sizes["weight"], f"{name}dweight": dx.T @ sizes["hidden"], f"{name}dbias": dx.sum(0),
        }  # fmt: skip
    return out


def check(
    got: dict[str, Tensor], inputs: Inputs, options: dict[str, Any], gemm_dtype: torch.dtype = torch.float32,
    **numbers: Any,
) -> None:  # fmt: skip
    """Against float64 with the same inputs: within twice plain PyTorch's error and 8 roundings of each term."""
    dtype = inputs["hidden"].dtype
    exact = closed(to(inputs, torch.float64), **options, **numbers)
    plain = closed(to(inputs, wide(dtype)), **options, **numbers)
    within(got, exact, plain, scales(to(inputs, torch.float64), **numbers), dtype, gemm_dtype)


def within(
    got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], sums: dict[str, Tensor],
    dtype: torch.dtype, gemm_dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """As `check`; dtype: of the inputs."""
    eps = torch.finfo(wide(dtype)).eps
    for name, value in got.items():
        assert value.dtype == (dtype if name.startswith("d") and name != "divergence" else wide(dtype)), name
        bound = 2 * (plain[name] - exact[name]).abs().max() + 8 * eps * sums[name]
        if name[0] == "d" and name != "divergence" and dtype.itemsize == 2:
            bound = bound + torch.finfo(dtype).eps * exact[name].abs() + torch.finfo(dtype).tiny
            if gemm_dtype == dtype:
                bound = bound + torch.finfo(dtype).eps * sums[f"rounded {name}"]
        error = (value - exact[name]).abs()
        assert (error <= bound).all(), f"{name}: error {error.max():.1e}, bound {bound.max():.1e}"


def nearly_sure(gaps: Tensor, V: int, seed: int = 0) -> Tensor:
    """Logits (n, V) whose first token is so many nats above where the others lie."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(len(gaps), V, generator=g, dtype=torch.float64) - math.log(V)
    z[:, 0] = gaps
    return z
