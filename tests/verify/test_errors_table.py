"""Bounds of `rlplus verify` on errors with the tail that bf16 has: right runs are right, and faults are found."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from rlplus.tools.verify import Verification
from rlplus.tools.verify.errors_table import TOGETHER, Row, _gradient_rows, _Sum, _Tokens
from rlplus.tools.verify.float64 import Constants, Loss, Own
from rlplus.tools.verify.taken import Accumulated
from rlplus.tools.verify.verify_text import SHOWN, show
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.data import Sample

LAYERS = 30


def heavy(*shape: int, seed: int) -> Tensor:
    """Errors with a heavier tail than those of SmolLM2-135M-Instruct in bf16, whose largest of 25,000 was 1.1 nats.

    Student's t with 2.5 degrees of freedom, up to 1.5.
    """
    generator = np.random.default_rng(seed)
    return torch.from_numpy(0.025 * generator.standard_t(2.5, shape)).clamp(-1.5, 1.5)


def rows(trainer: Tensor | None, plain: Tensor) -> list[Row]:
    """Two sequences of equal length, or one. The exact values have no part in it but for fp32's rounding."""
    tokens, exact = _Tokens(), torch.full_like(plain, -1.0)
    half = len(plain) // 2
    for part in (slice(None, half), slice(half, None)):
        tokens.add(exact[part], (exact + plain)[part], None if trainer is None else (exact + trainer)[part])
    return tokens.rows("logprob")


def wrong(trainer: Tensor | None, plain: Tensor) -> list[str]:
    return [row.quantity.removeprefix("logprob, ") for row in rows(trainer, plain) if not row.right]


@pytest.mark.parametrize("n", [128, 512, 4096])
def test_errors_with_a_heavy_tail_are_right_however_they_fall(n):
    """Twice the plain model's largest error, the bound of a light tail, would be passed by one run in ten."""
    beyond = 0
    for seed in range(300):
        trainer, plain = heavy(2, n, seed=seed)
        assert not wrong(trainer, plain)
        beyond += bool(trainer.abs().max() > 2 * plain.abs().max())
    assert beyond > 30 or n > 512  # where nearly all have one at 1.5


def test_few_tokens_have_wider_bounds():
    """Means of eight values: of two runs with equal errors, one often has twice the other's."""
    beyond = 0
    for seed in range(1000):
        trainer, plain = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, (2, 8)))
        assert not wrong(trainer, plain)
        beyond += bool(trainer.abs().mean() > 2 * plain.abs().mean())
    assert beyond > 10


def test_faults_are_found_in_the_row_that_shows_them():
    for seed in range(50):
        trainer, plain = heavy(2, 512, seed=seed).clamp(-0.5, 0.5)
        one = trainer.clone()
        one[100] += 8
        assert wrong(one, plain) == ["largest"]
        assert wrong(trainer + 0.04, plain) == ["mean"]
        assert wrong(trainer - 0.04, plain) == ["mean"]
        assert wrong(3 * trainer, plain) == ["mean absolute"]
        assert wrong(None, plain) == ["mean absolute", "largest", "mean"]
        missing = trainer.clone()
        missing[3] = math.nan
        assert wrong(missing, plain) == ["mean absolute", "largest", "mean"]


def test_rows_have_the_plain_models_errors_beside_the_trainers():
    plain, trainer = torch.tensor([0.5, -0.25, 0.25, -0.1]), torch.tensor([0.1, 0.1, -0.3, -0.1])
    found = rows(trainer.double(), plain.double())
    assert [row.plain for row in found] == pytest.approx([0.275, 0.5, 0.1])
    assert [row.error for row in found] == pytest.approx([0.15, 0.3, 0.05])
    assert {row.unit for row in found} == {"nats"}


