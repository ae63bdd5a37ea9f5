"""The inputs of a case: tensors like the ones that reinforcement learning has."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, gcd, log
from typing import Any

import torch
from torch import Tensor

from rlplus.loss import Objective, policy_loss

from .case import GROUP, NAMES, Case

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES}
NOISE = 2.0  # standard deviation of the logits


@dataclass
class Head:
    """hidden (N, H), weight (V, H): leaves of one dtype; target (N,). The logits have a standard deviation of about 2.

    Four sampled tokens in five are confident (1 - p from 1e-2 to 1e-6), the others have p from 0.05 to 0.95;
    demonstrated ones are surprising, p from 1e-4 to 0.5. Rows of a file are as they are.
    """

    case: Case
    device: str
    hidden: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    target: Tensor = field(init=False)
    external: Tensor = field(init=False)

    def __post_init__(self) -> None:
        case, device = self.case, self.device
        rows = torch.arange(case.N, device=device) // self.length
        self.external = rows % max(1, round(1 / case.external)) == 0
        hidden, weight = self._made_up() if case.rows is None else self._real(case.rows)
        self.hidden, self.weight = (t.to(DTYPES[case.dtype]).requires_grad_() for t in (hidden, weight))

    def _real(self, path: str) -> tuple[Tensor, Tensor]:
        """hidden and weight of a file; the target is set, too."""
        from safetensors.torch import load_file  # comes with transformers

        found = load_file(path, device=self.device)
        again = torch.arange(self.case.N, device=self.device) % len(found["target"])
        self.target = found["target"][again]
        return found["hidden"][again], found["weight"]

    def _made_up(self) -> tuple[Tensor, Tensor]:
        """hidden and weight; the target is set, too."""
        case, device = self.case, self.device
        g = torch.Generator(device).manual_seed(0)
        u, v = torch.rand(2, case.N, generator=g, device=device, dtype=torch.float64)
        doubt = torch.where(u < 0.8, 10 ** (-2 - 4 * v), 0.05 + 0.9 * v)
        doubt = torch.where(self.external, 1 - 0.5 * 2e-4**v, doubt)
        weight = torch.randn(case.V, case.H, generator=g, device=device) / case.H**0.5
        self.target = torch.randint(case.V, (case.N,), generator=g, device=device)
        hidden = NOISE * torch.randn(case.N, case.H, generator=g, device=device)
        # The target's logit that gives its probability; what lies along its weight spreads the others' logits too.
        margin = log(case.V) + NOISE**2 / 2 + ((1 - doubt) / doubt).log()
        margin = (margin + margin.clamp(min=0) ** 2 / case.H / 2).float()
        along = weight[self.target]
        hidden += ((margin - (hidden * along).sum(1)) / (along * along).sum(1))[:, None] * along
        return hidden, weight

    @property
    def sequences(self) -> int:
        return gcd(self.case.N, 64 if self.case.N >= 8192 else 16)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.case.N // self.sequences

    @cached_property
    def logprob(self) -> Tensor:
        """(N,) fp64, exact."""
        rows = [z.log_softmax(1).gather(1, t[:, None]).squeeze(1) for z, t in self.exact_logits(self.target)]
        return torch.cat(rows)

    @torch.no_grad()
    def exact_logits(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Chunks of rows: the fp64 logits, and the same rows of the other tensors."""
        weight = self.weight.double()
        for hidden, *rest in zip(self.hidden.split(256), *(t.split(256) for t in others), strict=True):
            yield hidden.double() @ weight.T, *rest


@dataclass
class Inputs:
    """A head and the per-token constants with which a share of its rows has a gradient."""

    head: Head
    share: float

    def __post_init__(self) -> None:
        head, case = self.head, self.head.case
        g = torch.Generator().manual_seed(1)
        sequence = torch.arange(head.sequences).repeat_interleave(head.length)
        advantage = torch.randn(head.sequences, generator=g)
        advantage = (advantage.abs() + 0.1) * torch.where(advantage < 0, -1, 1)
        keep = torch.ones(case.N, dtype=torch.bool)
        if case.scattered:
            keep = torch.rand(case.N, generator=g).argsort().argsort() < self.share * case.N
        else:
            groups = ceil(head.sequences / GROUP)
            advantage[torch.arange(head.sequences) // GROUP >= round(self.share * groups)] = 0
        self.sequence_advantage = advantage.to(head.device)
        self.keep = keep.to(head.device)
        drift = 0.05 * torch.randn(case.N, generator=g).to(head.device)
        self.constants: dict[str, Any] = {
            "old_logprob": (head.logprob + drift).clamp(max=0).float(),
            "advantage": self.sequence_advantage[sequence.to(head.device)],
            "token_weight": self.keep.float() / case.N,
            "external": head.external,
        }

    @property
    def hidden(self) -> Tensor:
        return self.head.hidden

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    @property
    def target(self) -> Tensor:
        return self.head.target

    @cached_property
    def active(self) -> Tensor:
        """(N,) bool: rows with a gradient."""
        return self.coefficient("policy") != 0

    @cached_property
    def ce_target(self) -> Tensor:
        """Targets of a cross-entropy on the rows with a gradient; the others are ignored."""
        return torch.where(self.active, self.target, -100)

    def coefficient(self, kind: str) -> Tensor:
        """Exact derivative of a method's loss by the logprobs, (N,) fp64. kind: as in `peers.Method`."""
        if kind == "cross-entropy":
            return -self.active.double() / self.active.sum()
        constants, objective = self.constants, Objective()
        if kind == "grpo":
            weights = self.keep.double() / self.keep.sum()
            constants = constants | {"external": torch.zeros_like(self.keep), "token_weight": weights}
            objective = Objective("clip", "none", gamma=0.0)
        logprob = self.head.logprob.clone().requires_grad_()
        loss, _ = policy_loss(logprob, **constants, objective=objective)
        (slope,) = torch.autograd.grad(loss, logprob)
        return slope

    def gradients(self, kind: str) -> tuple[Tensor, Tensor]:
        """Exact dhidden (N, H) and dweight (V, H) of a method's loss, fp64."""
        head = self.head
        weight, dhidden = head.weight.detach().double(), []
        dweight = torch.zeros_like(weight)
        for z, t, c, h in head.exact_logits(head.target, self.coefficient(kind), head.hidden.detach()):
            dz = -z.softmax(1) * c[:, None]
            dz.scatter_add_(1, t[:, None], c[:, None])
            dhidden.append(dz @ weight)
            dweight.addmm_(dz.T, h.double())
        return torch.cat(dhidden), dweight
