"""A moving average of the policy's weights, which a teacher has."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import agree
from rlplus.train.learner.adapters import adapter_weights
from rlplus.train.learner.policy import Policy

EXCHANGED = 64 * 2**20
"""Most bytes of one collective, all ranks' parts together. An update's temporaries, freed by then, are larger."""


class MovingAverage:
    """The exponential moving average of the weights that train: after each update a = a + rate (policy - a).

    It begins as the policy does, and is fp32: in the policy's dtype it would lose changes below a rounding. Each rank
    keeps its part of every tensor, in `parts`, and all of it rounded to the policy's dtype: in `policy.reference`,
    or with adapters, of which A and B are averaged by themselves, beside the policy. Collective.
    """

    def __init__(self, policy: Policy, rate: float) -> None:
        self.policy = policy
        self.rate = rate
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
        self._spread()

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        """Continue with this rank's `parts` of another time. Collective."""
        if parts is self.parts:
            return
        for name, part in self.parts.items():
            part.copy_(parts[name])
        self._spread()

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

    def _spread(self) -> None:
        """Round this rank's parts, and receive all others'."""
        for name, part in self.parts.items():
            _part(self._rounded[name], dist.get_rank()).copy_(part)
        if dist.get_world_size() == 1:
            return
        wholes = [whole.view(-1) for whole in self._rounded.values()]
        for dtype in dict.fromkeys(whole.dtype for whole in wholes):
            most = max(1, EXCHANGED // dtype.itemsize // dist.get_world_size())
            for pieces in _grouped([whole for whole in wholes if whole.dtype == dtype], most):
                _exchange(pieces)


class _Piece(NamedTuple):
    """Numbers start to stop of each rank's part of a tensor. numbers: all of the tensor's, in a row."""

    numbers: Tensor
    start: int
    stop: int


def _grouped(wholes: Iterable[Tensor], most: int) -> Iterator[list[_Piece]]:
    """Lists of pieces that have `most` numbers per rank together; the last list may have fewer."""
    pieces: list[_Piece] = []
    room = most
    for numbers in wholes:
        start = 0
        size = _part_size(numbers)
        while start < size:
            stop = min(size, start + room)
            pieces.append(_Piece(numbers, start, stop))
            room = room - (stop - start)
            start = stop
            if not room:
                yield pieces
                pieces = []
                room = most
    if pieces:
        yield pieces


def _exchange(pieces: Sequence[_Piece]) -> None:
    """Receive all others' numbers of the pieces, by one collective. Collective."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    sizes = [piece.stop - piece.start for piece in pieces]
    sent = pieces[0].numbers.new_zeros(sum(sizes))  # zeros where a part is shorter than the first rank's
    for (numbers, start, stop), into in zip(pieces, sent.split(sizes), strict=True):
        own = _part(numbers, rank)[start:stop]
        into[: len(own)] = own
    received = agree.rows(sent).view(world, -1).split(sizes, dim=1)
    for (numbers, start, stop), each in zip(pieces, received, strict=True):
        size = _part_size(numbers)
        whole = len(numbers) // size  # ranks whose parts are as large; the next one has the rest
        numbers[: whole * size].view(whole, size)[:, start:stop] = each[:whole]
        rest = numbers[whole * size :][start:stop]
        if len(rest):
            rest.copy_(each[whole, : len(rest)])


def _part(whole: Tensor, rank: int) -> Tensor:
    """A rank's part of the numbers in a row; parts of all ranks are the whole. None is larger than the first one's."""
    numbers = whole.view(-1)
    size = _part_size(whole)
    return numbers[size * rank : size * (rank + 1)]


def _part_size(whole: Tensor) -> int:
    """Numbers of the first rank's part, the largest one."""
    return -(-whole.numel() // dist.get_world_size())
