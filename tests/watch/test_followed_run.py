"""A run is read while it writes, dies and goes on, and warnings are said about it."""

import json
from pathlib import Path
from typing import Any

import pytest
from watched_runs import NOW, Clocks, keeps, killed_and_resumed, run_at, says

from rlplus.tools.watch import FollowedRun, View, check_watched
from rlplus.tools.watch.followed_run import SILENT_S
from rlplus.tools.watch.plain_warnings import QUIET_S, RECENT, warnings_of
from rlplus.tools.watch.view import card


def followed(folder: Path, clocks: Clocks | None = None) -> FollowedRun:
    run = FollowedRun("run", folder, **(clocks or Clocks()).options)
    run.update()
    return run


def steps(run: FollowedRun) -> list[int]:
    return [step["step"] for step in run.data.metrics]


def test_lines_are_taken_when_they_are_whole(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 3)
    run = followed(folder)
    assert steps(run) == [1, 2, 3]
    line = json.dumps({"step": 4, "generated_tokens": 4000}) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        for sign in line:
            file.write(sign)
            file.flush()
            run.update()
            assert steps(run) == ([1, 2, 3] if sign != "\n" else [1, 2, 3, 4])
    changed = run.changed
    run.update()
    assert run.changed == changed
    assert run.problems == []


@pytest.mark.parametrize(("at", "then"), [(3, 4), (3, 8), (3, 12), (0, 0)])
def test_a_run_that_is_killed_and_resumed_is_followed(tmp_path: Path, at: int, then: int) -> None:
    """Whether the new file of metrics is shorter, as long or longer than the old one when it is seen."""
    folder = run_at(tmp_path / "run", 8)
    for step in (2, 6):
        keeps(folder, step)
    run = followed(folder)
    assert [moment.step for moment in run.moments] == [2, 6]
    killed_and_resumed(folder, at, then)
    run.update()
    assert steps(run) == list(range(1, then + 1))
    assert all(step["time/step"] == 3.0 for step in run.data.metrics)
    assert [moment.step for moment in run.moments] == [step for step in (2, 6) if step <= at]
    assert run.problems == []


def test_a_line_that_is_damaged_costs_itself(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "generated_tokens": "many"}\n{"step": 4, "generated_tokens": 4000}\n')
    run = followed(folder)
    assert steps(run) == [1, 2, 4]
    assert "line 3: want a JSON object of numbers" in run.problems[0]


def test_damaged_samples_are_said_and_the_others_shown(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 2)
    keeps(folder, 1)
    (folder / "samples/step-000002.parquet").write_bytes(b"PAR1")
    run = followed(folder)
    assert [moment.step for moment in run.moments] == [1]
    assert "These samples are left out" in warnings_of(run)[-1]


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    """The file that says where it is comes first."""
    folder = tmp_path / "run"
    folder.mkdir()
    says(folder, step=None, steps=None, share_done=0.0, seconds_left=None, phase="loading the model", total=None)
    check_watched(folder)
    found = card(followed(folder), "accent")
    assert (found.state, found.percent, found.place) == ("training", 0, "before the first step")
    assert (found.phase, found.left) == ("loading the model", "time left known after the first step")
    assert "They come with the end of the first step" in View([followed(folder)]).part("curves")[1]


def test_a_run_that_writes_nothing_any_more_is_gone_until_it_writes_again(tmp_path: Path) -> None:
    folder, clocks = run_at(tmp_path / "run", 8), Clocks()
    says(folder)
    run = followed(folder, clocks)
    for passed, state in ((SILENT_S, "running"), (SILENT_S + 1, "gone")):
        clocks.passed = passed
        run.update()
        assert run.life.state == state
    assert "No sign of life for 61 s: the run was killed" in warnings_of(run)[0]
    assert card(run, "accent").phase == "it was in: rollouts"
    says(folder, NOW + SILENT_S + 1)
    run.update()
    assert run.life.state == "running"
    assert warnings_of(run) == []


@pytest.mark.parametrize("off", [-5000.0, 5000.0])
def test_a_machine_whose_clock_is_wrong_is_alive_when_it_writes(tmp_path: Path, off: float) -> None:
    folder, clocks = run_at(tmp_path / "run", 8), Clocks()
    says(folder, NOW + off)
    run = followed(folder, clocks)
    for _ in range(3):
        clocks.passed += SILENT_S - 1
        says(folder, NOW + off + clocks.passed)
        run.update()
        assert run.life.state == "running"


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({"state": "finished", "share_done": 1.0}, "finished", ""),
        ({"state": "stopped", "message": "stopped by signal 15"}, "stopped", "stopped by signal 15"),
        ({"state": "failed", "message": "the engine died"}, "failed", "the engine died"),
    ],
)
def test_how_a_run_ended_and_when(tmp_path: Path, changes: dict[str, Any], state: str, message: str) -> None:
    """It stays so however long ago that was."""
    folder = run_at(tmp_path / "run", 8)
    says(folder, NOW - 1e6, **changes)
    run = followed(folder)
    found = card(run, "accent")
    assert (found.state, found.message, found.phase) == (state, message, "")
    assert found.left.startswith("since 0")
    assert warnings_of(run) == []


