"""The old policy's logprobs: a pass only for the updates after the first, and the same training as with one for all."""

from typing import Any

import pytest
import quick
import torch
from engine_runs import same
from trainer_runs import metrics, run_config

from rlplus.train.config import Config
from rlplus.train.learner.policy import Policy
from rlplus.train.rollout import RunFailed
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import train

KL = {"preset": "grpo", "objective": {"kl_coef": 0.5, "mismatch_cap": 1.0}}


@pytest.fixture(autouse=True)
def some_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that an untrained model gets every other time, so that every update has a gradient."""

    def draw_rewards(samples: Any, *_: Any) -> None:
        for i, sample in enumerate(samples):
            sample.reward = float(sample.external or i % 2)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


def two_updates(folder: Any, output: str, **sections: Any) -> Config:
    changes = {"prompts_per_update": 2, "tokens_per_micro_batch": 32} | sections.pop("train", {})
    return run_config(folder, output, train=changes, **sections)


@pytest.mark.parametrize(("algorithm", "prompts_per_update"), quick.first(1, [(KL, 2), ({}, 1), ({}, 4)]))
def test_only_later_updates_have_a_pass_of_their_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], prompts_per_update: int
) -> None:
    logprob, accumulate = Policy.logprob, Policy.backward
    passed: list[tuple[int, bool]] = []
    updates: list[list[int]] = []

    def counted(policy: Policy, batch: Any, *, reference: bool = False) -> torch.Tensor:
        passed.append((id(batch), reference))
        return logprob(policy, batch, reference=reference)

    def recorded(policy: Policy, batches: Any, *rest: Any) -> Any:
        assert all((batch.old_logprob is None) == (not updates) for batch in batches)
        updates.append([id(batch) for batch in batches])
        return accumulate(policy, batches, *rest)

    monkeypatch.setattr(Policy, "logprob", counted)
    monkeypatch.setattr(Policy, "backward", recorded)
    monkeypatch.setattr("rlplus.train.trainer.engine.SyncedEngine._probe", lambda engine: (torch.zeros(1), []))
    monkeypatch.setattr(Policy, "nonfinite", lambda policy: "", raising=False)
    changes = {"steps": 1, "prompts_per_update": prompts_per_update}
    train(two_updates(tmp_path, "run", algorithm=algorithm, train=changes))
    assert len(updates) == 4 // prompts_per_update
    assert all(len(batches) > 1 for batches in updates) or prompts_per_update == 1
    later = [one for batches in updates[1:] for one in batches]
    assert [one for one, reference in passed if not reference] == later
    every = [one for batches in updates for one in batches] if algorithm else []
    assert [one for one, reference in passed if reference] == every


@pytest.mark.parametrize("algorithm", quick.first(1, [KL, {}]))
def test_the_first_updates_own_forward_pass_is_the_old_policy_bit_for_bit(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """Weights and metrics of runs without and with a pass for all updates."""
    changes = {"steps": 3, "lr": 1e-2}
    one = train(two_updates(tmp_path, "one", algorithm=algorithm, train=changes))
    accumulate, given = Policy.backward, []

    def with_a_pass(policy: Policy, batches: Any, *rest: Any) -> Any:
        for batch in batches:
            if batch.old_logprob is None:
                given.append(batch)
                batch.old_logprob = policy.logprob(batch)
        return accumulate(policy, batches, *rest)

    monkeypatch.setattr(Policy, "backward", with_a_pass)
    other = train(two_updates(tmp_path, "other", algorithm=algorithm, train=changes))
    assert given
    assert same(one, other)
    for row, former in zip(metrics(one), metrics(other), strict=True):
        # The gaps of the first update are added last instead of first: a sum in float64, each term below the sum.
        gap, former_gap = row.pop("mismatch/mean"), former.pop("mismatch/mean")
        assert gap == pytest.approx(former_gap, rel=row["response_length/max"] * 16 * 2**-52)
        assert row == former
        assert row["actor/kl_old"] > 0, "the second update has another policy than the old one"


@pytest.mark.parametrize("groups", [(0, 1), (2, 3)])
def test_the_gap_of_every_update_is_checked_before_the_first(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, groups: tuple[int, int]
) -> None:
    generate = TransformersEngine.generate

    def skewed(engine: Any, requests: Any, sampling: Any) -> Any:
        answers = generate(engine, requests, sampling)
        for group in groups if len(requests) == 4 else ():  # a probe has other prompts
            for completion in answers[group]:
                completion.logprob[:] = [value - 0.3 for value in completion.logprob]
        return answers

    monkeypatch.setattr(TransformersEngine, "generate", skewed)
    monkeypatch.setattr("rlplus.train.trainer.engine.PROBES", 3)
    config = two_updates(tmp_path, "run")
    steps: list[Any] = []
    monkeypatch.setattr(Policy, "step", lambda policy, *_: steps.append(policy))
    with pytest.raises(RunFailed, match=r"step 1: the mean gap .* The policy was not changed"):
        train(config)
    assert not steps
