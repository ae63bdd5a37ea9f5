"""A moving average of the policy's weights, which a teacher has."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import agree
from rlplus.learner.adapters import adapter_weights
from rlplus.learner.policy import Policy


class MovingAverage:
    """The exponential moving average of the weights that train: after each update a = a + rate (policy - a).

    It begins as the policy does, and is fp32: in the policy's dtype it would lose changes below a rounding. Each rank
    keeps its part of every tensor, in `parts`, and all of it rounded to the policy's dtype: in `policy.reference`,
    or with adapters, of which A and B are averaged by themselves, beside the policy. Collective.
    """

    def __init__(self, policy: Policy, rate: float) -> None:
        self.policy, self.rate = policy, rate
        if policy.reference is not None:
            self._rounded = {name: p.detach() for name, p in policy.reference.lm.named_parameters()}
        else:
            self._rounded = {name: weight.detach().clone() for name, weight in policy.trained()}
        self.parts = {name: _part(whole, dist.get_rank()).float().clone() for name, whole in self._rounded.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the policy. Collective."""
        for name, weight in self.policy.trained():
            self.parts[name].lerp_(_part(weight, dist.get_rank()).float(), self.rate)
            self._spread(name)

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Continue with this rank's `parts` of another time. Collective."""
        if parts is self.parts:
            return
        for name, part in self.parts.items():
            part.copy_(parts[name])
            self._spread(name)

    def redistributed(self, ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """This rank's parts, from the parts of a run on another number of ranks."""
        joined = ((name, torch.cat([parts[name] for parts in ranks])) for name in self.parts)
        return {name: _part(whole, dist.get_rank()).clone() for name, whole in joined}

    @contextmanager
    def as_adapters(self) -> Iterator[None]:
        """The policy has the average as its adapters inside; they must be whole, not in ZeRO-3's shards."""
        adapters = [(name, adapter) for name, (adapter,), _ in adapter_weights(self.policy.engine.module.lm)]
        own = [adapter.data for _, adapter in adapters]
        for name, adapter in adapters:
            adapter.data = self._rounded[name]
        try:
            yield
        finally:
            for (_, adapter), data in zip(adapters, own, strict=True):
                adapter.data = data

    def _spread(self, name: str) -> None:
        """Round this rank's part, and receive all others'."""
        whole = self._rounded[name]
        _part(whole, dist.get_rank()).copy_(self.parts[name])
        for rank in range(dist.get_world_size()):
            agree.share(_part(whole, rank), rank)


def _part(whole: Tensor, rank: int) -> Tensor:
    """A rank's part of the numbers in a row; parts of all ranks, which differ by at most one number, are the whole."""
    numbers, world = whole.view(-1), dist.get_world_size()
    return numbers[len(numbers) * rank // world : len(numbers) * (rank + 1) // world]
