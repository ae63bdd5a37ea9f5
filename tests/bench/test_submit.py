"""rlplus-bench submit: the check before the measurement, the rehearsal, the page made of the files that are sent."""

import json
import re
from collections.abc import Callable
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from docs import community_page, generate
from rlplus.bench import session, submit
from rlplus.bench.__main__ import main
from rlplus.bench.suites import QWEN, SUITES, Case
from rlplus.loss import selfcheck
from rlplus.loss.guard.verdicts import Verdict

METHODS = ("triton", "torch", "naive torch")
SMALL = Case("main", **QWEN, dtype="bfloat16", methods=METHODS, memory=False)
PASSED = {"status": "passed", "reason": ""}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a rehearsal with three methods."""
    folder = tmp_path_factory.mktemp("rehearsal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "gpu", (lambda: [SMALL], inf))
        main(["submit", "--cpu", "--output", str(folder)])
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def sent(rehearsal: Path) -> dict[str, Any]:
    """A file as a GPU would have filled it: numbers of the rehearsal, whatever a CPU has not is made up."""
    found = json.loads(rehearsal.read_text())
    found |= {"rehearsal": False, "selfcheck": {name: PASSED for name in submit.DTYPES}}
    hardware = {"capability": "9.0", "memory_gb": 80.0, "multiprocessors": 132, "cuda": "13.0"}
    found["result"] |= {"device": "A <GPU>", "clock": "CUDA events", "hardware": hardware}
    found["result"]["versions"]["driver"] = "made up"
    found["result"]["cases"][0]["clocks"] = {"clocks.sm": 1980.0, "temperature.gpu": 60.0}
    return found


def put(folder: Path, content: dict[str, Any], name: str = "gpu.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


# ---- the command


def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["submit", "--output", str(tmp_path)])
    assert end.value.code == 2
    wanted = rf"want an NVIDIA GPU; torch {re.escape(torch.__version__)} sees none \(--cpu rehearses without one\)"
    assert re.search(wanted, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["submit", "--cpu", "--output", str(tmp_path / "file")])
    assert "argument --output: want a folder; got the file" in capsys.readouterr().err


def test_kernels_that_fail_the_check_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is the kernels' own, in the interpreter: here its last comparison finds an error."""
    monkeypatch.setattr(selfcheck, "compare", lambda *_: "the error of loss is 1.0; want at most 0.1")
    monkeypatch.setattr(session, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        main(["submit", "--cpu", "--output", str(tmp_path)])
    said = capsys.readouterr()
    assert end.value.code == 1
    assert "float32: refused Case(" in said.out
    assert "the error of loss is 1.0; want at most 0.1" in said.out
    assert said.err == "nothing was measured: the self-check did not pass\n"
    assert list(tmp_path.iterdir()) == []


def test_on_a_gpu_each_dtype_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, with the device's UUID; earlier verdicts do not count."""
    asked: list[list[str]] = []
    device = type("Properties", (), {"uuid": "GPU-7"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(
        "rlplus.loss.guard.verdicts.run_check", lambda words: (asked.append(words), Verdict("passed", ""))[1]
    )
    assert submit.self_check(cpu=False) == {name: Verdict("passed", "") for name in submit.DTYPES}
    assert [words[-2:] for words in asked] == [["GPU-7", name] for name in submit.DTYPES]


def test_a_rehearsal_is_marked_and_complete(rehearsal: Path) -> None:
    found = json.loads(rehearsal.read_text())
    assert re.fullmatch(rf"rehearsal-linux-\w+(-\w+)?-{found['date']}-[0-9a-f]{{8}}\.json", rehearsal.name)
    assert (found["format"], found["rehearsal"], found["selfcheck"]) == (submit.FORMAT, True, {"float32": PASSED})
    assert abs((date.today() - date.fromisoformat(found["date"])).days) <= 1
    assert found["result"]["complete"]
    rows = {row["method"]: row for row in found["result"]["cases"][0]["rows"]}
    assert set(rows) == {"bare-3u", *METHODS}
    assert all(row["status"] == "ok" and row["ms"]["median"] > 0 for row in rows.values())
    assert rows["triton"]["logprob_error"] < 1e-4


# ---- the page


def test_a_rehearsal_is_no_result(rehearsal: Path) -> None:
    with pytest.raises(ValueError, match=r"rehearsal-.*: want a GPU's result; got a rehearsal on a CPU"):
        community_page.checked(rehearsal)


def test_a_files_numbers_are_on_the_page(sent: dict[str, Any], tmp_path: Path) -> None:
    """Its texts come from strangers, so that no markup in them counts."""
    row = next(row for row in sent["result"]["cases"][0]["rows"] if row["method"] == "triton")
    row["ratio"] = {"median": 1.25, "least": 1.0, "greatest": 1.5}
    put(tmp_path, sent)
    page = community_page.part(generate.table, tmp_path)
    summary = next(line for line in page.splitlines() if line.startswith("| A &lt;GPU> |"))
    assert "| 1.25 (1.00–1.50) |" in summary
    assert "clocks.sm 1980, temperature.gpu 60" in summary
    assert f"\n## A &lt;GPU>, {sent['date']}\n" in page
    assert re.search(r"\| naive torch \| RL-PLUS \| \d", page)
    assert "<" not in page.replace("<br>", "")


def test_files_are_ordered_by_gpu(sent: dict[str, Any], tmp_path: Path) -> None:
    for name, device in (("a", "Z"), ("b", "B")):
        put(tmp_path, sent | {"result": sent["result"] | {"device": device}}, f"{name}.json")
    assert [each["result"]["device"] for each in community_page.submissions(tmp_path)] == ["B", "Z"]


def at(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one value; None removes it."""

    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        if value is None:
            del found[keys[-1]]
        else:
            found[keys[-1]] = value

    return change


CASE = ("result", "cases", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("format", value=2), "gpu.json: format: 1 was expected"),
        (at("date", value=None), "gpu.json: the file: 'date' is a required property"),
        (at("date", value="today"), "gpu.json: date: 'today' does not match"),
        (at("host", value="mine"), "gpu.json: the file: Additional properties are not allowed ('host' was unexpected)"),
        (at("selfcheck", "float16", value=None), "gpu.json: selfcheck: 'float16' is a required property"),
        (at("selfcheck", "float16", "status", value="refused"), "selfcheck.float16.status: 'passed' was expected"),
        (at("result", "complete", value=False), "gpu.json: result.complete: True was expected"),
        (at("result", "clock", value="CPU time"), "gpu.json: result.clock: 'CUDA events' was expected"),
        (at("result", "versions", "driver", value=None), "gpu.json: result.versions: 'driver' is a required property"),
        (at(*CASE, "name", value="side"), "gpu.json: result.cases: "),
        (at(*CASE, "rows", 1, "ratio", value=None), "gpu.json: result.cases.0.rows.1: 'ratio' is a required property"),
        (at(*CASE, "rows", 1, "ms", "least", value=0), "gpu.json: result.cases.0.rows.1.ms.least: 0 is less than or"),
        (at(*CASE, "rows", 1, "method", value="tritn"), "gpu.json: as a method one of "),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(
    sent: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    sent["selfcheck"] = {name: dict(PASSED) for name in submit.DTYPES}
    community_page.checked(put(tmp_path, sent))
    change(sent)
    with pytest.raises(ValueError, match=re.escape(message)):
        community_page.checked(put(tmp_path, sent))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text('{"format": 1')
    with pytest.raises(ValueError, match=r"gpu\.json: want JSON; Expecting"):
        community_page.submissions(tmp_path)


def test_the_folder_holds_valid_files_only() -> None:
    assert len(community_page.submissions(community_page.FOLDER)) == len(list(community_page.FOLDER.glob("*.json"))) - 1
    schema = (community_page.FOLDER / community_page.SCHEMA).read_text()
    community_page.Draft202012Validator.check_schema(json.loads(schema))


def test_without_files_the_page_says_so(tmp_path: Path) -> None:
    assert community_page.part(generate.table, tmp_path) == "No file has been sent yet."
