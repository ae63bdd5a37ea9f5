"""Two ranks compute what one does: ZeRO 1, 2, 3, offloading, samples shared out, sequence parallelism, adapters."""

from itertools import groupby
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from rank_cases import (
    CASES,
    LEARNERS,
    QUICK,
    REFERENCES,
    all_samples,
    make_model,
    run_case,
    run_learner,
    statistics_by_sample,
)
from trainer_runs import on_ranks

from rlplus.common.agree import initialize_distributed
from rlplus.train.data import read_kept

SLOW = [name for name in CASES if name not in QUICK]
QUICK_LEARNERS = ["ppo", "prime"]
SLOW_LEARNERS = [name for name in LEARNERS if name not in QUICK_LEARNERS]
Results = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for tied in (True, False):
        make_model(path, tied)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    """By this process, one rank with ZeRO-1; `test_trainer.py` compares that with the formulas in float64."""
    initialize_distributed()
    learners = {name: run_learner(folder, name) for name in QUICK_LEARNERS}
    return learners | {name: run_case(folder, name) for name in REFERENCES}


def on_two_ranks(folder: Path, output: str, names: list[str]) -> Results:
    on_ranks(processes.SUPPORT / "rank_cases.py", folder, output, *names)
    results: Results = torch.load(folder / f"{output}.pt")
    return results


@pytest.fixture(scope="module")
def quick(folder: Path) -> Results:
    return on_two_ranks(folder, "quick", [*QUICK, *QUICK_LEARNERS])


@pytest.fixture(scope="module")
def slow(folder: Path) -> Results:
    return on_two_ranks(folder, "slow", SLOW + SLOW_LEARNERS)


def check(name: str, two: dict[str, Any], one: dict[str, Any]) -> None:
    want, got = one["gradients"], two["gradients"]
    assert got.keys() == want.keys()
    assert len(want) > 20
    whole = float(torch.stack([g.norm() for g in want.values()]).norm())
    for key, gradient in want.items():
        # The second term: a gradient that is nothing but rounding, of one token that sees only itself.
        error = float((got[key] - gradient).norm())
        assert error <= 1e-5 * float(gradient.norm()) + 1e-7 * whole, key
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-5)
    assert two["applied"]
    assert one["nonfinite"] == two["nonfinite"] == (True, True)
    for kind in ("loss", "logged"):
        loss = sum(rank[kind] for rank in one["ranks"])
        assert sum(rank[kind] for rank in two["ranks"]) == pytest.approx(loss, abs=1e-6)
    for kind in ("internal", "external"):
        squares = [sum(rank["squared slopes"][kind] for rank in ranks) for ranks in (one["ranks"], two["ranks"])]
        assert squares[1] == pytest.approx(squares[0], rel=1e-4), kind
    assert two["row"].keys() == one["row"].keys()
    for metric, value in one["row"].items():  # rank 0 would log it, in both
        assert two["row"][metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    for rank in (*one["ranks"], *two["ranks"]):
        assert rank["factors"] == {1.0}, "the backward pass scales the head's gradient"
        assert rank["own_pass_is_old"], "an update's own forward pass is not that of old_logprob, bit for bit"
    assert two["before"].keys() == one["before"].keys()
    for key, weight in one["before"].items():
        torch.testing.assert_close(two["before"][key], weight, rtol=0, atol=0)
        moved = (
            one["after"][key] - weight
        ).abs() > 9e-4  # AdamW's first step is lr = 1e-3 where g is no rounding noise
        torch.testing.assert_close(two["after"][key][moved], one["after"][key][moved], rtol=0, atol=2e-5)
    check_shares(name, two["ranks"], one["ranks"])


def check_shares(name: str, two: list[dict[str, int]], one: list[dict[str, int]]) -> None:
    """Every response token once, equally many micro-batches, and like loads, however the samples were owned."""
    assert sum(rank["response_tokens"] for rank in two) == one[0]["response_tokens"]
    assert two[0]["micro_batches"] == two[1]["micro_batches"]
    if "single" in name:
        assert two[0]["micro_batches"] == 1
    elif "sequences" not in name:
        longest = max(sample.length for sample in all_samples())
        assert sum(rank["tokens"] for rank in two) <= one[0]["tokens"] + 4  # dummies
        assert abs(two[0]["tokens"] - two[1]["tokens"]) <= longest / 2


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_are_one(name: str, quick: Results, alone: Results) -> None:
    check(name, quick[name], alone[name.split(",")[0]])


def check_learner(two: dict[str, Any], one: dict[str, Any]) -> None:
    """Whitened over all ranks' tokens, and trained on the same mini-batches."""
    advantages = torch.tensor([advantage for _, whitened, _ in two["samples"] for advantage in whitened]).double()
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages.var(correction=0)) == pytest.approx(1, rel=1e-6)
    for got, want in zip(two["samples"], one["samples"], strict=True):
        # AdamW's first step is lr whatever the gradient, and its sign is rounding noise where the gradient is nearly 0.
        for name, values, wanted, bound in zip(
            ("returns", "advantage", "after"), got, want, (1e-5, 1e-5, 5e-5), strict=True
        ):
            assert list(values) == pytest.approx(wanted, rel=1e-5, abs=bound), name
    assert two["row"] == pytest.approx(one["row"], rel=1e-5)
    assert {"loss", "nonfinite", "lr", "grad_norm"} < {metric.partition("/")[2] for metric in two["row"]}
    assert two["applied"] == one["applied"]
    assert all(two["applied"])


