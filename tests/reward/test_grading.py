"""Rewards in a run: demonstrations are graded once, failures of the grader are masked, ranks share the work."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import quick
from engine_runs import same
from processes import SUPPORT
from reward_graders import decode, example, reward_config
from trainer_runs import metrics, on_ranks, run_config

import rlplus
import rlplus.train.trainer.run_parts
from rlplus.common.agree import initialize_distributed
from rlplus.train.checkpoint import read_state
from rlplus.train.config import RewardConfig
from rlplus.train.data import byte_tokenizer
from rlplus.train.reward import Score, Scorer, grade_demonstrations, keep_passed
from rlplus.train.trainer import train
from rlplus.train.trainer.rollouts import Drawn, Rollouts


def test_demonstrations_that_do_not_pass_are_dropped_and_counted() -> None:
    initialize_distributed()
    examples = [example(i, text) for i, text in enumerate(["a #### 7", "a #### 8", None, "seven"])]
    with Scorer(reward_config(kind="exact_match", pattern=r"#### (\S+)")) as scorer:
        verdicts = grade_demonstrations(examples, scorer, decode)
    assert verdicts == [1.0, "ok", "unparsed"]
    kept, report = keep_passed(examples, verdicts)
    assert [one.demonstration for one in kept] == [examples[0].demonstration, None, None, None]
    assert kept[0].demonstration_reward == 1.0
    assert [(one.index, one.answer) for one in kept] == [(i, "7") for i in range(4)]
    assert (report.graded, report.kept, report.dropped) == (3, 1, {"ok": 1, "unparsed": 1})
    assert report.dropped_share == pytest.approx(2 / 3)
    assert report.summary() == "demonstrations: 1 of 3 pass the run's own reward; dropped: 1 wrong, 1 unparsed"


def test_a_demonstration_whose_grading_fails_is_not_called_wrong() -> None:
    initialize_distributed()
    examples = [example(i, "x") for i in range(4)]
    scores = [Score(nan, "timeout"), Score(2.5, "ok"), Score(nan, "crash"), Score(0.5, "ok")]
    verdicts = grade_demonstrations(examples, lambda texts, answers, columns, prompts: scores, decode)
    assert verdicts == ["timeout", 2.5, "crash", "ok"]
    kept, report = keep_passed(examples, verdicts)
    assert [one.demonstration_reward for one in kept if one.demonstration] == [2.5]
    assert report.dropped == {"timeout": 1, "crash": 1, "ok": 1}
    assert "1 crash, 1 wrong, 1 timeout" in report.summary()


RANKS = """
import sys
from dataclasses import replace
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from reward_graders import decode, example
from rlplus.train.data import Sample
from rlplus.train.reward import Score, grade_demonstrations
from rlplus.train.rollout import RunFailed
from rlplus.train.reward.scorer import score

dist.init_process_group("gloo")
rank = dist.get_rank()
examples = [example(i, None if i % 4 == 1 else str(i)) for i in range(11)]
seen = []

def scorer(texts, answers, columns, prompts):
    seen.extend(texts)
    return [Score(1.0 + int(text), "ok") for text in texts]

verdicts = grade_demonstrations(examples, scorer, decode)
assert verdicts == [1.0 + i for i in range(11) if i % 4 != 1], verdicts
shares = [None, None]
dist.all_gather_object(shares, seen)
assert len(shares[0]) == len(shares[1]) == 4 and len(set(shares[0] + shares[1])) == 8, shares

def failing(texts, answers, columns, prompts, cut=()):
    if rank == 1:
        raise ValueError("no worker")
    return [Score(1.0, "ok") for text in texts]

samples = [Sample([1], [55], 0, False, False, None), Sample([1], [55], 0, True, False, None)]
graded = [replace(examples[0], demonstration_reward=1.0)]
for attempt, kind in (
    (lambda: grade_demonstrations(examples, failing, decode), ValueError),
    (lambda: score(samples, graded, failing, decode), RunFailed),
):
    try:
        attempt()
    except kind as error:
        assert "rank 1: no worker" in str(error), error
    else:
        raise AssertionError("rank 1 failed, and rank 0 went on alone")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_share_the_demonstrations_and_agree_on_every_verdict(tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(RANKS)
    on_ranks(script, SUPPORT)


# Grading in a run

ONCE = """
import os

def grade(text, answer):
    path = "graded-" + answer + "-" + text.encode().hex()
    if text == f"<{answer}>" and os.path.exists(path):
        os._exit(1)  # on every demonstration but the first time
    open(path, "w").close()
    return 2.0 if text == f"<{answer}>" else 0.0
"""


def test_a_demonstration_keeps_its_first_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "once_graders.py").write_text(ONCE)
    monkeypatch.chdir(tmp_path)
    reward = {"function": "once_graders:grade", "kind": None, "pattern": None}
    rows = metrics(train(run_config(tmp_path, reward=reward, train={"steps": 3})))
    assert [row["reward/external"] for row in rows] == [2.0] * 3
    assert [row["reward/crash"] for row in rows] == [0.0] * 3


