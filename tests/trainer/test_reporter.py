"""Lines that say where a run is, its progress.json, and the counts of engine, grader and learner behind them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_pages import step_line
from trainer_runs import run_config

from rlplus.common import activity
from rlplus.common.terminal import duration
from rlplus.train.config import PROGRESS, Config, RewardConfig
from rlplus.train.reward import Scorer
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import Interrupted, open_run, train
from rlplus.train.trainer.progress import Progress
from rlplus.train.trainer.reporter import AGAIN_S, BETWEEN_STEPS_S, SETTLED_S, Pace, Reporter

OF_TOKENS = "of 5,000 tokens, step 6 of at most 9"


class Clock:
    """Seconds that pass when the test says so, for the reporter and for what reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(activity.time, "monotonic", self)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def reporter(folder: Path, clock: Clock, **options: Any) -> Reporter:
    folder.mkdir(exist_ok=True)
    return Reporter(folder, "rlplus", clock=clock, **options)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
    return found


def at_step(config: Config, step: int, generated: int = 0) -> Progress:
    progress = Progress(config)
    progress.step, progress.generated = step, generated
    return progress


def test_a_long_phase_gets_a_line_and_later_another(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before there is a step; nothing is drawn over, and what a short phase does is not said."""
    report = reporter(tmp_path / "run", clock)
    activity.current.begin("model")
    report.look()
    clock.now += SETTLED_S
    report.look()
    assert capsys.readouterr().err == f"rlplus start  loading the model, {SETTLED_S:.0f} s\n"
    activity.current.begin("data")
    activity.rows.begin(0)
    activity.rows.add(4000)
    clock.now += SETTLED_S
    report.look()
    words = f"loading data 4,000 rows, {SETTLED_S:.0f} s"
    assert capsys.readouterr().err == f"rlplus start  {words}\n"
    assert activity.in_words() == words
    report.follow(at_step(run_config(tmp_path, train={"steps": 200}), 0), [])
    clock.now += AGAIN_S - 1
    activity.current.begin("pack")
    report.look()
    activity.current.begin("generate")
    activity.rollouts.begin(64)
    clock.now += SETTLED_S
    report.look()
    activity.rollouts.add(37, 5000)
    clock.now += AGAIN_S - SETTLED_S - 5
    report.look()  # too early for another one
    clock.now += 30
    report.look()
    rate, seconds = 5000 / (AGAIN_S + 25), AGAIN_S + 25
    rest = seconds * 27 / 37
    assert capsys.readouterr().err.splitlines() == [
        f"rlplus   0% step 1 of 200  rollouts 0 of 64 responses, {SETTLED_S:.0f} s",
        f"rlplus   0% step 1 of 200  rollouts 37 of 64 responses, {rate:.0f} tok/s, {seconds:.0f} s  "
        f"about {rest:.0f} s left in this phase",
    ]


def test_after_a_resume_percentage_and_time_left_are_the_whole_runs(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """150 of 200 steps are done, the last ones in 60 s each; the first one took longer."""
    config = run_config(tmp_path, train={"steps": 200})
    earlier = [step_line(i) | {"time/step": 999.0 if i == 1 else 60.0} for i in range(1, 151)]
    report = reporter(tmp_path / "run", clock, ranks=8)
    report.follow(at_step(config, 150), earlier[-51:])
    activity.current.begin("generate")
    activity.rollouts.begin(64)
    clock.now += 20
    report.look()
    want = "rlplus  75% step 151 of 200  rollouts 0 of 64 responses, rank 0 of 8, 20 s  50 min left\n"
    assert capsys.readouterr().err == want
    state = report.state()
    assert state["seconds_left"] == pytest.approx(50 * 60 - 20)
    assert (state["step"], state["steps"], state["share_done"], state["resumed_at"]) == (150, 200, 0.75, 150)


@pytest.mark.parametrize(
    ("train", "generated", "place"),
    [({"steps": 6}, 0, "step 6 of 6"), ({"steps": 9, "generated_tokens": 5000}, 5000, OF_TOKENS)],
)
def test_behind_the_last_step_none_begins(
    train: dict[str, int],
    generated: int,
    place: str,
    tmp_path: Path,
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = reporter(tmp_path / "run", clock)
    report.follow(at_step(run_config(tmp_path, train=train), 6, generated), [])
    activity.current.begin("export")
    clock.now += SETTLED_S
    report.look()
    want = f"rlplus 100% {place}  writing the model, {SETTLED_S:.0f} s"
    assert capsys.readouterr().err.startswith(want)


def test_the_line_of_a_step_has_its_seconds_and_the_time_left(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Toys do many steps in a second: then some have no line, but the last one has."""
    progress = at_step(run_config(tmp_path, train={"steps": 4}), 0)
    report = reporter(tmp_path / "run", clock)
    report.follow(progress, [])
    for step, passed in ((1, 5000.0), (2, BETWEEN_STEPS_S / 2), (3, BETWEEN_STEPS_S), (4, 0.0)):
        clock.now += passed
        progress.step = step
        report.step(step_line(step) | {"time/step": 1200.0, "tokens_per_second": 1240.4})
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"  reward.*length", "  …", line) for line in lines] == [
        "rlplus  25% step 1 of 4  … 20  1,240 tok/s  1,200 s  1 h 0 min left",
        "rlplus  75% step 3 of 4  … 20  1,240 tok/s  1,200 s  20 min left",
        "rlplus 100% step 4 of 4  … 20  1,240 tok/s  1,200 s  0 s left",
    ]


