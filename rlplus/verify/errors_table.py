"""The errors of a step, quantity by quantity, and their bounds."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlplus.verify.float64 import Computed, Constants, Loss, compute
from rlplus.verify.taken import Accumulated, Taken

SINGLE = torch.finfo(torch.float32).eps


class Row(NamedTuple):
    """A quantity's error against its definition in float64, in `unit`, and the bound of that error."""

    quantity: str
    error: float
    bound: float
    unit: str

    @property
    def right(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


def compare_constants(taken: Taken, constants: Sequence[Constants]) -> list[Row]:
    """All samples of the update: tokens in the micro-batches, advantages and weights, bounded by fp32's rounding."""
    samples = taken.update.samples
    wrong = 0
    advantage, weight = [torch.zeros(1)], [torch.zeros(1)]
    for index, c in enumerate(constants):
        place = taken.places.get(index)
        if place is None:
            wrong += len(c.advantage) if c.trained.any() else 0
            given = torch.tensor(samples[index].advantage, dtype=torch.float64)
            advantage.append((given - c.advantage).abs())
            continue
        batch, entries = taken.micro_batches[place.batch], place.entries.cpu()
        count = len(c.sample.response)
        if len(entries) != count:
            wrong += max(count, len(entries))
            continue
        rows = place.start + len(c.sample.prompt) - 1 + torch.arange(count)
        same = (batch.rows.cpu()[entries] == rows) & (batch.external.cpu()[entries] == c.external)
        wrong += int((~(same & (batch.target.cpu()[entries] == torch.tensor([*c.sample.response])))).sum())
        advantage.append((batch.advantage.cpu()[entries].double() - c.advantage).abs())
        weight.append((batch.token_weight.cpu()[entries].double() - c.weight * c.trained).abs())
        if batch.entropy_weight is not None:
            weight.append((batch.entropy_weight.cpu()[entries].double() - c.entropy_weight).abs())
    largest = max((float(c.advantage.abs().max()) for c in constants), default=0.0)
    heaviest = max((float(w.abs().max()) for c in constants for w in (c.weight, c.entropy_weight)), default=0.0) or 1.0
    return [
        Row("tokens in micro-batches", wrong, 0.0, "wrong or missing"),
        Row("advantage", float(torch.cat(advantage).max()), SINGLE * largest, ""),
        Row("token weight", float(torch.cat(weight).max()) / heaviest, SINGLE, "of the largest"),
    ]


class _Sum:
    """A gradient: a sum over sequences, in float64, and the plain model's error of it.

    The plain error is the sum's or, if larger, the root of the sequences' squared errors: rounding errors of the
    sequences may cancel by chance.
    """

    def __init__(self) -> None:
        self.exact, self.plain = (torch.zeros((), dtype=torch.float64) for _ in range(2))
        self.squares = self.terms = 0.0

    def add(self, exact: Tensor, plain: Tensor) -> None:
        """Add a sequence's part."""
        self.exact, self.plain = self.exact + exact, self.plain + plain
        self.squares += float((plain - exact).square().sum())
        self.terms += float(exact.norm())

    def row(self, name: str, trainer: Tensor, rounding: float) -> tuple[Row, float]:
        """The row, relative to the norm, and the norm. rounding: a sequence's part's, relative."""
        size = float(self.exact.norm()) or 1.0
        plain = max(float((self.plain - self.exact).norm()), self.squares**0.5)
        error, bound = float((trainer.double() - self.exact).norm()), 2 * plain + rounding * self.terms
        return Row(name, error / size, bound / size, "of its norm"), size


class _Total:
    """The loss: a sum of parts that may cancel, whose errors are the logprobs' and entropies' times its slopes."""

    def __init__(self) -> None:
        self.exact = self.terms = self.plain = 0.0
        self.slopes, self.errors = [0.0, 0.0], [0.0, 0.0]  # one by logprob, one by entropy

    def add(self, exact: Computed, plain: Computed) -> None:
        self.exact += float(exact.losses.sum())
        self.plain += float((plain.losses - exact.losses).abs().sum())
        self.terms += float(exact.losses.abs().sum())
        pairs = ((exact.logprob, plain.logprob), (exact.entropy, plain.entropy))
        for i, (slope, (right, rounded)) in enumerate(zip(exact.slopes, pairs, strict=True)):
            self.slopes[i] += float(slope.abs().sum())
            self.errors[i] = max(self.errors[i], float((rounded - right).abs().max()))

    def row(self, trainer: float) -> Row:
        first_order = sum(slope * error for slope, error in zip(self.slopes, self.errors, strict=True))
        bound = 2 * self.plain + first_order + 8 * SINGLE * self.terms
        size = self.terms or 1.0
        return Row("loss", abs(trainer - self.exact) / size, bound / size, "of its parts")


def compare_computed(
    exact: PreTrainedModel,
    plain: PreTrainedModel,
    constants: Mapping[int, tuple[Constants, Constants]],
    computed: Accumulated,
    loss: Loss,
    temperature: float,
) -> tuple[list[Row], int]:
    """Logprobs, loss and gradients of some samples, and how many tokens rounding moved over a bound of their ratio.

    constants: for the model in float64 and for the plain one, by index of the sample. A gradient's bound is twice the
    plain model's error, and the rounding of the sequences' parts: to the weights' dtype, or eight times to fp32, in
    which a GPU adds in other orders than the plain model on the CPU.
    """
    logprob, reference, total = _Largest(), _Largest(), _Total()
    sums = {name: _Sum() for name in computed.gradients}
    near = 0
    for index, (c, rounded) in constants.items():
        theirs = computed.logprobs.get(index)
        if theirs is not None and len(theirs) != len(c.advantage):
            theirs = None
        right = compute(exact, c, theirs, loss, temperature)
        yardstick = compute(plain, rounded, theirs, loss, temperature)
        near += right.near
        logprob.add(right.logprob, yardstick.logprob, theirs)
        if c.ref is not None and rounded.ref is not None:
            reference.add(c.ref, rounded.ref, computed.references.get(index))
        total.add(right, yardstick)
        for name, sum_of in sums.items():
            sum_of.add(right.gradients[name], yardstick.gradients[name])
    rows = [logprob.row("logprob"), *([reference.row("reference's logprob")] if reference.size else [])]
    rows.append(total.row(computed.loss))
    eps = {name: max(torch.finfo(p.dtype).eps / 2, 4 * SINGLE) for name, p in plain.named_parameters()}
    each = [s.row(f"gradient of {name}", computed.gradients[name], eps[name]) for name, s in sums.items()]
    return [*rows, _together(each), *(row for row, _ in each)], near


def _together(each: Sequence[tuple[Row, float]]) -> Row:
    errors, bounds, sizes = (
        float(torch.tensor(values, dtype=torch.float64).norm())
        for values in zip(*((row.error * size, row.bound * size, size) for row, size in each), strict=True)
    )
    return Row("gradient of all parameters", errors / sizes, bounds / sizes, "of its norm")


class _Largest:
    """The largest error of logprobs, in nats; fp32 computes their sums."""

    def __init__(self) -> None:
        self.error = self.plain = self.size = 0.0

    def add(self, exact: Tensor, plain: Tensor, trainer: Tensor | None) -> None:
        self.plain = max(self.plain, float((plain - exact).abs().max()))
        self.size = max(self.size, float(exact.abs().max()))
        missing = trainer is None or trainer.shape != exact.shape
        error = float("inf") if trainer is None or missing else float((trainer.double() - exact).abs().max())
        self.error = max(self.error, error) if error == error else float("inf")

    def row(self, name: str) -> Row:
        return Row(name, self.error, 2 * self.plain + 8 * SINGLE * self.size, "nats")
