"""rlplus-bench tune: its choice, with a fake clock; the search; the command."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import run_config

from rlplus.bench import tune
from rlplus.bench.__main__ import main
from rlplus.bench.case import Case
from rlplus.kernels import exponentials
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import DEFAULT, Tiling
from rlplus.loss import tuning
from rlplus.loss.backends import ways

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FASTER, SLOWER, OTHER = (Tiling(programs=n) for n in (1, 2, 3))


# ---- the choice


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([[10, 10, 10], [9, 9, 9], [8, 8, 8]], 2),
        ([[10, 10, 10], [9.9, 9.9, 9.9]], 0),  # the margin is wider
        ([[10, 10, 10], [9.7, 9.7, 9.7]], 1),
        ([[10, 10, 10], [1, 20, 20]], 0),  # one lucky round
        ([[10, 10, 10], [9, 9, 90]], 1),  # one unlucky round
        ([[1, 5, 40], [0.9, 4.5, 36]], 1),  # the machine slows down: rounds are compared
        ([[10, 10, 10]], 0),
    ],
)
def test_the_fastest_is_chosen_if_it_is_faster_by_a_margin(times: list[list[float]], chosen: int) -> None:
    assert tune.choice(times) == chosen


def test_candidates_take_turns_and_each_round_begins_with_another() -> None:
    called: list[int] = []
    clock = lambda step: (step(), float(called[-1]))[1]  # noqa: E731
    times = tune.rounds([lambda i=i: called.append(i) for i in range(3)], clock)
    assert times == [[float(i)] * tune.ROUNDS for i in range(3)]
    assert called[:9] == [0, 1, 2, 1, 2, 0, 2, 0, 1]


class FakeWork:
    """Replaces `Work`: faults of tilings, and the clock's times, are given."""

    def __init__(self, times: dict[Tiling, float], faults: dict[Tiling, Any] | None = None) -> None:
        self.times, self.faults, self.timed = times, faults or {}, list[Tiling]()

    def fault(self, operation: str, tiling: Tiling) -> str:
        found = self.faults.get(tiling, "")
        if isinstance(found, Exception):
            raise found
        return found

    def clock(self, step: Any) -> float:
        self.timed.append(step())
        return self.times[step()]

    def search(self, *candidates: Callable[[Tiling], list[Tiling]], **options: Any) -> Any:
        parts = [
            tune.Part(
                f"part {i}", "loss", lambda work, tiling: lambda: tiling, lambda work, best, make=make: make(best)
            )
            for i, make in enumerate(candidates)
        ]
        return tune.search(self, self.clock, lambda text: None, parts=parts, **options)  # type: ignore[arg-type]


def test_a_part_starts_from_the_choice_of_the_one_before() -> None:
    both = FASTER._replace(gradient=tune.GRADIENT[1])
    work = FakeWork({DEFAULT: 10, FASTER: 8, SLOWER: 12, both: 7})
    best, rows = work.search(lambda best: [best, FASTER, SLOWER], lambda best: [best._replace(gradient=both.gradient)])
    assert best == both
    assert [(row["part"], row["tiling"], row["status"], row["ratio"]["median"]) for row in rows] == [
        ("part 0", "as before", "ok", 1.0),
        ("part 0", "programs 1", "ok", 0.8),
        ("part 0", "programs 2", "ok", 1.2),
        ("part 1", "as before", "ok", 1.0),
        ("part 1", "gradient 2048x4", "ok", 0.875),
    ]
    assert rows[1]["ms"] == {"median": 8, "least": 8, "greatest": 8}
    assert work.timed.count(FASTER) == 2 * tune.ROUNDS


def test_wrong_or_failing_candidates_are_not_timed() -> None:
    faults = {FASTER: "dweight is not finite", SLOWER: MemoryError(), OTHER: RuntimeError("out of resource:\nmore")}
    work = FakeWork({DEFAULT: 10}, faults)
    best, rows = work.search(lambda best: [FASTER, SLOWER, OTHER])
    assert best == DEFAULT
    assert set(work.timed) == {DEFAULT}
    assert [row["status"] for row in rows] == [
        "ok",
        "wrong: dweight is not finite",
        "failed: MemoryError: without a message",
        "failed: RuntimeError: out of resource: more",
    ]


