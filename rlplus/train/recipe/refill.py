"""Repeated draws until a step has enough groups with a training signal."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from rlplus.common import agree
from rlplus.common.errors import SharedFailure
from rlplus.train.algorithm import Refill
from rlplus.train.config import TrainConfig
from rlplus.train.data import Example, Sample
from rlplus.train.recipe.plain import Batch

Group = tuple[Example, list[Sample]]
Place = tuple[int, int, int]  # a group's draw, its number there, its rank: sorts in the sampler's order


class Refilled(NamedTuple):
    """This rank's share of a step; over all ranks, the number of draws, and of the groups in them that were kept."""

    batch: Batch
    draws: int
    kept: int


def refill_batch(draw: Callable[[], Batch], options: Refill, train: TrainConfig) -> Refilled:
    """Draw until all ranks together have kept `train.prompts_per_step` groups, divided equally. Collective.

    The step has the first groups that were kept, in the sampler's order, whatever the number of ranks; the others of
    the last draw are dropped, as in DAPO's code. Each mini-batch has the same groups as on a single rank; if a rank has
    too many of them, the surplus moves to other ranks.
    After `options.max_draws` the first dropped groups follow (`options.fill`), or it raises SharedFailure. The
    first draw's are enough, since a draw has as many groups as a step.
    """
    own: dict[Place, Group] = {}
    kept: list[Place] = []
    dropped: list[Place] = []
    seconds = 0.0
    draws = 0
    while len(kept) < train.prompts_per_step and draws < options.max_draws:
        batch = draw()
        groups: list[list[Sample]] = [[] for _ in batch.examples]
        for sample in batch.samples:
            groups[sample.group].append(sample)
        here = {(draws, number, dist.get_rank()): group for number, group in enumerate(groups)}
        wanted = {place: _keeps(options, group) for place, group in here.items()}
        spare = options.fill and draws == 0
        own |= {place: (batch.examples[place[1]], here[place]) for place in here if wanted[place] or spare}
        for place, is_wanted in sorted(item for part in agree.gathered(wanted) for item in part.items()):
            if is_wanted:
                kept.append(place)
            elif spare:
                dropped.append(place)
        seconds = seconds + batch.seconds
        draws = draws + 1
    if len(kept) < train.prompts_per_step and not options.fill:
        raise SharedFailure(
            f"want {train.prompts_per_step} groups of rollouts whose rewards differ, with a mean in "
            f"[{options.low:g}, {options.high:g}]; found {len(kept)} in {draws} draws of {train.prompts_per_step} "
            "prompts. Take problems that are neither too hard nor too easy, raise algorithm.refill.max_draws, or let "
            "algorithm.refill.fill take other groups in their place"
        )
    mine = _move(own, [*kept, *dropped][: train.prompts_per_step], train)
    for number, (_, samples) in enumerate(mine):
        for sample in samples:
            sample.group = number
    examples = [example for example, _ in mine]
    return Refilled(Batch(examples, [sample for _, samples in mine for sample in samples], seconds), draws, len(kept))


def _keeps(options: Refill, group: Sequence[Sample]) -> bool:
    return options.keeps([sample.reward for sample in group if not sample.demonstration])


def _move(own: dict[Place, Group], chosen: Sequence[Place], train: TrainConfig) -> list[Group]:
    """Move surplus groups to other ranks; returns this rank's groups, in order. Collective."""
    rank = dist.get_rank()
    size = train.prompts_per_update or train.prompts_per_step
    owners: list[int] = []
    for start in range(0, len(chosen), size):
        owners += _owners([home for *_, home in chosen[start : start + size]], dist.get_world_size())
    leaving = {place: own[place] for place, owner in zip(chosen, owners, strict=True) if place[2] == rank != owner}
    for moved in agree.gathered(leaving):
        own = own | moved
    return [own[place] for place, owner in zip(chosen, owners, strict=True) if owner == rank]


def _owners(homes: Sequence[int], world: int) -> list[int]:
    """A rank for each group, given the one that has it: equal numbers, and no unnecessary moves."""
    room = [len(homes) // world] * world
    stays = []
    for home in homes:
        stays.append(room[home] > 0)
        room[home] -= stays[-1]
    free = (rank for rank, left in enumerate(room) for _ in range(left))
    return [home if stay else next(free) for home, stay in zip(homes, stays, strict=True)]