@pytest.mark.parametrize("text", [None, "", "{", '{"state": "x"}', "[]", '{"state": "x", "written": null}'])
def test_without_a_readable_progress_the_state_is_unknown(tmp_path: Path, text: str | None) -> None:
    folder = run_at(tmp_path / "run", 8)
    if text is not None:
        (folder / "progress.json").write_text(text)
    run = followed(folder)
    assert run.life.state == "unknown"
    assert "There is no progress.json" in warnings_of(run)[0]
    assert card(run, "accent").place == "step 8"


BF16 = "model: {dtype: bfloat16}\nalgorithm: {preset: grpo}\nrollout: {max_logprob_gap: null}\n"


@pytest.mark.parametrize(
    ("config", "metrics", "words"),
    [
        (
            BF16,
            {"mismatch/mean": 0.051},
            "logprobs are 0.051 apart on average, and the run ends unless it is rounding",
        ),
        (BF16, {"mismatch/mean": 0.049}, None),
        (BF16.replace("bfloat16", "float32"), {"mismatch/mean": 1.1e-4}, "and the run ends unless it is rounding"),
        (BF16.replace("null", "0.05"), {"mismatch/mean": 0.026}, "0.026 apart on average, and the run stops at 0.05"),
        (BF16.replace("null", "1.0"), {"mismatch/mean": 0.4}, None),
        (BF16, {"mismatch/outside_10pct": 0.125}, "12% of the sampled tokens have a probability in the trainer that"),
        (
            BF16,
            {"batch/staleness": 3.0, "actor/kl_old": 0.2},
            "Samples are stale: the policy that drew them is 3 steps",
        ),
        (BF16, {"batch/staleness": 3.0, "actor/clip_fraction_low": 0.3}, "30% of ratios clipped"),
        (BF16, {"batch/staleness": 3.0, "actor/kl_old": 0.01}, None),
        (BF16, {"batch/staleness": 0.0, "actor/kl_old": 0.2}, None),
        (BF16, {"actor/updated": 0.0}, f"No update in the last {RECENT} steps"),
        (BF16, {"actor/nonfinite": 0.5}, "50% of the last updates were skipped"),
        (BF16, {"response_length/clipped": 0.75}, "75% of the last responses were cut off"),
        (BF16, {"reward/no_box": 0.75}, "75% of the last responses have no box, which their prompts or the grader ask"),
        (BF16, {"reward/unparsed": 0.75}, "75% of the last responses have no answer"),
        (BF16, {"reward/masked": 0.25}, "25% of the last responses could not be graded"),
        ("not: [yaml", {}, None),
    ],
)
def test_warnings_of_the_last_steps(tmp_path: Path, config: str, metrics: dict[str, float], words: str | None) -> None:
    folder = run_at(tmp_path / "run", 8, config=config, **metrics)
    says(folder)
    found = warnings_of(followed(folder))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_no_progress_is_said_while_the_run_lives(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 8)
    says(folder, quiet_seconds=QUIET_S)
    assert warnings_of(followed(folder)) == []
    says(folder, quiet_seconds=QUIET_S + 30)
    (warning,) = warnings_of(followed(folder))
    assert warning == "No progress for 10 min: the run lives, and still is in “rollouts”."


def test_a_card_has_the_numbers(tmp_path: Path) -> None:
    """The reward of a step is step / 100: 0.355 is the mean of the last ten, .1 more than of those before."""
    folder = run_at(tmp_path / "run", 40, **{"time/generate": 1.2, "time/forward_backward": 0.5})
    says(folder, step=40, steps=100, share_done=0.4099)
    found = card(followed(folder), "accent")
    assert (found.percent, found.place) == (40.9, "step 40 of 100 done")
    assert found.left.startswith("2 h 0 min left, until about ")
    assert found.phase_facts == "37 of 64 responses · for 95 s · 1,240 tokens/s"
    assert found.phase_done == pytest.approx(37 / 64)
    assert next((fact.name, fact.value, fact.change) for fact in found.facts) == ("reward", "0.355", "+0.1")
    assert [(share.text, share.start) for share in found.shares] == [
        ("generate 60%", 0.0),
        ("forward, backward 25%", 60.0),
    ]


def test_a_card_says_what_a_percentage_of_tokens_counts(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 40)
    says(folder, step=107, steps=1000, share_done=0.9756, limit="10,000,000 tokens")
    assert card(followed(folder), "accent").place == "step 107 of at most 1,000 done, 97.5% of 10,000,000 tokens"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_at(tmp_path / "runs/one", 1)
    for name, words in (
        ("none", r"want the folder of a run, its output_dir; got .*none: no such folder \(current directory: "),
        ("file", "got .*file: it is a file"),
        ("runs", r"has no progress\.json, no config\.yaml, no metrics\.jsonl; below it is .*runs/one"),
    ):
        with pytest.raises(ValueError, match=words):
            check_watched(tmp_path / name)