@pytest.mark.parametrize("name", QUICK_LEARNERS)
def test_a_learner_on_two_ranks_is_one(name: str, quick: Results, alone: Results) -> None:
    check_learner(quick[name], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_LEARNERS)
def test_a_learner_in_shards_is_one(name: str, slow: Results, alone: Results) -> None:
    check_learner(slow[name], alone[name.split(",")[0]])


def test_one_refusal_gives_all_ranks_torch(quick: Results) -> None:
    agreed = [("triton", "reason 0"), ("torch", "rank 1: reason 1"), ("torch", "reason 0")]
    assert quick["agreed backends"] == [agreed, agreed]


def test_ranks_skip_the_same_updates(quick: Results) -> None:
    assert quick["skipped updates"] == [[True, True, False]] * 2


def test_refilled_steps_have_as_many_groups_on_each_rank(quick: Results) -> None:
    """Otherwise a rank would have none for a mini-batch, or too many; test_refill.py checks which ones they are."""
    rows = quick["refilled run"]
    assert [row["actor/updated"] for row in rows] == [1] * 4
    assert any(row["batch/draws"] > 1 for row in rows)


def test_one_rank_keeps_samples_of_its_own(folder: Path, quick: Results) -> None:
    samples = read_kept(folder / "quick refilled/samples/step-000001.parquet")
    assert len(quick["refilled run"]) > 1  # the other rank has waited for no one
    groups = [list(group) for _, group in groupby(samples, lambda sample: sample.problem)]
    assert [len(group) for group in groups] == [4, 4]
    assert all(len({sample.reward for sample in group}) == 2 for group in groups)


def test_samples_whose_parts_are_on_two_ranks_have_all_their_logprobs(folder: Path, quick: Results) -> None:
    whole = statistics_by_sample(folder, "tied")
    assert [len(values) for values in whole] == [len(sample.response) for sample in all_samples()[:7]]
    for own, both in zip(whole, quick["by sample"], strict=True):
        torch.testing.assert_close(both, own, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_are_one_whatever_is_switched_on(name: str, slow: Results, alone: Results) -> None:
    check(name, slow[name], alone[name.split(",")[0]])


@pytest.mark.parametrize("name", ["lora", "lora kl"])
def test_only_adapters_train(name: str, alone: Results) -> None:
    """And what is pushed changes where there are adapters, nowhere else."""
    one = alone[name]
    assert all(".lora_" in key for key in one["gradients"])
    assert all(gradient.norm() > 0 for gradient in one["gradients"].values())
    for key, weight in one["before"].items():
        adapted = "_proj.weight" in key
        assert torch.equal(one["after"][key], weight) != adapted, key
