"""Inputs of a head, an operation run on them with its gradients, and how exact the result must be."""

import mmap
from typing import Any

import torch
from closed_form import FEATURES, logprob_and_entropy, sample_constants
from closed_form import policy_loss as closed_policy_loss
from torch import Tensor

from rlplus import Objective, linear_policy_loss
from rlplus.kernels.linear_logprob import default_tile
from rlplus.kernels.tiling import Tile
from rlplus.loss.head.head import Head as OpHead

H = 7
EVERYTHING = Objective("clip", "mis", **FEATURES["all"])
Head = dict[str, Tensor]


def sample(
    n: int, V: int = 23, seed: int = 0, dtype: torch.dtype = torch.float64, H: int = H
) -> tuple[Head, dict[str, Tensor]]:
    """hidden, weight, bias and target of n tokens, in `dtype`; their constants, in at least fp32."""
    g = torch.Generator().manual_seed(2000 + seed)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, H), (V, H), (V,)))
    head = {"hidden": hidden.to(dtype), "weight": (1.6 * H**-0.5 * weight).to(dtype), "bias": bias.to(dtype)}
    constants = sample_constants((n,), seed, torch.promote_types(dtype, torch.float32))
    return head | {"target": torch.randint(V, (n,), generator=g)}, constants


def on_policy(head: Head) -> Head:
    """The head with sampled targets: others of a large vocabulary have no probability, so ratios explode."""
    logits = head["hidden"].double() @ head["weight"].double().T + head["bias"].double()
    g = torch.Generator().manual_seed(len(logits))
    return head | {"target": torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)}


def own_gemm(head: OpHead) -> Tile | None:
    """Replaces `ways.our_tile`: the first GEMM is our own, but for fp16, whose range exponentials leave."""
    if head.hidden.dtype == torch.float16:
        return None
    return default_tile(head.hidden, any(x is not None for x in (head.bias, head.softcap, head.row_temperature)))


GEMMS = {"vendor": lambda head: None, "triton": own_gemm}


def run(head: Head, constants: dict[str, Any], objective: Objective, **options: Any) -> dict[str, Any]:
    """loss, logprob, entropy, the gradients dhidden, dweight, dbias, and stats."""
    leaf = {k: v.detach().clone().requires_grad_() for k, v in head.items() if k != "target"}
    inputs = {"old_logprob": None} | constants
    out = linear_policy_loss(**leaf, target=head["target"], objective=objective, **inputs, **options)
    grads = torch.autograd.grad(out.loss, list(leaf.values()))
    return out._asdict() | {f"d{name}": g for name, g in zip(leaf, grads, strict=True)}


def on_device(
    device: str, head: Head, constants: dict[str, Any], objective: Objective, **options: Any
) -> dict[str, Any]:
    """`run` of the triton backend on that device; the results are on the CPU."""
    there = ({k: v.to(device) if isinstance(v, Tensor) else v for k, v in x.items()} for x in (head, constants))
    got = run(*there, objective, backend="triton", **options)
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in got.items()}


def closed(
    head: Head, constants: dict[str, Any], objective: Objective, temperature: float | Tensor = 1.0, **transform: float
) -> dict[str, Any]:
    """The results of `run` by the closed form, in the head's dtype."""
    leaf = {k: v.detach().clone().requires_grad_() for k, v in head.items() if k != "target"}
    logprob, entropy = logprob_and_entropy(**leaf, target=head["target"], temperature=temperature, **transform)
    loss, stats = closed_policy_loss(objective, logprob, entropy, constants)
    grads = torch.autograd.grad(loss, list(leaf.values()), allow_unused=True, materialize_grads=True)
    out = {"loss": loss, "logprob": logprob.detach(), "entropy": entropy.detach(), "stats": stats}
    return out | {f"d{name}": g for name, g in zip(leaf, grads, strict=True)}


def tensors(result: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in result.items() if name != "stats"}


def to(values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in values.items()}


# ---- values and derivatives


