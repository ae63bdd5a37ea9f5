"""Cases of a head with all possible contents, and the required accuracy of an operation on them."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from closed_form import token_losses
from head_cases import Head, closed, run, tensors, to
from torch import Tensor

from rlplus import Objective
from rlplus.loss.backends import native

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CPP = pytest.param("cpp", marks=pytest.mark.skipif(native.load() is None, reason="rlplus/_C.so is not built"))
EVERY = pytest.mark.parametrize("backend", ["reference", "torch", CPP, "triton"])
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
GRADIENTS = ("dhidden", "dweight", "dbias")


@dataclass(frozen=True)
class Case:
    """A head, constants, an objective. `off`: rows that count for nothing. `possible`: tokens with a logit > -inf."""

    head: Head
    constants: dict[str, Tensor]
    objective: Objective
    temperature: float
    max_scratch_mb: float | None
    poison: float

    @property
    def options(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_scratch_mb": self.max_scratch_mb}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The form in which hypothesis prints a failing case."""
        shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in self.head.items())
        rows = f"{self.head['hidden'].dtype}, {self.off.sum()} rows off, {(~self.possible).sum()} tokens impossible"
        given = f"given {', '.join(self.constants)}, {self.objective}"
        printer.text(f"<{shapes}, {rows}, {given}, {self.options}, poison {self.poison}>")

    @property
    def off(self) -> Tensor:
        c = self.constants
        bonus = c.get("entropy_weight", c["token_weight"]) if self.objective.entropy_coef else c["token_weight"]
        return (c["token_weight"] == 0) & (bonus == 0)

    @property
    def possible(self) -> Tensor:
        bias = self.head.get("bias")
        return torch.ones(len(self.head["weight"]), dtype=torch.bool) if bias is None else bias > -math.inf

    def poisoned(self) -> tuple[Head, dict[str, Tensor]]:
        """The case with non-finite values in rows without a weight, and targets there that are no tokens."""
        off, p = self.off, self.poison
        head = self.head | {"hidden": self.head["hidden"].masked_fill(off[:, None], p)}
        head["target"] = head["target"].masked_fill(off, -100)
        spoilt = {k: v.masked_fill(off, p) for k, v in self.constants.items() if v.is_floating_point()}
        kept = {k: v for k, v in self.constants.items() if k.endswith("_weight")}
        return head, spoilt | kept | {"external": self.constants["external"] ^ off}

    def condensed(self, dtype: torch.dtype) -> tuple[Head, dict[str, Tensor]]:
        """The case in `dtype` without impossible tokens, for the closed form."""
        head = to(self.head, dtype)
        number = self.possible.cumsum(0) - 1
        short = {k: v[self.possible] for k, v in head.items() if k in ("weight", "bias")}
        return head | short | {"target": number[head["target"]]}, to(self.constants, dtype)


# ---- how exact it must be


@dataclass(frozen=True)
class Rows:
    """The quantities, in fp64, from which the bounds of a head without impossible tokens are computed."""

    hidden: Tensor
    weight: Tensor
    onehot: Tensor
    logp: Tensor
    error: Tensor  # a row's logits' and its logprob's: 8 eps of the largest logit, in absolute terms
    temperature: float

    @classmethod
    def of(cls, case: Case, eps: float) -> "Rows":
        head, T = case.condensed(FP64)[0], case.temperature
        hidden, weight = head["hidden"], head["weight"]
        bias = head.get("bias", torch.zeros(len(weight), dtype=FP64))
        logp = ((hidden @ weight.T + bias) / T).log_softmax(-1)
        largest = ((hidden.abs() @ weight.abs().T + bias.abs()) / T).amax(-1)
        onehot = torch.zeros_like(logp).scatter(1, head["target"][:, None], 1.0)
        error = 8 * eps * (1 + 2 * largest + math.log(len(weight)))
        return cls(hidden.abs(), weight.abs(), onehot, logp, error, T)

    @property
    def logprob(self) -> Tensor:
        return self.logp[self.onehot == 1]

    @property
    def entropy(self) -> Tensor:
        return -(self.logp.exp() * self.logp).sum(-1)

    @property
    def entropy_error(self) -> Tensor:
        return self.error * (self.logp.exp() * (1 + self.logp.abs())).sum(-1)

    def bounds(self, slope: Tensor, bonus: Tensor, slope_error: Tensor, eps: float) -> Head:
        """Bounds 8 eps S of logprob, entropy and, for their derivatives slope and bonus (N,), the gradients.

        "rounded dhidden" and so on: as many more where the gradient of the logits is rounded too, for an eps of 1.
        """
        p, T = self.logp.exp(), self.temperature
        reached = p + self.onehot + torch.finfo(FP32).tiny / eps  # a p below that may be 0
        spread = bonus.abs()[:, None] * p * (self.logp.abs() + self.entropy[:, None] + 2)
        rounding = (slope.abs()[:, None] * reached + spread) / T
        moved = slope_error[:, None] * reached + 2 * self.error[:, None] * (slope.abs()[:, None] * p + spread)
        out = {"logprob": self.error, "entropy": self.entropy_error}
        for prefix, dz in (("", 8 * eps * rounding + moved / T), ("rounded ", rounding)):
            out |= {f"{prefix}dhidden": dz @ self.weight, f"{prefix}dweight": dz.T @ self.hidden}
            out[f"{prefix}dbias"] = dz.sum(0)
        return out


