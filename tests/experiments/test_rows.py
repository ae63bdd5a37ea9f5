"""Filters of rows and blocks on samples of a tiny head: bounds by definition, gradients by autograd."""

import json
from pathlib import Path

import pytest
import torch

from experiments.rows import filtered, rounded
from experiments.rows.__main__ import main
from experiments.rows.language_model import HELD_OUT, make_tokenizer, problems
from rlplus.loss import linear_policy_loss

N, H, V = 300, 12, 700  # neither a multiple of a block


@pytest.fixture(scope="module")
def samples() -> filtered.Samples:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, H, generator=g), 2 * torch.randn(V, H, generator=g)
    hidden[:100] *= 4  # surer rows
    hidden[:, 0], weight[512:, 0] = 3, -12  # the last block of columns is unlikely
    target = (hidden @ weight.T).softmax(1).multinomial(1, generator=g)[:, 0]
    target[290] = 650  # yet some row's target is there
    return filtered.Samples(hidden, weight, target, torch.randn(N, generator=g))


@pytest.fixture(scope="module")
def gradient(samples: filtered.Samples) -> torch.Tensor:
    return filtered.whole_gradient(samples, samples.logprobs())


def test_the_gradient_is_the_policy_loss_s(samples: filtered.Samples, gradient: torch.Tensor) -> None:
    hidden, weight = (x.double().requires_grad_() for x in (samples.hidden, samples.weight))
    linear_policy_loss(
        hidden, weight, samples.target, old_logprob=None, advantage=samples.advantage.double(),
        token_weight=torch.full((N,), 1 / N, dtype=torch.float64), objective="grpo", backend="reference",
    ).loss.backward()  # fmt: skip
    torch.testing.assert_close(gradient @ weight.detach(), hidden.grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(gradient.T @ hidden.detach(), weight.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("share", [2.0**-8, 0.1, 0.5])
def test_what_is_dropped_stays_within_the_share(
    samples: filtered.Samples, gradient: torch.Tensor, share: float
) -> None:
    rows = filtered.rows_kept(samples, samples.logprobs(), share / 2)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    keep = filtered.blocks_kept(gradient, rows, share / 2, order)
    assert not keep[~rows].any()
    found = filtered.left(samples, gradient, keep)
    assert 1 - share <= found.mass < 1
    assert found.blocks == pytest.approx(keep.double().mean().item())
    assert found.rows == pytest.approx(keep.any(1).double().mean().item())
    change = gradient * ~keep
    assert found.dweight_error == pytest.approx(
        ((change.T @ samples.hidden.double()).norm() / (gradient.T @ samples.hidden.double()).norm()).item()
    )
    if share == 0.5:
        assert found.blocks < found.rows < 1  # something of either kind went


def test_a_block_is_kept_or_dropped_whole(samples: filtered.Samples, gradient: torch.Tensor) -> None:
    rows = filtered.rows_kept(samples, samples.logprobs(), 0.25)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    keep = filtered.blocks_kept(gradient, rows, 0.25, order)[rows][:, order]
    for top in range(0, len(keep), filtered.ROWS):
        for first in range(0, V, filtered.COLUMNS):
            block = keep[top : top + filtered.ROWS, first : first + filtered.COLUMNS]
            assert block.all() or not block.any()


def test_cut_cross_entropy_drops_blocks_of_small_entries_only(samples: filtered.Samples) -> None:
    logprobs = samples.logprobs()
    order = torch.arange(V)
    keep = filtered.cce_kept(samples, logprobs, order)
    assert keep.any(0).all()
    assert not keep.all()
    size = logprobs.exp()
    size[torch.arange(N), samples.target] -= 1
    for top in range(0, N, filtered.ROWS):
        for first in range(0, V, filtered.COLUMNS):
            where = slice(top, top + filtered.ROWS), slice(first, first + filtered.COLUMNS)
            assert keep[where].unique().tolist() == [bool((size[where].abs() >= 2**-12).any())]


def test_operands_of_full_precision_change_nothing(samples: filtered.Samples, gradient: torch.Tensor) -> None:
    logprobs = samples.logprobs()
    exact = rounded.errors(samples, logprobs, (torch.float64, torch.float64))
    assert max(exact) < 1e-13
    # a mantissa of m bits has a relative error of 2^-(m + 1) at most, and the products of two have twice that; what
    # the rounding of p changes is measured against a gradient that may cancel, hence not below 1
    for dtype, bits in ((torch.bfloat16, 7), (torch.float16, 10)):
        changed = rounded.errors(samples, logprobs, (dtype, torch.float64))
        slope = (samples.advantage.double() / N)[:, None]
        p = logprobs.exp().scatter(1, samples.target[:, None], 0.0)
        most = (slope.abs() * (p @ samples.weight.double().abs())).norm() * 2.0 ** -(bits + 1)
        assert 0 < changed[0] <= most / (gradient @ samples.weight.double()).norm()


def write_problems(file: Path, count: int) -> Path:
    rows = [{"question": f"What is {i} plus {i + 1}?", "answer": f"{i} + {i + 1} = {2 * i + 1}"} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_texts_come_back_from_their_tokens(tmp_path: Path) -> None:
    texts = ["".join(problem) for problem in problems(write_problems(tmp_path / "few.jsonl", HELD_OUT + 4))]
    tokenizer = make_tokenizer(texts, 400)
    assert [tokenizer.decode(ids) for ids in tokenizer(texts).input_ids] == texts


def test_it_says_what_it_wanted_and_what_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"want more than {HELD_OUT} problems; got 5"):
        problems(write_problems(tmp_path / "few.jsonl", 5))
    (tmp_path / "other.jsonl").write_text('{"prompt": "?", "answer": "!"}\n')
    with pytest.raises(ValueError, match="line 1: want question and answer; got prompt, answer"):
        problems(tmp_path / "other.jsonl")
    with pytest.raises(SystemExit):
        main(["x.jsonl", "--questions", "0"])
    assert f"want 1 to {HELD_OUT}; got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_problems(tmp_path / "problems.jsonl", HELD_OUT + 40)
    sizes = ["--vocabulary", "400", "--hidden", "64", "--layers", "1", "--epochs", "1", "--questions", "1"]
    main([str(file), "--model", str(tmp_path / "model"), *sizes, "--length", "20"])
    text = capsys.readouterr().out
    assert "epoch 1 of 1" in text
    for name in ("rows, 2^-12", "half rows, half blocks, 2^-8", "(CCE)", "both operands in e4m3", "| 0 |", "| 2^-10 |"):
        assert name in text
