"""The errors of a step, quantity by quantity, and their bounds."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlplus.tools.verify.float64 import Constants, Loss, Own, compute, logprob_and_entropy
from rlplus.tools.verify.taken import Accumulated, Taken

SINGLE = torch.finfo(torch.float32).eps
TOGETHER = "gradient of all parameters"


class Row(NamedTuple):
    """A quantity's error against its definition in float64, in `unit`, and the bound of that error.

    plain: the error of the plain model in the run's dtype; None where no model's rounding is in the quantity.
    """

    quantity: str
    error: float
    bound: float
    unit: str
    plain: float | None = None

    @property
    def right(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


def compare_constants(taken: Taken, constants: Sequence[Constants]) -> list[Row]:
    """All samples of the update: tokens in the micro-batches, advantages and weights, bounded by fp32's rounding."""
    samples = taken.update.samples
    wrong = 0
    advantage = [torch.zeros(1)]
    weight = [torch.zeros(1)]
    for index, c in enumerate(constants):
        place = taken.places.get(index)
        if place is None:
            wrong += len(c.advantage) if c.trained.any() else 0
            given = torch.tensor(samples[index].advantage, dtype=torch.float64)
            advantage.append((given - c.advantage).abs())
            continue
        batch = taken.micro_batches[place.batch]
        entries = place.entries.cpu()
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


class _Tokens:
    """Errors of a quantity of every token, in nats, and its rounding in fp32, in which its sums are computed.

    In half precision a few tokens have errors of twenty times the root mean square, and other tokens where rounding
    differs. So the mean absolute error, which they hardly change, has the narrow bound, and the largest error a wide
    one. In the mean, signs cancel: it shows what moves all tokens a little.
    """

    def __init__(self) -> None:
        self.trainer: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.size = 0.0

    def add(self, exact: Tensor, plain: Tensor, trainer: Tensor | None) -> None:
        """Add a sequence, each (T,). trainer: None where it has no finite values."""
        self.plain.append(plain - exact)
        self.trainer.append(torch.full_like(exact, torch.inf) if trainer is None else trainer.double() - exact)
        self.size = max(self.size, float(exact.abs().max()))

    def rows(self, name: str) -> list[Row]:
        """No row if no sequence was added."""
        if not self.plain:
            return []
        trainer = torch.cat(self.trainer)
        plain = torch.cat(self.plain)
        n = len(plain)
        rms = float(plain.square().mean().sqrt())
        rounding = 8 * SINGLE * self.size
        yardstick = typical, largest, mean = _summary(plain)
        bounds = (2 + 64 / n) * typical, 6 * largest + 40 * rms, 2 * mean + (1 / 8 + 8 / n**0.5) * rms
        parts = zip(("mean absolute", "largest", "mean"), _summary(trainer), bounds, yardstick, strict=True)
        return [Row(f"{name}, {part}", error, bound + rounding, "nats", own) for part, error, bound, own in parts]


def _summary(errors: Tensor) -> tuple[float, float, float]:
    """The mean absolute error, the largest, and the mean one without its sign."""
    return float(errors.abs().mean()), float(errors.abs().max()), float(errors.mean().abs())


class _Sum:
    """A gradient: a sum over sequences, in float64, and the plain model's error of it.

    The plain error is the sum's or, if larger, the root of the sequences' squared errors: rounding errors of the
    sequences may cancel by chance.
    """

    def __init__(self) -> None:
        self.exact = torch.zeros((), dtype=torch.float64)
        self.rounded = torch.zeros((), dtype=torch.float64)
        self.squares = self.terms = 0.0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        """Add a sequence's part."""
        self.exact = self.exact + exact
        self.rounded = self.rounded + rounded
        self.squares += float((rounded - exact).square().sum())
        self.terms += float(exact.norm())

    @property
    def size(self) -> float:
        """The norm."""
        return float(self.exact.norm())

    @property
    def plain(self) -> float:
        """The plain model's error."""
        return max(float((self.rounded - self.exact).norm()), self.squares**0.5)

    def error(self, trainer: Tensor) -> float:
        """The trainer's error."""
        return float((trainer.double() - self.exact).norm())