def absolute_sums(
    head: Head, constants: dict[str, Tensor], objective: Objective, exact: dict[str, Any],
    temperature: float | Tensor = 1.0, logit_scale: float = 1.0, logit_softcap: float | None = None,
) -> Head:  # fmt: skip
    """Sums of absolute terms: the scale of the rounding errors that no order of summation avoids.

    "rounded dhidden" and so on: the same of the gradient of the logits alone, the scale of the errors of rounding it.
    """
    T = torch.as_tensor(temperature).expand(len(head["hidden"]))[:, None].double()
    softcap, T = None if logit_softcap is None else logit_softcap / T, T / logit_scale
    hidden, weight, bias = (head[k].abs() for k in ("hidden", "weight", "bias"))
    z = (hidden @ weight.T + bias) / T
    # The gradient of the logits, seen through a bias for each row.
    rows = torch.zeros_like(z).requires_grad_()
    x = (head["hidden"] @ head["weight"].T + head["bias"]) / T + rows
    logp = (x if softcap is None else softcap * (x / softcap).tanh()).log_softmax(-1)
    logprob = logp[torch.arange(len(z)), head["target"]]
    loss, stats = closed_policy_loss(objective, logprob, -(logp.exp() * logp).sum(-1), constants)
    dz = torch.autograd.grad(loss, rows)[0].abs()
    size = z.max() * dz.clamp(min=dz.amax(-1, keepdim=True))  # an error of the logits is one of every probability
    terms = max(abs(v) for k, v in stats.items() if k.startswith("loss_"))
    sums = of_gradients("rounded ", dz / T, hidden, weight)
    sums |= {"loss": 20 * terms, "logprob": z.max(), "entropy": z.max() * exact["entropy"].max()}
    return sums | of_gradients("", size / T, hidden, weight)


def of_gradients(prefix: str, dx: Tensor, hidden: Tensor, weight: Tensor) -> Head:
    """The gradients from dx (N, V), the gradient of hidden weight^T + bias."""
    return {f"{prefix}dhidden": dx @ weight, f"{prefix}dweight": dx.T @ hidden, f"{prefix}dbias": dx.sum(0)}


def check_fp64(
    got: dict[str, Any], head: Head, constants: dict[str, Tensor], objective: Objective,
    temperature: float | Tensor = 1.0, **transform: float,
) -> None:  # fmt: skip
    """Check results for fp64 inputs against the closed form."""
    exact = closed(head, constants, objective, temperature, **transform)
    sums = absolute_sums(head, constants, objective, exact, temperature, **transform)
    for name, want in tensors(exact).items():
        rounding = 16 * torch.finfo(torch.float64).eps * torch.as_tensor(sums[name]).max().item()
        torch.testing.assert_close(
            got[name], want, rtol=1e-12, atol=rounding, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_precision(
    got: dict[str, Any],
    head: Head,
    constants: dict[str, Tensor],
    objective: Objective,
    temperature: float | Tensor = 1.0,
    gemm_dtype: torch.dtype = torch.float32,
    **transform: float,
) -> None:
    """Check against fp64 with the same rounded inputs; gradients of bf16 and fp16 are rounded to their dtype, once.

    gemm_dtype: to which the gradient of the logits was rounded.
    """
    wide, dtype = to(constants, torch.float64), head["hidden"].dtype
    exact = closed(to(head, torch.float64), wide, objective, temperature, **transform)
    plain = closed(to(head, torch.float32), constants, objective, temperature, **transform)
    sums = absolute_sums(to(head, torch.float64), wide, objective, exact, temperature, **transform)
    eps = torch.finfo(torch.float32).eps
    for name, value in tensors(got).items():
        is_input_gradient = name.startswith("d")
        assert value.dtype == (dtype if is_input_gradient else torch.float32)
        bound = 2 * (plain[name] - exact[name]).abs().max() + 8 * eps * sums[name]
        if is_input_gradient and gemm_dtype != torch.float32:
            bound = bound + torch.finfo(gemm_dtype).eps * sums[f"rounded {name}"]
        if is_input_gradient and dtype != torch.float32:
            bound = bound + torch.finfo(dtype).eps * exact[name].abs() + torch.finfo(dtype).tiny
        error = (value - exact[name]).abs()
        assert (error <= bound).all(), f"{name}: error {error.max():.1e}, bound {bound.max():.1e}"


def huge(device: str, rows: int, stride: int, V: int) -> Tensor:
    """(rows, V) fp32 with that stride, on memory that exists only where it is touched (on the CPU)."""
    size = (rows - 1) * stride + V
    if device == "cuda":
        return torch.empty(size, device=device).as_strided((rows, V), (stride, 1))
    no_reserve = 0x4000  # Linux; Python has no name for it
    memory = mmap.mmap(-1, size * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided((rows, V), (stride, 1))
