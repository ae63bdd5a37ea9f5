"""A policy's head under ZeRO-3 that is never gathered: the ranks' hidden states are, in its place.

ZeRO-3 stores V / R rows of the weight (V, H) on each of R ranks. Every rank computes the loss of all ranks' tokens with
its rows (`group` of the operations in `rlplus.loss`), so that R n H numbers travel, of hidden states and of their
gradient, where the weight's and its gradient's V H would: n tokens, the most that a rank has in this micro-batch. The
gradient of the rows is summed over micro-batches in fp32, and DeepSpeed gets it before its step.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_local_grad
from torch import Tensor
from transformers import PreTrainedModel

from rlplus.common import agree
from rlplus.loss import Objective, PolicyLoss, TokenConstants, linear_logprob, linear_policy_loss, token_loss
from rlplus.loss.backends.sampled import SAMPLED_STATS
from rlplus.loss.operations.library import IGNORED
from rlplus.train.learner.deepspeed_settings import check_sharded_head


class ShardedHead:
    """The head of a model that DeepSpeed has in shards. ValueError for one that `check_sharded_head` refuses."""

    def __init__(self, lm: PreTrainedModel) -> None:
        head: Any = lm.get_output_embeddings()
        self.weight: Any = head.weight
        self.group = dist.group.WORLD if dist.get_world_size() > 1 else None  # alone it has the whole head
        self._gradient: Tensor | None = None
        check_sharded_head(lm, self.weight.ds_shape[0], dist.get_world_size())

    def rows(self, device: torch.device) -> Tensor:
        """This rank's rows (V / R, H); all ranks' are in the order of ranks."""
        return self.weight.ds_tensor.detach().to(device).view(-1, self.weight.ds_shape[1])

    def logprob(self, hidden: Tensor, _: None, *, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """`linear_logprob` of this rank's tokens. Collective."""
        own = _Own(hidden)
        everyone = own.gathered(hidden), self.rows(hidden.device), own.gathered(target, IGNORED)
        logprob, entropy = linear_logprob(*everyone, group=self.group, **options)
        return logprob[own.rows], entropy[own.rows]

    def policy_loss(
        self,
        hidden: Tensor,
        _: None,
        *,
        target: Tensor,
        constants: TokenConstants,
        objective: Objective,
        **options: Any,
    ) -> PolicyLoss:
        """`linear_policy_loss` of this rank's tokens, with the rows' gradient of all ranks' tokens. Collective."""
        own = _Own(hidden)
        rows = self.rows(hidden.device)
        if self.weight.requires_grad and torch.is_grad_enabled():
            if self._gradient is None:
                self._gradient = torch.zeros_like(rows, dtype=torch.float32)
            options["weight_grad"] = self._gradient
        per_token: dict[str, Any] = {n: None if x is None else own.gathered(x) for n, x in constants._asdict().items()}
        out = linear_policy_loss(
            _Gather.apply(hidden, own),
            rows,
            own.gathered(target),
            **per_token,
            objective=objective,
            group=self.group,
            **options,
        )
        logprob = out.logprob[own.rows]
        entropy = out.entropy[own.rows]
        mine = token_loss(logprob, entropy, constants, objective)
        loss = out.loss + (mine.loss - out.loss).detach()  # the value of this rank's tokens, with everybody's gradient
        of_all = {name: out.stats[name] / dist.get_world_size() for name in SAMPLED_STATS if name in out.stats}
        return PolicyLoss(loss, logprob, entropy, mine.stats | of_all)

    def give_gradient(self) -> None:
        """Give DeepSpeed the mean over ranks of the rows' gradient, as it makes it of the other parameters'."""
        if not self.weight.requires_grad:
            return
        gradient = self._gradient
        self._gradient = None
        if gradient is None:  # no token of this update had one
            gradient = torch.zeros(self.weight.ds_tensor.shape, device=self.weight.device)
        safe_set_local_grad(self.weight, gradient.div_(dist.get_world_size()))


class _Own:
    """Where this rank's tokens are among all ranks', each of which is filled up to the one that has the most."""

    def __init__(self, hidden: Tensor) -> None:
        self.count = len(hidden)
        self.most = max(1, int(agree.largest(self.count)))
        first = dist.get_rank() * self.most
        self.rows = slice(first, first + self.count)

    def gathered(self, x: Tensor, fill: int = 0) -> Tensor:
        """x (n, ...) of every rank, (R most, ...)."""
        filled = x.new_full((self.most, *x.shape[1:]), fill)
        filled[: self.count] = x
        return agree.rows(filled)


class _Gather(torch.autograd.Function):
    """Hidden states (n, H) of every rank, whose gradient is the same, and whole, on every rank."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, own: _Own) -> Tensor:
        ctx.own = own
        return own.gathered(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.own.rows], None
