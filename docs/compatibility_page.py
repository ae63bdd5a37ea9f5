"""The table of compatibility.md, made of the results of `make compatibility`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "tests/peers/newest.json"
Table = Callable[[tuple[str, ...], Iterator[tuple[str, ...]]], str]


def frameworks(table: Table) -> str:
    """A row per framework: its newest release, the releases beside it, and the outcome."""
    header = ("framework", "newest", "beside it", "Python", "outcome", "date", "revision")
    return table(header, map(row, json.loads(RESULTS.read_text(encoding="utf-8"))))


def row(result: dict[str, Any]) -> tuple[str, ...]:
    beside = ", ".join(f"{name} {version}" for name, version in result["beside"].items())
    date, revision = result["date"], f"`{result['revision']}`"
    return result["framework"], result["newest"] or "", beside, result["python"], outcome(result), date, revision


def outcome(result: dict[str, Any]) -> str:
    """The outcome with the numbers of tests, and the reason."""
    counts = ", ".join(f"{result[name]} {name}" for name in ("passed", "failed", "skipped") if result.get(name))
    text = f"**{counts if counts and result['outcome'] in ('passed', 'failed') else result['outcome']}**"
    return f"{text}: {result['reason']}" if result["reason"] else text