def _gradient_rows(sums: Mapping[str, _Sum], computed: Accumulated, eps: Mapping[str, float]) -> list[Row]:
    """First all parameters' row. eps: the rounding of a sequence's part, relative, by parameter.

    A parameter's bound is two and a half times its plain error and the median one of its kind in all layers: the
    gradient of a norm has few large elements, whose rounding may be small in the plain model by chance.
    """
    kinds: dict[str, list[float]] = {}
    for name, s in sums.items():
        kinds.setdefault(_kind(name), []).append(s.plain / (s.size or 1.0))
    rows = []
    squares = [0.0] * 4
    for name, s in sums.items():
        size = s.size or 1.0
        error = s.error(computed.gradients[name])
        rounding = eps[name] * s.terms
        bound = 2.5 * (s.plain / size + median(kinds[_kind(name)])) + rounding / size
        rows.append(Row(f"gradient of {name}", error / size, bound, "of its norm", s.plain / size))
        parts = (error, s.plain, 2 * s.plain + rounding, s.size)
        squares = [total + part**2 for total, part in zip(squares, parts, strict=True)]
    error, plain, bound, size = [total**0.5 for total in squares]
    size = size or 1.0
    return [Row(TOGETHER, error / size, bound / size, "of its norm", plain / size), *rows]


def _kind(name: str) -> str:
    return re.sub(r"\d+", "", name)


def compare_computed(
    models: Sequence[PreTrainedModel],
    constants: Mapping[int, Constants],
    references: Mapping[int, Sequence[Tensor]],
    computed: Accumulated,
    loss: Loss,
    temperature: float,
) -> list[Row]:
    """Logprobs, entropies, loss and gradients of some samples.

    models: in float64, and in the run's dtype, the yardstick. constants, references: by index of the sample, and the
    logprobs (T,) under the frozen reference by both models, if there is one. A gradient's bound has the rounding of
    the sequences' parts: to the weights' dtype, or eight times to fp32, in which a GPU adds in other orders than the
    plain model on the CPU. The loss's bound is eight roundings of its terms, see `Loss`.
    """
    exact_model, plain_model = models
    names = ("logprob", "entropy", "logprob before the update", "reference's logprob")
    logprob, entropy, before, reference = tokens = [_Tokens() for _ in names]
    sums = {name: _Sum() for name in computed.gradients}
    total = terms = 0.0
    for index, c in constants.items():
        own = _finite(computed.own.get(index), len(c.advantage))
        given = own or _of_model(exact_model, c, references.get(index), temperature)
        right = compute(exact_model, c, given, loss, temperature)
        plain = compute(plain_model, c, given, loss, temperature)
        logprob.add(right.logprob, plain.logprob, None if own is None else own.logprob)
        entropy.add(right.entropy, plain.entropy, None if own is None else own.entropy)
        if own is not None and own.before is not None:
            before.add(right.logprob, plain.logprob, own.before)
        if index in references:
            frozen, rounded = references[index]
            reference.add(frozen, rounded, None if own is None else own.ref)
        total = total + right.loss
        terms = terms + right.terms
        for name, sum_of in sums.items():
            sum_of.add(right.gradients[name], plain.gradients[name])
    rows = [row for quantity, name in zip(tokens, names, strict=True) for row in quantity.rows(name)]
    size = terms or 1.0
    rows.append(Row("loss", abs(computed.loss - total) / size, 8 * SINGLE, "of its terms"))
    eps = {name: max(torch.finfo(p.dtype).eps / 2, 4 * SINGLE) for name, p in plain_model.named_parameters()}
    return [*rows, *_gradient_rows(sums, computed, eps)]


def _of_model(lm: PreTrainedModel, c: Constants, references: Sequence[Tensor] | None, temperature: float) -> Own:
    """The model's values, for a sequence that the trainer has none of."""
    with torch.no_grad():
        return Own(*logprob_and_entropy(lm, c.sample, temperature), ref=None if references is None else references[0])


def _finite(own: Own | None, count: int) -> Own | None:
    """None where values are missing, too many or too few, or not finite."""
    if own is None or any(x is not None and (len(x) != count or not x.isfinite().all()) for x in own):
        return None
    return own
