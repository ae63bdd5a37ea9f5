"""Every estimator of advantages against its definition, spelt out in loops over responses and groups of them."""

from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from trainer_runs import metrics, run_config

from rlplus import batch_advantages, group_advantages
from rlplus.loss.objective.objective import AdvantageEstimator
from rlplus.train.trainer import train

ESTIMATORS = get_args(AdvantageEstimator)
GENERATOR = torch.Generator().manual_seed(0)
GROUPS = torch.tensor([0, 0, 0, 0, 0, 3, 3, 3, 3, 5, 5, 5, 5])
REWARDS = torch.tensor([0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1.0])[torch.arange(13)]
TOKENS = torch.randint(1, 9, (13,), generator=GENERATOR)
EPS = 1e-6


def definition(estimator: str, R: Tensor, group: Tensor, tokens: Tensor, k: int) -> list[float]:
    R = R.double()
    out = []
    for i, reward in enumerate(R):
        mates = [j for j in range(len(R)) if group[j] == group[i]]
        mean = R[mates].mean()
        if estimator == "group":
            A = reward - mean
        elif estimator == "leave-one-out":
            A = reward - R[[j for j in mates if j != i]].mean()
        elif estimator in ("batch", "group-batch"):
            means = torch.stack([R[group == g].mean() for g in group])
            values = R if estimator == "batch" else R - means
            each = values.repeat_interleave(tokens)
            A = (values[i] - each.mean()) / (each.std() + EPS)
        elif estimator == "batch-std":
            A = (reward - mean) / (R.std() + EPS)
        elif estimator == "mean":
            A = (reward - mean) / mean if mean else torch.tensor(0.0)
        else:
            solved = torch.tensor([float(R[list(c)].max() >= 1) for c in combinations(mates, k)]).double()
            own = torch.tensor([float(R[list(c)].max() >= 1) for c in combinations(mates, k) if i in c]).double()
            std = solved.std(unbiased=False)
            A = (own.mean() - solved.mean()) / std if std else torch.tensor(0.0)
        out.append(float(A))
    return out


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_definitions(estimator: AdvantageEstimator, k: int) -> None:
    if k > 1 and estimator != "pass@k":
        return
    order = torch.randperm(13, generator=GENERATOR)
    rewards = REWARDS if estimator == "pass@k" else REWARDS * torch.rand(13, generator=GENERATOR)
    got = batch_advantages(rewards[order], GROUPS[order], estimator, tokens=TOKENS[order], k=k)
    assert got.dtype == torch.float64
    want = torch.tensor(definition(estimator, rewards, GROUPS, TOKENS, k), dtype=torch.float64)[order]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rows_that_are_not_included_are_measured_and_change_nothing(estimator: AdvantageEstimator) -> None:
    include = torch.arange(13) % 4 != 2
    options = {"tokens": TOKENS, "k": 2}
    got = batch_advantages(REWARDS, GROUPS, estimator, include=include, **options)  # type: ignore[arg-type]
    alone = batch_advantages(REWARDS[include], GROUPS[include], estimator, tokens=TOKENS[include], k=2)
    torch.testing.assert_close(got[include], alone, rtol=1e-12, atol=1e-12)
    again = batch_advantages(
        torch.where(include, REWARDS, 7.0),
        GROUPS,
        estimator,
        include=include,
        **options,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(again[include], alone, rtol=1e-12, atol=1e-12)
    if estimator in ("group", "leave-one-out"):
        want = group_advantages(REWARDS.double(), GROUPS, normalize_std=False, include=include)
        torch.testing.assert_close(got[~include], want[~include])


def test_pass_at_k_of_small_groups_and_without_a_spread() -> None:
    """A group sums to 0; a group of all right has advantages of 0; in one smaller than k, its size is k."""
    got = batch_advantages(REWARDS, GROUPS, "pass@k", k=4)
    torch.testing.assert_close(got[:5].sum(), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0)
    assert got[5:9].tolist() == [0.0] * 4
    small = batch_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1]), "pass@k", k=4)
    assert small.tolist() == [0.0, 0.0, 0.0], "any two responses of the first group solve it"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_to_compare_with(estimator: AdvantageEstimator) -> None:
    none = torch.empty(0)
    assert len(batch_advantages(none, none.long(), estimator, tokens=none.long())) == 0
    one = batch_advantages(torch.ones(1), torch.zeros(1, dtype=torch.int64), estimator, tokens=torch.ones(1).long())
    assert one.tolist() == ([0.0] if estimator in ("batch", "group-batch") else [1.0])


def test_bad_input() -> None:
    for estimator in ("batch", "group-batch"):
        with pytest.raises(ValueError, match="want tokens for advantages"):
            batch_advantages(REWARDS, GROUPS, estimator)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="want tokens of 0 or more; got -3"):
        batch_advantages(REWARDS, GROUPS, "batch", tokens=torch.full_like(GROUPS, -3))
    for k in (0, 2.5):
        with pytest.raises(ValueError, match=f"want k an integer of at least 1; got {k}"):
            batch_advantages(REWARDS, GROUPS, "pass@k", k=k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"want estimator one of group, leave-one-out, .*; got 'rloo'"):
        batch_advantages(REWARDS, GROUPS, "rloo")  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["leave-one-out", "group-batch"])
def test_a_run_trains_with_it(estimator: str, tmp_path: Path) -> None:
    algorithm = {"preset": "rlplus", "advantage": estimator}
    rows = metrics(train(run_config(tmp_path, algorithm=algorithm, train={"steps": 1, "prompts_per_step": 4})))
    assert rows[0]["actor/grad_norm"] > 0
