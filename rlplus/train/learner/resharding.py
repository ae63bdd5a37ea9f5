"""A checkpoint of another number of ranks: each rank reads its part of weights and moments from all ranks' shards.

DeepSpeed itself loads one after its converter has written every parameter into files of their own (decision 027). Here
the shards are mapped, so that a rank reads little more than its part, and no bit changes on the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from rlplus.train.checkpoint import load_weights


class Piece(NamedTuple):
    """A rank's part of a parameter: `length` numbers from `start` on in the flat tensor of its group.

    first: the number of the parameter that is there.
    """

    group: int
    start: int
    first: int
    length: int


Layout = Mapping[str, Piece]  # places of parameters, by name, in one rank's flat tensors
Shapes = Sequence[Mapping[str, torch.Size]]  # a group's parameters in their order, for each group


def load_resharded(engine: Any, place: Path, ranks: int) -> None:
    """Restore a DeepSpeed engine from the checkpoint of that many ranks in a folder, as its `load_checkpoint` would.

    Collective. ValueError if a number of a parameter is in no shard.
    """
    stage3 = engine.zero_optimization_stage() == 3
    files = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(ranks if stage3 else 0)]
    models = [_read(place / name) for name in files or ["mp_rank_00_model_states.pt"]]
    shards = [_read(_optimizer_file(place, r))[OPTIMIZER_STATE_DICT] for r in range(ranks)]
    model = models[0]
    if stage3:
        engine.optimizer.checkpoint_event_prologue()
        if model.get(FROZEN_PARAM_FRAGMENTS):
            model[FROZEN_PARAM_FRAGMENTS] = _frozen(models)
    engine.load_module_state_dict(model, custom_load_fn=load_weights)
    for count in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, count, model[count])
    state = _stage3_state(engine, model, shards) if stage3 else _state(engine, model, shards)
    every = [state] * dist.get_world_size()  # DeepSpeed takes this rank's
    engine.optimizer.load_state_dict(every, load_from_fp32_weights=True)
    if stage3:
        engine.optimizer.checkpoint_event_epilogue()


def _read(file: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    return saved


def _optimizer_file(place: Path, rank: int) -> Path:
    (file,) = place.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")  # bf16_ comes before it, or nothing
    return file


def _state(engine: Any, model: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state on this rank under ZeRO-1 and 2, whose ranks divide all parameters' numbers in one row."""
    state: dict[str, Any] = engine.optimizer.state_dict()
    here = _in_a_row(engine._get_zero_param_shapes(), sizes := _sizes(state), dist.get_rank())
    before = [_in_a_row(model[PARAM_SHAPES], _sizes(shard), rank) for rank, shard in enumerate(shards)]
    move = _Move(here, sizes, before)
    state[SINGLE_PARTITION_OF_FP32_GROUPS] = move.flat([shard[SINGLE_PARTITION_OF_FP32_GROUPS] for shard in shards])
    state[BASE_OPTIMIZER_STATE]["state"] = move.states([shard[BASE_OPTIMIZER_STATE]["state"] for shard in shards])
    return state


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """The lengths of a rank's flat tensors, with the padding that DeepSpeed leaves out of the weights."""
    weights = state[SINGLE_PARTITION_OF_FP32_GROUPS]
    return [len(flat) + padding for flat, padding in zip(weights, state[GROUP_PADDINGS], strict=True)]