def test_a_percentage_of_tokens_is_said_to_be_one(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is none of the steps beside it."""
    progress = at_step(run_config(tmp_path, train={"steps": 1000, "generated_tokens": 10_000}), 3, 9700)
    report = reporter(tmp_path / "run", clock)
    report.follow(progress, [])
    assert report.state()["limit"] == "10,000 tokens"
    report.step(step_line(3))
    assert capsys.readouterr().err.startswith("rlplus  97% of 10,000 tokens, step 3 of at most 1000  reward ")
    for generated, limit in ((30, ""), (31, "10,000 tokens")):  # the share of the steps is 0.003
        progress.generated = generated
        assert report.state()["limit"] == limit


def test_the_end_of_a_run_by_tokens_is_their_share(tmp_path: Path, clock: Clock) -> None:
    config = run_config(tmp_path, train={"steps": 1000, "generated_tokens": 10_000})
    report = reporter(tmp_path / "run", clock)
    earlier = [{"step": i, "generated_tokens": 1000 * i, "time/step": 10.0} for i in (1, 2, 3)]
    report.follow(at_step(config, 3, 3000), earlier)
    assert report.state()["seconds_left"] == pytest.approx(70)


def test_a_step_that_takes_longer_leaves_the_time_of_the_others() -> None:
    pace = Pace()
    assert pace.left(0.0, 5.0) is None
    for seconds in (10.0, 30.0):
        pace.add(0.1, seconds)
    assert pace.left(0.2, 0.0) == pytest.approx(8 * 20)
    assert pace.left(0.2, 15.0) == pytest.approx(8 * 20 - 15)
    assert pace.left(0.2, 500.0) == pytest.approx(7 * 20)
    assert pace.left(1.0, 500.0) == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3569, "59 min"), (3600, "1 h 0 min"), (7170, "2 h 0 min"),
     (12000, "3 h 20 min"), (172800, "2 d 0 h"), (529200, "6 d 3 h")],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_disk_that_is_full_is_said_once_and_ends_nothing(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reporter(tmp_path / "run", clock)
    with report:
        (tmp_path / "run" / PROGRESS).unlink()

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        report.look()
        report.look()
    assert caplog.text.count("`rlplus watch` will not see this run") == 1
    assert not list((tmp_path / "run").iterdir())


def test_the_other_ranks_are_silent(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "run", clock, enabled=False) as report:
        report.say("a note")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run" / PROGRESS).exists()


class Counted:
    """Every (phase, done, total) that was reported while the run went on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []
        add = activity.Work.add

        def counted(work: activity.Work, *counts: int) -> None:
            add(work, *counts)
            self.seen.append((activity.current.phase, work.done, work.total))

        monkeypatch.setattr(activity.Work, "add", counted)

    def of(self, phase: str) -> list[tuple[int, int]]:
        return [(done, total) for name, done, total in self.seen if name == phase]


def test_a_run_counts_its_work_and_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 prompts, three rollouts and a demonstration each, as rlplus has them."""
    config, counted = run_config(tmp_path, train={"steps": 1}), Counted(monkeypatch)
    train(config)
    assert counted.of("generate")[-1] == (12, 12)
    assert counted.of("score")[-1] == (12, 12)
    assert counted.of("demonstrations")[-1] == (6, 6)
    assert counted.of("data") == [(6, 0)]  # rows, whose number was not known
    done = counted.of("forward_backward")
    assert [each for each, _ in done] == list(range(1, len(done) + 1))
    assert {total for _, total in done} == {len(done)}
    state = read(Path(config.output_dir))
    assert (state["state"], state["message"]) == ("finished", "")
    assert (state["step"], state["share_done"], state["phase"]) == (1, 1.0, "writing the model")
    assert not list(Path(config.output_dir).glob("*.new"))


@pytest.mark.parametrize(
    ("error", "state"),
    [(Interrupted(15, "stopped by signal 15"), "stopped"), (RunFailed("the engine died"), "failed"), (None, "stopped")],
)
def test_the_file_says_how_a_run_ended(tmp_path: Path, clock: Clock, error: BaseException | None, state: str) -> None:
    report = reporter(tmp_path / "run", clock)
    report.follow(at_step(run_config(tmp_path), 1), [])

    def body() -> None:
        with report:
            assert read(tmp_path / "run")["state"] == "running"
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    found = read(tmp_path / "run")
    assert (found["state"], found["message"]) == (state, "" if error is None else str(error))


def test_a_run_that_cannot_be_made_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        assert activity.current.phase == "engine"
        raise RunFailed("no engine today")

    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_engine", broken)
    config = run_config(tmp_path)
    with pytest.raises(RunFailed), open_run(config):
        pass
    state = read(Path(config.output_dir))
    assert (state["state"], state["message"], state["step"]) == ("failed", "no engine today", None)
    assert state["phase"] == "starting the rollout engine"


def test_a_grader_counts_what_it_has_graded() -> None:
    config = RewardConfig(kind="exact_match", workers=2)
    with Scorer(config) as scorer:
        scorer(["1"] * 70, ["1"] * 70)
    assert activity.grading.state()[:2] == (70, 70)


def test_the_labels_are_of_phases_that_exist() -> None:
    """A renamed phase would lose its label and its count."""
    source = "".join(path.read_text() for path in Path(activity.__file__).parents[1].rglob("*.py"))
    for phase in {*activity.LABELS, *activity.WORK}:
        assert re.search(rf'(time|phase|begin|naming_phase)\([^)]*"{phase}"', source), phase
