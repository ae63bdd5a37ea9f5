"""The newest frameworks beside the wheel: what becomes of conflicts and failures, and the committed results."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import compatibility
import pytest

from docs import compatibility_page

TRL = next(each for each in compatibility.FRAMEWORKS if each.name == "trl")
COMMITTED = json.loads(compatibility_page.RESULTS.read_text())
REPORT = """<testsuites><testsuite tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}">
<testcase name="one"/><testcase name="two"><failure/></testcase><testcase name="three"><error/></testcase>
</testsuite></testsuites>"""


class Index:
    """A stand-in for uv: releases by name, and the commands that fail with a message."""

    def __init__(self, **failures: str) -> None:
        self.failures, self.asked = failures, []

    def __call__(self, *words: str, stdin: str = "") -> str:
        command = "newest" if "--no-deps" in words else words[1] if words[0] == "pip" else words[0]
        self.asked.append((command, stdin))
        if command in self.failures:
            raise compatibility.Refused(self.failures[command])
        return "trl==1.17.0\n" if command == "newest" else "torch==2.15.0\ntransformers==5.24.0\ntrl==1.17.0\n"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in in place; its tests pass."""

    def put(**failures: str) -> Index:
        found = Index(**failures)
        monkeypatch.setattr(compatibility, "uv", found)
        passed = {"passed": 3, "failed": 0, "skipped": 1, "outcome": "passed", "reason": ""}
        monkeypatch.setattr(compatibility, "tested", lambda *_: passed)
        return found

    return put


def test_the_newest_release_is_resolved_beside_the_wheel(index: Any, tmp_path: Path) -> None:
    asked = index().asked
    row = compatibility.tried(TRL, tmp_path / "w.whl", tmp_path, "abc1234")
    assert (row["newest"], row["outcome"], row["passed"]) == ("1.17.0", "passed", 3)
    assert row["beside"] == {"torch": "2.15.0", "transformers": "5.24.0"}
    assert [command for command, _ in asked] == ["newest", "compile", "venv", "install"]
    assert asked[1][1].splitlines()[:2] == [f"rlplus @ {(tmp_path / 'w.whl').as_uri()}", "trl==1.17.0"]


@pytest.mark.parametrize(
    ("command", "outcome", "reason"),
    [
        ("newest", "not tried", "words"),
        ("compile", "does not resolve", "words"),
        ("install", "not tried", "cannot be installed: words"),
    ],
)
def test_a_framework_that_cannot_be_tried_says_why(
    index: Any, tmp_path: Path, command: str, outcome: str, reason: str
) -> None:
    index(**{command: "words"})
    row = compatibility.tried(TRL, tmp_path / "w.whl", tmp_path, "abc1234")
    assert (row["outcome"], row["reason"]) == (outcome, reason)
    assert compatibility_page.row(row)[4] == f"**{outcome}**: {reason}"


def test_a_conflict_is_told_by_its_first_step() -> None:
    """uv goes on to what follows for all other releases."""
    said = (
        "error: No solution found\n  cause: Because a wants b<2 and\n  c wants b>2, both conflict.\n  And because d, e."
    )
    assert compatibility.cause(said) == "Because a wants b<2 and c wants b>2, both conflict."
    assert compatibility.cause("error: no such\nindex") == "error: no such index"


def test_a_framework_without_tests_is_resolved_only(index: Any, tmp_path: Path) -> None:
    index()
    row = compatibility.tried(
        TRL._replace(untested="needs a GPU", extra="train"), tmp_path / "w.whl", tmp_path, "abc1234"
    )
    assert (row["outcome"], row["reason"]) == ("resolves", "needs a GPU")


@pytest.mark.parametrize(
    ("numbers", "outcome", "reason"),
    [((9, 1, 1, 2), "failed", "two, three"), ((2, 0, 0, 2), "failed", ""), ((9, 0, 0, 2), "passed", "")],
)
def test_a_report_is_counted(tmp_path: Path, numbers: tuple[int, ...], outcome: str, reason: str) -> None:
    """Tests that are all skipped are no pass."""
    report = tmp_path / "report.xml"
    text = REPORT.format(**dict(zip(("tests", "failures", "errors", "skipped"), numbers, strict=True)))
    bad = numbers[1] + numbers[2]
    report.write_text(text if bad else text.replace("<failure/>", "").replace("<error/>", ""))
    row = compatibility.counted(report)
    passed = numbers[0] - bad - numbers[3]
    assert (row["passed"], row["failed"], row["skipped"]) == (passed, bad, numbers[3])
    assert (row["outcome"], row["reason"]) == (outcome, reason or ("" if passed else "no test ran"))


def test_a_row_is_replaced_and_a_framework_that_got_worse_is_an_error(index: Any, tmp_path: Path) -> None:
    results = tmp_path / "newest.json"
    index()
    assert compatibility.main("w.whl", str(results), "trl", "torch") == 0
    index(compile="words")
    assert compatibility.main("w.whl", str(results), "trl") == 1
    rows = json.loads(results.read_text())
    assert [(row["framework"], row["outcome"]) for row in rows] == [("torch", "passed"), ("trl", "does not resolve")]
    assert compatibility.main("w.whl", str(results), "trl") == 0, "known since the last time"
    with pytest.raises(ValueError, match=r"want framework one of torch, .*; got 'trll'; nearest: trl"):
        compatibility.main("w.whl", str(results), "trll")


def test_the_tests_of_a_framework_exist() -> None:
    files = [word for each in compatibility.FRAMEWORKS for word in each.tests if word.startswith("tests/")]
    assert [name for name in files if not (compatibility.ROOT / name).is_file()] == []
    assert [each.name for each in compatibility.FRAMEWORKS if bool(each.tests) == bool(each.untested)] == []


def test_every_framework_has_a_result() -> None:
    assert [row["framework"] for row in COMMITTED] == [each.name for each in compatibility.FRAMEWORKS]
    for row in COMMITTED:
        assert date.fromisoformat(row["date"]) <= date.today()
        assert row["outcome"] in ("passed", "resolves") or row["reason"]
        assert row["outcome"] != "passed" or (row["passed"] > 0 and row["failed"] == 0 and row["beside"])
