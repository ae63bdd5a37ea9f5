"""Sampling in the transformers engine: every probability, and numbers that a generator seldom returns."""

import math
from pathlib import Path

import pytest
import torch
from rollout_models import PROMPTS, requests, save, start, tiny_model
from torch import Tensor

from rlplus.train.rollout import RunFailed, Sampling
from rlplus.train.rollout.transformers_engine import BLOCK, draw


def drawn(logits: Tensor, uniform: Tensor, monkeypatch: pytest.MonkeyPatch, temperature: float = 1.0) -> Tensor:
    """Tokens (B,) of logits (B, V) where the generator gives uniform (B,), fp64."""
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: uniform.view(*shape))
    return draw(logits, temperature)[0]


@pytest.mark.parametrize("vocabulary", [8, 2 * BLOCK, 4 * BLOCK - 1])
def test_every_token_has_its_share_of_the_numbers(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For evenly spaced numbers each token is drawn in proportion to its probability, to within one."""
    draws, temperature = 20_000, 0.7
    logits = torch.tensor([-math.inf, 1.0, -2.0, 3.0, -math.inf, 2.9, -8.0, -math.inf])
    if vocabulary > len(logits):
        logits = torch.cat([logits, torch.randn(vocabulary - 8, generator=torch.Generator().manual_seed(0))])
        logits[BLOCK : 2 * BLOCK - 2] = -math.inf
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = drawn(logits.expand(draws, -1), uniform, monkeypatch, temperature).bincount(minlength=len(logits))
    expected = (logits.double() / temperature).softmax(0) * draws
    assert (counts - expected).abs().max() <= 1.01
    assert not counts[logits == -math.inf].any()


@pytest.mark.parametrize("vocabulary", [40, 3 * BLOCK - 10])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_number_draws_a_token_of_probability_0(
    uniform: float, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither forbidden nor underflown ones, first, last and between, whatever the probabilities add up to."""
    g = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3000, vocabulary, generator=g)
    forbidden = torch.rand(logits.shape, generator=g) < 0.5
    forbidden[:, [0, -1]], forbidden[:, 20] = True, False
    logits[forbidden] = -math.inf
    logits[::2][forbidden[::2]] = -120.0
    tokens = drawn(logits, torch.full((len(logits),), uniform, dtype=torch.float64), monkeypatch)
    allowed = (~forbidden).int()
    expected = allowed.argmax(1) if uniform == 0 else vocabulary - 1 - allowed.flip(1).argmax(1)
    assert torch.equal(tokens, expected)


def test_tokens_of_a_long_tail_can_all_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has 1e-8, a sixth of what fp32 resolves near 1: numbers so far apart draw neighbours."""
    tail = 100_000
    logits = torch.tensor([math.log(1 - 1e-8 * tail), *[math.log(1e-8)] * tail])
    uniform = 0.9995 + 1e-8 * torch.arange(50, dtype=torch.float64)
    tokens = drawn(logits.expand(50, -1), uniform, monkeypatch)
    assert tokens.diff().min() >= 0
    assert len(tokens.unique()) >= 49  # their probability is rounded, so that one may get two
    assert tokens[-1] - tokens[0] == 49


def test_greedy_takes_the_largest_logit() -> None:
    """Also if probabilities are equal, because rounding hides the difference from the largest."""
    largest = torch.tensor(0.0101)
    logits = torch.stack([largest.nextafter(torch.tensor(0.0)), largest, torch.tensor(-3.0)])[None]
    for order in ([0, 1, 2], [1, 0, 2]):
        assert logits[:, order].softmax(1)[0, :2].diff() == 0
        assert draw(logits[:, order], 0.0)[0].item() == order.index(1)


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = start("transformers", tmp_path)
    for value in (math.nan, math.inf):
        with torch.no_grad():
            model.lm_head.weight[5] = value
        engine.push_weights(model.named_parameters(), 1)
        for temperature in (1.0, 0.0):
            with pytest.raises(RunFailed, match="finite logprobs"):
                engine.generate(requests(PROMPTS, [2] * 3, 4), Sampling(temperature, 0))