def _stage3_state(engine: Any, model: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state on this rank under ZeRO-3, whose ranks divide each parameter."""
    state: dict[str, Any] = engine.optimizer.state_dict()
    here = _in_parts(engine._get_zero_param_shapes(), dist.get_rank(), dist.get_world_size())
    before = [_in_parts(model[PARAM_SHAPES], rank, len(shards)) for rank in range(len(shards))]
    move = _Move(here, [x.numel() for x in state[FP32_FLAT_GROUPS]], before)
    state[FP32_FLAT_GROUPS] = move.flat([shard[FP32_FLAT_GROUPS] for shard in shards])
    state[OPTIMIZER_STATE_DICT]["state"] = move.states([shard[OPTIMIZER_STATE_DICT]["state"] for shard in shards])
    return state


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """This rank's parts of the parameters that do not train, where ZeRO-3 has them in its checkpoint."""
    shapes = [{name: shape} for name, shape in models[0][FROZEN_PARAM_SHAPES].items()]  # a flat tensor for each
    ranks = len(models)
    world = dist.get_world_size()
    rank = dist.get_rank()
    before = [_in_parts(shapes, r, ranks) for r in range(ranks)]
    sizes = [_part(shape, world) for each in shapes for shape in each.values()]
    names = [name for each in shapes for name in each]
    parts = [[model[FROZEN_PARAM_FRAGMENTS][name].flatten() for name in names] for model in models]
    return dict(zip(names, _Move(_in_parts(shapes, rank, world), sizes, before).flat(parts), strict=True))


def _in_a_row(groups: Shapes, sizes: Sequence[int], rank: int) -> Layout:
    """A rank's layout: so many of the numbers of each group, of which earlier ranks have the first ones."""
    layout = {}
    for group, (shapes, size) in enumerate(zip(groups, sizes, strict=True)):
        start = -rank * size  # where the parameter begins; earlier ranks may have that place
        for name, shape in shapes.items():
            low = max(0, start)
            high = min(size, start + shape.numel())
            if low < high:
                layout[name] = Piece(group, low, low - start, high - low)
            start += shape.numel()
    return layout


def _in_parts(groups: Shapes, rank: int, ranks: int) -> Layout:
    """A rank's layout: equal parts of each parameter, the last one filled up."""
    layout = {}
    for group, shapes in enumerate(groups):
        start = 0
        for name, shape in shapes.items():
            size = _part(shape, ranks)
            layout[name] = Piece(group, start, rank * size, max(0, min(size, shape.numel() - rank * size)))
            start += size
    return layout


def _part(shape: torch.Size, ranks: int) -> int:
    return -(-shape.numel() // ranks)


class _Move(NamedTuple):
    """Moves numbers from the layouts `before` to this rank's, `here`, whose flat tensors have these sizes."""

    here: Layout
    sizes: Sequence[int]
    before: Sequence[Layout]

    def flat(self, saved: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """This rank's flat tensors, from every rank's that saved; 0 where no parameter is."""
        own = [torch.zeros(size, dtype=saved[0][0].dtype) for size in self.sizes]
        for name, piece in self.here.items():
            left = piece.length
            for rank, start, first, count in self._overlaps(name, piece):
                group = self.before[rank][name].group
                own[piece.group][start : start + count] = saved[rank][group][first : first + count]
                left -= count
            if left:
                raise ValueError(f"want {piece.length} numbers of {name} from number {piece.first}; {left} are missing")
        return own

    def _overlaps(self, name: str, piece: Piece) -> Iterator[tuple[int, int, int, int]]:
        """The ranks that have numbers of the piece: where they are to be, where they are, and how many."""
        for rank, layout in enumerate(self.before):
            if (other := layout.get(name)) is not None:
                low = max(piece.first, other.first)
                high = min(piece.first + piece.length, other.first + other.length)
                if low < high:
                    yield rank, piece.start + low - piece.first, other.start + low - other.first, high - low

    def states(self, saved: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
        """This rank's state of the optimizer by group: tensors as long as the flat ones, and numbers that all share."""
        if not saved[0]:  # no update was made
            return {}
        own: dict[int, dict[str, Any]] = {group: {} for group in range(len(self.sizes))}
        for key, value in saved[0][0].items():
            if torch.is_tensor(value) and value.ndim:
                every = self.flat([[rank[group][key] for group in sorted(rank)] for rank in saved])
            else:
                every = [deepcopy(value) for _ in self.sizes]  # the optimizer counts each group's steps in place
            for group, mine in enumerate(every):
                own[group][key] = mine
        return own