def test_the_search_ends_with_an_error_that_ends_the_device() -> None:
    work = FakeWork({DEFAULT: 10}, {FASTER: RuntimeError("CUDA error: an illegal memory access was encountered")})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work.search(lambda best: [FASTER, OTHER])


def test_a_default_that_fails_ends_the_search() -> None:
    with pytest.raises(RuntimeError, match="part 0, as before: wrong: loss is not finite"):
        FakeWork({}, {DEFAULT: "loss is not finite"}).search(lambda best: [FASTER])


def test_candidates_that_do_not_start_in_time_are_left_out() -> None:
    left = iter([1, 1, 0, 0, 0, 0])
    work = FakeWork({DEFAULT: 10, FASTER: 5})
    best, rows = work.search(
        lambda best: [FASTER, SLOWER], lambda best: [OTHER, SLOWER], seconds_left=lambda: next(left)
    )
    assert best == FASTER
    assert [row["status"] for row in rows] == ["ok", "ok", *["left out: no time left"] * 4]


# ---- the search


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> tune.Work:
    monkeypatch.setattr(tuning, "_in_use", {})
    monkeypatch.setattr(tune, "ROUNDS", 1)
    for name, count in (("STATISTICS", 2), ("GRADIENT", 2), ("PROGRAMS", 1)):
        monkeypatch.setattr(tune, name, getattr(tune, name)[:count])
    monkeypatch.setattr(tune, "SIZES", 2)
    monkeypatch.setattr(tune, "LAUNCHES", 1)
    return tune.Work(Case("tune", N=4, H=8, V=20, dtype="float32", methods=()), DEVICE, 1)