class Gradients:
    """Two kinds of parameters in every layer: exact, by a plain model and by a trainer, with errors of 6 %."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"layers.{}.norm.weight": 3, "layers.{}.proj.weight": 600}
        self.exact: dict[str, Tensor] = {}
        self.plain: dict[str, Tensor] = {}
        self.trainer: dict[str, Tensor] = {}
        for kind, n in sizes.items():
            for layer in range(LAYERS):
                name = kind.format(layer)
                g, e, p = torch.randn(3, n, dtype=torch.float64, generator=generator)
                scale = 0.06 * g.norm() / n**0.5
                self.exact[name], self.trainer[name], self.plain[name] = g, g + scale * e, g + scale * p

    def wrong(self) -> list[str]:
        sums = {name: _Sum() for name in self.exact}
        for name, s in sums.items():
            s.add(self.exact[name], self.plain[name])
        computed = Accumulated({}, 0.0, self.trainer, {})
        found = _gradient_rows(sums, computed, dict.fromkeys(sums, 0.0))
        assert [row.quantity for row in found] == [TOGETHER, *(f"gradient of {name}" for name in sums)]
        return [row.quantity for row in found if not row.right]


def test_a_gradient_of_few_elements_is_bounded_by_its_kind_too():
    """Three elements, whose errors are by chance tiny in the plain model and not in the trainer."""
    beyond = 0
    for seed in range(100):
        gradients = Gradients(seed)
        assert not gradients.wrong()
        distance = {
            name: [(x[name] - exact).norm() for x in (gradients.trainer, gradients.plain)]
            for name, exact in gradients.exact.items()
        }
        beyond += any(error > 3 * plain for error, plain in distance.values())
    assert beyond > 50


def test_a_wrong_gradient_of_one_parameter_is_found():
    for name in ("layers.7.norm.weight", "layers.29.proj.weight"):
        gradients = Gradients(1)
        gradients.trainer[name] = gradients.trainer[name] / 2
        assert gradients.wrong() == [f"gradient of {name}"]
    gradients = Gradients(2)
    gradients.trainer = {name: 1.2 * g for name, g in gradients.trainer.items()}
    assert gradients.wrong()[0] == TOGETHER


def test_terms_that_cancel_in_the_loss_count_in_its_bound():
    """Clipped tokens with advantages of both signs: the loss is 0, so are its slopes, and its terms are not."""
    none, on = torch.full((4,), torch.nan, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    advantage, old = torch.tensor([1.0, -1.2 / 0.8, 1.0, -1.2 / 0.8]).double(), torch.full((4,), -1.0).double()
    weight = torch.full((4,), 0.25, dtype=torch.float64)
    c = Constants(
        Sample([1], [2] * 4, group=0, external=False, truncated=False, engine_logprob=old.tolist()),
        advantage,
        weight,
        weight,
        ~on,
        on,
        old,
        none,
    )
    moved = torch.where(advantage > 0, old + 1, old - 1)
    logprob, entropy = torch.full((4,), -3.0, requires_grad=True), torch.zeros(4)
    objective = replace(ALGORITHMS["grpo"].objective, clip_high=0.2, kl_coef=0.0)
    algorithm = replace(ALGORITHMS["grpo"], objective=objective)
    loss, terms = Loss(algorithm, False, off_policy=True)(logprob, entropy, c, Own(moved, entropy))
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert not torch.autograd.grad(loss, logprob)[0].any()
    assert terms == pytest.approx(1.2)


def shown(rows: list[Row]) -> str:
    file = io.StringIO()
    show(Verification(3, (4, 16), "bfloat16", rows, []), Console(file=file, width=120))
    return file.getvalue()


def test_of_the_gradients_all_wrong_ones_are_printed_and_the_nearest_right_ones():
    """In the table's order; every other quantity has its row whatever its error."""
    errors = [*(2.0 + i / 100 for i in range(SHOWN + 4)), *(i / 100 for i in range(SHOWN + 3))]
    rows = [Row("loss", 0.0, 1.0, ""), Row(TOGETHER, 0.0, 1.0, "")]
    rows += [Row(f"gradient of w{i}.", error, 1.0, "of its norm", 0.5) for i, error in enumerate(errors)]
    out = shown(rows)
    lines = [line for line in out.splitlines() if "│ gradient of w" in line]
    left_out = range(SHOWN + 4, SHOWN + 7)  # the right ones with the smallest errors
    assert [line.split()[3] for line in lines] == [f"w{i}." for i in range(len(errors)) if i not in left_out]
    assert sum("WRONG" in line for line in lines) == SHOWN + 4
    assert "\n3 more parameters have gradients within their bounds" in out
    assert "loss" in out
    assert TOGETHER in out
