"""metrics.jsonl holds JSON whatever a step computes, and rewards that no float can average end the run with a line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import run_config

from rlplus.common.agree import initialize_distributed
from rlplus.common.errors import SharedFailure
from rlplus.train.data import Example, Sample
from rlplus.train.learner import Policy
from rlplus.train.reward.scorer import LARGEST, score
from rlplus.train.trainer import train
from rlplus.train.trainer.metrics import RunLog
from rlplus.train.trainer.progress import Progress
from rlplus.train.trainer.reporter import Reporter


def strict(line: str) -> dict[str, Any]:
    """The object in a line; AssertionError for NaN and Infinity, which JSON does not have."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {line}")

    found: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return found


def test_a_number_that_is_not_finite_is_said_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(run_config(tmp_path, train={"steps": 5}))
    log = RunLog(tmp_path, progress, Reporter(tmp_path, "title"))
    infinite = float("inf")
    log.write(1, {"time/step": 1.0, "a": infinite, "b": -infinite, "c": 2.5, "d": infinite - infinite})
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "time/step": 1.0, "c": 2.5}
    assert "step 1: left out of metrics.jsonl: a is inf, b is -inf, d is nan\n" in capsys.readouterr().err


def test_a_run_with_a_step_that_is_not_finite_has_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulate = Policy.backward

    def poisoned(policy: Policy, *args: Any) -> Any:
        norm = dict(policy.engine.module.lm.named_parameters())["model.norm.weight"]
        kept = norm.detach().clone()
        norm.data.fill_(float("nan"))
        outputs = accumulate(policy, *args)
        norm.data.copy_(kept)
        return outputs

    monkeypatch.setattr(Policy, "backward", poisoned)
    run = train(run_config(tmp_path, train={"steps": 1}))
    (line,) = (run / "metrics.jsonl").read_text().splitlines()
    assert strict(line)["actor/nonfinite"] == 1
    assert "left out of metrics.jsonl: actor/loss" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e19"])
def test_rewards_without_a_mean_end_the_run(value: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def reward(text, answer):\n    return 1.0 if '<' in text else {value}\n")
    reward = {"kind": None, "pattern": None, "function": f"{tmp_path / 'own.py'}:reward"}
    config = run_config(tmp_path, reward=reward, algorithm={"preset": "grpo"})
    with pytest.raises(SharedFailure, match=re.escape(f"want rewards from -1e+18 to 1e+18; got {float(value):g}")):
        train(config)


def test_nor_may_an_environment_give_one() -> None:
    initialize_distributed()
    sample = Sample((1,), [2], 0, False, False, [-0.5])
    sample.reward, sample.scored = -1e308, True
    example = Example(0, (1,), "1", None, "")
    with pytest.raises(SharedFailure, match="got -1e"):
        score([sample], [example], lambda texts, *_, **__: [], lambda tokens: "")  # type: ignore[arg-type]
    sample.reward = LARGEST
    score([sample], [example], lambda texts, *_, **__: [], lambda tokens: "")  # type: ignore[arg-type]
    assert sample.reward == LARGEST