SWITCHED = """
import os

def grade(text, answer):
    if text == f"<{answer}>" and answer in open("bad").read().split():
        raise TimeoutError
    return float(text == f"<{answer}>")
"""


def test_a_resumed_run_has_the_demonstrations_it_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grader fails on others when the run is resumed; the result is the same as without an interruption."""
    (tmp_path / "switched_graders.py").write_text(SWITCHED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_text("2")
    sections: dict[str, dict[str, Any]] = {
        "reward": {"function": "switched_graders:grade", "kind": None, "pattern": None},
        "data": {"max_dropped_share": 1.0},
    }
    whole = train(run_config(tmp_path, "whole", **sections, train={"steps": 4}))
    half = train(run_config(tmp_path, "half", **sections, train={"steps": 2}))
    verdicts = read_state(half / "checkpoints/step-000002")["verdicts"]
    assert verdicts.count("crash") == 1
    assert verdicts.count(1.0) == 5
    (tmp_path / "bad").write_text("0 4 5")
    train(run_config(tmp_path, "half", **sections, train={"steps": 4}), resume="newest")
    assert same(whole, half)
    assert metrics(whole) == metrics(half)


class ByLength:
    """A Scorer whose verdict hangs on the response alone; `failed` are those on which the grader fails."""

    def __init__(self, config: RewardConfig, columns: Sequence[str]) -> None:
        self.config = config

    def __enter__(self) -> "ByLength":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, texts: Sequence[str], answers: Sequence[str], columns: object, **_: object) -> list[Score]:
        return [self.grade(text, answer) for text, answer in zip(texts, answers, strict=True)]

    def grade(self, text: str, answer: str) -> Score:
        if text == f"<{answer}>":
            return Score(1.0, "ok")
        if self.failed(text):
            return Score(0.0 if self.config.on_failure == "zero" else nan, "timeout")
        return Score(float(sum(map(ord, text)) % 2), "ok")

    @staticmethod
    def failed(text: str) -> bool:
        return sum(map(ord, text)) % 3 == 0


@pytest.mark.parametrize("preset", quick.first(1, ["rlplus", "grpo", "luffy"]))
def test_a_masked_sample_is_as_if_it_had_never_been_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """Neither loss, KL and entropy, nor group statistics, nor denominators know of it."""
    monkeypatch.setattr(rlplus.train.trainer.run_parts, "Scorer", ByLength)
    algorithm = {"preset": preset, "objective": {"kl_coef": 0.1, "entropy_coef": 0.01}}
    settings: dict[str, Any] = {"algorithm": algorithm, "train": {"steps": 2, "prompts_per_update": 2}}
    masked = train(run_config(tmp_path, "masked", **settings))
    continued, left_out = Rollouts._continued, []

    def without(self: Rollouts, *rest: Any) -> list[Drawn]:
        (batch,) = continued(self, *rest)
        failed = [s for s in batch.samples if not s.external and ByLength.failed(run_decode(s.response))]
        left_out.extend(failed)
        return [replace(batch, samples=[s for s in batch.samples if s not in failed])]

    monkeypatch.setattr(Rollouts, "_continued", without)
    never = train(run_config(tmp_path, "never", **settings))
    assert left_out
    assert same(masked, never)
    masked_rows, never_rows = metrics(masked), metrics(never)
    total = len(left_out) / sum(row["reward/masked"] for row in masked_rows)
    assert all(row["reward/masked"] == row["reward/timeout"] for row in masked_rows)
    assert all(row["reward/masked"] == 0 for row in never_rows)
    assert total == pytest.approx(4 * (4 if preset == "grpo" else 3))  # rollouts per step
    for name in ("reward/mean", "reward/internal", "batch/solve_all", "batch/solve_none", "actor/loss"):
        assert [row[name] for row in masked_rows] == [row[name] for row in never_rows]


def run_decode(tokens: Sequence[int]) -> str:
    """`Run.decode` with the byte tokenizer of a scratch model."""
    return str(byte_tokenizer().decode(list(tokens), skip_special_tokens=True))


def test_on_failure_zero_is_a_reward_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlplus.train.trainer.run_parts, "Scorer", ByLength)
    (first, _) = metrics(train(run_config(tmp_path, "mask")))
    (zero, _) = metrics(train(run_config(tmp_path, "zero", reward={"on_failure": "zero"})))
    assert zero["reward/masked"] == 0 < zero["reward/timeout"] == first["reward/timeout"] == first["reward/masked"]
    assert zero["reward/internal"] == pytest.approx(first["reward/internal"] * (1 - first["reward/masked"]))


def test_a_step_whose_rollouts_are_all_masked_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByLength, "failed", staticmethod(lambda text: True))
    monkeypatch.setattr(rlplus.train.trainer.run_parts, "Scorer", ByLength)
    rows = metrics(train(run_config(tmp_path, algorithm={"preset": "grpo"})))
    assert [row["reward/masked"] for row in rows] == [1.0, 1.0]
    assert [row["actor/updated"] for row in rows] == [0.0, 0.0]
    assert not any("reward/mean" in row or isnan(sum(row.values())) for row in rows)