def loss_bounds(case: Case, eps: float) -> Head:
    """Bounds 8 eps S: S are sums of absolute terms, plus the effect of an error of the logits through the objective.

    Without the second part a row near p = 1 has no bound: there (1 - p)^gamma is as steep as one likes.
    """
    rows, (_, c), o = Rows.of(case, eps), case.condensed(FP64), case.objective

    def at(logprob: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        inputs = (logprob.clone().requires_grad_(), rows.entropy.requires_grad_())
        losses, stats = token_losses(o, *inputs, c)
        slopes = torch.autograd.grad(losses.sum(), inputs, allow_unused=True, materialize_grads=True)
        return losses.detach(), *slopes, stats

    losses, slope, bonus, stats = at(rows.logprob)
    near = [at(rows.logprob + shift) for shift in (-rows.error, rows.error)]
    loss_error, slope_error = (torch.stack([(n[i] - (losses, slope)[i]).abs() for n in near]).amax(0) for i in (0, 1))
    if o.kl_coef:  # two terms that may cancel
        slope_error += 8 * eps * o.kl_coef * c["token_weight"] * (1 + (c["ref_logprob"] - rows.logprob).exp())
    terms = max(abs(v) for k, v in stats.items() if k.startswith("loss_"))
    loss = 160 * eps * terms + (loss_error + bonus.abs() * rows.entropy_error).sum()
    return {"loss": loss, "stats": 8 * eps + rows.error.sum()} | rows.bounds(slope, bonus, slope_error, eps)


def check_tensor(name: str, got: Tensor, exact: Tensor, plain: Tensor, bounds: Head, backend: str) -> None:
    """error <= 2 max|plain error| + 8 eps S; a gradient is rounded to its dtype as well."""
    error, bound = (got - exact).abs().where(got != exact.to(got.dtype), 0.0), bounds[name]  # inf - inf is no number
    if exact.numel():
        bound = bound + 2 * (plain - exact).abs().max()
    if name in GRADIENTS and got.dtype in (BF16, FP16):
        eps = torch.finfo(got.dtype).eps
        bound = bound + eps * exact.abs() + torch.finfo(got.dtype).tiny
        if (backend == "cpp" and got.dtype == BF16) or DEVICE.get(backend) == "cuda":
            bound = bound + eps * bounds[f"rounded {name}"]
    assert (error <= bound).all(), f"{name}: error {error.max():.2e}, bound {bound.max():.2e}"


def check(case: Case, got: dict[str, Any], backend: str) -> None:
    """`got`, whole, against fp64; the columns of impossible tokens are exactly 0."""
    dtype = case.head["hidden"].dtype
    wide = torch.promote_types(dtype, FP32)
    exact, plain = (closed(*case.condensed(d), case.objective, case.temperature) for d in (FP64, wide))
    eps = torch.finfo(wide).eps
    bounds = loss_bounds(case, eps)
    for name, value in tensors(got).items():
        assert value.dtype == (dtype if name in GRADIENTS else wide)
        if name in ("dweight", "dbias"):
            assert not value[~case.possible].any(), name
            value = value[case.possible]
        check_tensor(name, value, exact[name].detach(), plain[name].detach(), bounds, backend)
    for name, want in exact["stats"].items():
        limit = 2 * abs(plain["stats"][name] - want) + bounds["stats"] * (1 + abs(want)) + bounds["loss"]
        assert abs(got["stats"][name].item() - want) <= limit, name


def bits(result: dict[str, Any], rows: Tensor) -> list[Tensor]:
    """The bits that two runs must share; logprob and entropy of the chosen rows only."""
    return [v[rows] if k in ("logprob", "entropy") else v for k, v in tensors(result).items()] + [
        *result["stats"].values()
    ]


def fused(backend: str, head: Head, constants: dict[str, Tensor], objective: Objective, **options: Any) -> Any:
    there = ({k: v.to(DEVICE.get(backend, "cpu")) for k, v in inputs.items()} for inputs in (head, constants))
    got = run(*there, objective, backend=backend, **options)
    return {k: v.cpu() if isinstance(v, Tensor) else {n: x.cpu() for n, x in v.items()} for k, v in got.items()}


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return (FP64, FP32, BF16, FP16) if backend in ("reference", "torch") else (FP32, BF16, FP16)