def test_the_search_tries_every_part_on_the_real_operations(work: tune.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock the last candidate of each part is the fastest."""
    monkeypatch.setattr(tune.Work, "fault", lambda *_: "")  # the tests below are about it
    timed: list[Any] = []

    def clock(step: Callable[[], object]) -> float:
        step()
        timed.append(step)
        return 1 / len(timed)

    best, rows = tune.search(work, clock, lambda text: None)
    assert {row["status"] for row in rows} == {"ok"}
    assert list(dict.fromkeys(row["part"] for row in rows)) == [part.name for part in tune.PARTS]
    assert (best.statistics, best.gradient) == (tune.STATISTICS[1], tune.GRADIENT[1])
    assert best.forward == best.loss == kernels.tiles(work.hidden)[1]
    assert best.rows is not None
    assert best.rows.scratch_bytes == 1_000_000
    assert best.rows.rows * ways.row_bytes(work.head, ways.way_of(work.head, True, tiling=best)) <= 1_000_000
    assert not tuning._in_use


def test_a_wrong_gemm_is_not_timed(work: tune.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.linear_exponentials

    def wrong(partial: torch.Tensor, *rest: Any, **options: Any) -> None:
        original(partial, *rest, **options)
        partial[:, 1] *= 1.001

    monkeypatch.setattr(kernels, "linear_exponentials", wrong)
    best, rows = tune.search(work, lambda step: 1.0, lambda text: None, parts=tune.PARTS[2:4])
    assert best == DEFAULT
    found = [row["status"] for row in rows if "x" in row["tiling"]]
    assert found
    assert all(status.startswith("wrong: the error of logprob is ") for status in found)


def test_wrong_exponentials_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_in_use", {})
    original = exponentials.close_rows

    def wrong(factor: torch.Tensor, own: torch.Tensor, *rest: Any, **options: Any) -> None:
        original(factor, own, *rest, **options)
        own[0] *= 1.1 if tuning._in_use[work.kind] != DEFAULT else 1.0

    monkeypatch.setattr(exponentials, "close_rows", wrong)
    work = tune.Work(Case("tune", N=4, H=8, V=70, dtype="bfloat16", methods=()), DEVICE, 1)
    best, rows = tune.search(work, lambda step: 1.0, lambda text: None, parts=tune.PARTS[3:4])
    assert best == DEFAULT
    found = [row["status"] for row in rows if row["tiling"] != "as before"]
    assert found
    assert all(status.startswith("wrong: the error of d") for status in found)


def test_every_result_of_a_candidate_is_compared(work: tune.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    results = work.loss()
    wrong = ""
    monkeypatch.setattr(tune.Work, "loss", lambda self: {k: v * (1 + 0.01 * (k == wrong)) for k, v in results.items()})
    assert work.fault("loss", DEFAULT) == ""
    for wrong in results:
        assert work.fault("loss", FASTER).startswith(f"the error of {wrong} is ")


# ---- the command


def test_the_command_writes_a_file_that_can_be_used(
    work: tune.Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tune.Work, "fault", lambda *_: "")
    monkeypatch.setattr(tune, "this_device", lambda dtype: DEVICE)
    monkeypatch.setattr(tune, "elapsed", lambda step, cuda: (step(), 1.0)[1])
    monkeypatch.setenv("RLPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "search", partial(tune.search, parts=(tune.PARTS[1], tune.PARTS[4])))
    size = ["--head", "20", "8", "--dtype", "float32", "--tokens", "4", "--max-scratch-mb", "1"]
    main(["tune", *size])
    path = tuning.cached_file(work.kind)
    assert path is not None
    record = tuning.read(path)
    assert tuning.usable(record, work.kind, "") == (DEFAULT, "")
    assert [row["part"] for row in record["measured"]].count("rows of a chunk") == 2
    said = capsys.readouterr().out
    assert f"as before: written to {path}\n" in said
    assert "row gradient: gradient 2048x4: 1.000 ms, 1.000\n" in said
    tuning.use_tuning(path)
    main(["tune", *size, "--output", str(tmp_path / "own.json"), "--seconds", "0"])
    assert {row["status"] for row in tuning.read(tmp_path / "own.json")["measured"]} == {"left out: no time left"}


def options(**changes: Any) -> Any:
    given = {"model": None, "head": None, "dtype": None, "tokens": 64, "max_scratch_mb": None}
    return SimpleNamespace(**(given | changes))


def described(**changes: Any) -> tuple[Any, ...]:
    case, scratch_mb = tune.described(options(**changes))
    return case.V, case.H, case.dtype, case.N, scratch_mb


def test_sizes_come_from_the_command_a_model_or_a_configuration(tmp_path: Path) -> None:
    assert described(head=[40, 8]) == (40, 8, "bfloat16", 64, 1250)
    text = {"model_type": "qwen2", "vocab_size": 99, "hidden_size": 24, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert described(model=str(tmp_path), dtype="float16") == (99, 24, "float16", 64, 1250)
    run = tmp_path / "run.yaml"
    config = run_config(tmp_path, train={"max_scratch_mb": 7})
    run.write_text(config.to_yaml())
    with pytest.raises(ValueError, match=r"want a configuration with model.path, or --head; .* has model.scratch"):
        described(model=str(run))
    model = {"scratch": None, "path": str(tmp_path)}
    run.write_text(run_config(tmp_path, train={"max_scratch_mb": 7}, model=model).to_yaml())
    assert described(model=str(run)) == (99, 24, "float32", 64, 7)
    assert described(model=str(run), dtype="bfloat16", max_scratch_mb=9) == (99, 24, "bfloat16", 64, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "want a model or --head V H; got neither"),
        (["here", "--head", "5", "5"], "want a model or --head V H; got both"),
        (["--head", "5", "0"], "want H >= 1; got 0"),
        (["--head", "5", "5", "--tokens", "0"], "want tokens >= 1; got 0"),
        (["/nowhere"], "want a Hugging Face folder or hub name; got '/nowhere'"),
        (["/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_it_needs_a_gpu_on_which_the_self_check_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def complaint() -> str:
        with pytest.raises(SystemExit):
            main(["tune", "--head", "5", "5"])
        return capsys.readouterr().err

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "tune needs CUDA, and torch sees no such device" in complaint()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    verdict = tune.verdicts.Verdict("refused", "dweight is not finite")
    monkeypatch.setattr(tune.verdicts, "verdict_on", lambda device, dtype: verdict)
    assert "passes its self-check; it says: dweight is not finite" in complaint()
