"""The trainer's own step, up to its gradients: by the objects of `rlplus.train.trainer`, as `train_step` takes it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from rlplus.loss import PolicyLoss
from rlplus.tools.verify.float64 import Own
from rlplus.train.algorithm import Algorithm
from rlplus.train.data import MicroBatch, Sample, per_token
from rlplus.train.learner import has_gradient
from rlplus.train.recipe import Batch, Update
from rlplus.train.trainer import Run
from rlplus.train.trainer.loop import Step


class Place(NamedTuple):
    """A sample's place: its micro-batch, its first token in the flattened rows, and its entries in per-token arrays.

    entries (n,) int64: those whose `rows` lie within the sample.
    """

    batch: int
    start: int
    entries: Tensor


@dataclass
class Taken:
    """The first update of a step: its samples' places in the micro-batches, as they were before the policy was asked.

    batch: the step's, with advantages. places: by index into `update.samples`; a sample without a loss has none.
    """

    batch: Batch
    update: Update
    micro_batches: list[MicroBatch]
    places: dict[int, Place]
    step: Step


@dataclass
class Accumulated:
    """The trainer's results for some samples.

    own: by index of the sample. gradients: by parameter. weights: the policy's.
    """

    own: dict[int, Own]
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def take(run: Run) -> Taken:
    """Draw, grade, credit and pack the next step. ValueError if no sample has a gradient."""
    step = Step(run)
    batch = step.collect()
    step.credit(batch)
    for update in run.recipe.updates(batch):
        update, micro_batches = step.pack(update)
        if has_gradient(micro_batches):
            return Taken(batch, update, [*micro_batches], _places(update.samples, micro_batches), step)
    raise ValueError(
        f"step {run.progress.step + 1} has no update to verify: {run.recipe.options.no_update}. Choose another "
        "checkpoint with --step"
    )


def _places(samples: Sequence[Sample], micro_batches: Sequence[MicroBatch]) -> dict[int, Place]:
    """Find samples by their tokens. Among equal ones it does not matter which is which, unless their rewards differ."""
    found: dict[tuple[int, ...], list[Place]] = {}
    for number, batch in enumerate(micro_batches):
        for start, tokens in _sequences(batch):
            inside = (batch.rows >= start) & (batch.rows < start + len(tokens))
            if inside.any():  # else it is padding
                found.setdefault(tokens, []).append(Place(number, start, inside.nonzero().squeeze(1)))

    def order(place: Place) -> tuple[float, ...]:
        batch = micro_batches[place.batch]
        return batch.external[place.entries[0]].item(), batch.advantage[place.entries[0]].item()

    wanted: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        wanted.setdefault((*sample.prompt, *sample.response), []).append(index)
    places: dict[int, Place] = {}
    for tokens, indices in wanted.items():
        here = sorted(found.get(tokens, []), key=order)
        if len(here) < len(indices):  # those without a loss are left out
            indices = [i for i in indices if any(samples[i].loss_tokens)] or indices
        ordered = sorted(indices, key=lambda i: (_first(samples[i].external), _first(samples[i].advantage)))
        places |= dict(zip(ordered, here, strict=False))
    return places


def _first(value: float | Sequence[float]) -> float:
    return next(iter(per_token(value, 1)))


def _sequences(batch: MicroBatch) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The start of each sequence in the flattened rows, and its tokens: positions restart at 0."""
    ids = batch.input_ids.flatten().tolist()
    first = batch.position_ids.flatten() == 0
    starts = [*first.nonzero().flatten().tolist(), len(ids)]
    for start, end in pairwise(starts):
        yield start, tuple(ids[start:end])


def accumulate(run: Run, taken: Taken, chosen: Sequence[int]) -> Accumulated:
    """Run the update's forward and backward passes with weights for the chosen samples only, in the same rows."""
    step = taken.step
    micro_batches = taken.micro_batches
    places = {index: taken.places[index] for index in chosen if index in taken.places}
    seen: list[MicroBatch] = []
    before: dict[int, Tensor] = {}  # by number of the micro-batch
    policy = run.policy
    forward_backward = run.policy.backward
    statistics = run.policy.statistics

    def restricted(batches: Sequence[MicroBatch], *args: Any, **kwargs: Any) -> list[PolicyLoss]:
        seen.extend(batches)
        entries = [[p.entries for p in places.values() if p.batch == number] for number in range(len(batches))]
        parts = [_only(batch, on) for batch, on in zip(batches, entries, strict=True)]
        return forward_backward(parts, *args, **kwargs)

    def recorded(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        found = statistics(batch)
        before.update((number, found[0]) for number, known in enumerate(micro_batches) if known is batch)
        return found

    policy.backward = restricted  # type: ignore[method-assign]
    policy.statistics = recorded  # type: ignore[method-assign]
    step.remember([(taken.update, micro_batches)])
    outputs = step.accumulate(taken.update, micro_batches)
    left = [_left(batch, taken.update.algorithm) for batch in seen]
    own = {}
    for index, (number, _, entries) in places.items():
        if number < len(outputs):
            out = outputs[number]
            values = (before.get(number), seen[number].ref_logprob, left[number])
            chosen_values = (None if value is None else value[entries].cpu() for value in values)
            own[index] = Own(out.logprob[entries].cpu(), out.entropy[entries].cpu(), *chosen_values)
    parameters = dict(policy.engine.module.lm.named_parameters())
    with deepspeed.zero.GatheredParameters([*parameters.values()]):
        weights = {name: p.detach().cpu().clone() for name, p in parameters.items()}
    trained = {name: safe_get_full_grad(p) for name, p in parameters.items() if p.requires_grad}
    loss = float(sum(out.loss.double() for out in outputs))
    return Accumulated(own, loss, {name: g.detach().cpu() for name, g in trained.items()}, weights)


def _left(batch: MicroBatch, algorithm: Algorithm) -> Tensor:
    """(N,) bool: whether the shares of tokens with the highest entropies left a token its surrogate."""
    whole = algorithm.external_top_entropy == 1, algorithm.top_entropy == 1
    return (batch.advantage != 0) | torch.where(batch.external, *whole)


def _only(batch: MicroBatch, entries: Sequence[Tensor]) -> MicroBatch:
    """The micro-batch with weights at these entries alone."""
    on = torch.zeros_like(batch.external)
    for places in entries:
        on[places] = True
    bonus = batch.entropy_weight
    return replace(
        batch,
        token_weight=batch.token_weight.masked_fill(~on, 0.0),
        entropy_weight=None if bonus is None else bonus.masked_fill(~on, 0.0),
    )
