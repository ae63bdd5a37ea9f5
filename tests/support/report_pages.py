"""Runs, evaluations and kept samples for reports, and the pages that are made of them."""

import re
from html.parser import HTMLParser
from math import log
from pathlib import Path
from typing import Any

from rlplus.tools.report import RunData, write_report
from rlplus.train.data import KeptSample, write_kept
from rlplus.train.evaluation.results import Evaluation

RLPLUS = "algorithm:\n  preset: rlplus\ntrain:\n  lr: 1.0e-3\n"


def step_line(step: int, **metrics: float) -> dict[str, float]:
    base = {"step": step, "generated_tokens": 1000 * step, "time/step": 2.0, "reward/internal": step / 100}
    return base | {"actor/entropy_internal": 1 / step, "response_length/mean": 20.0} | metrics


def run(steps: int = 40, config: str = RLPLUS, **changes: Any) -> RunData:
    return RunData(config, tuple(step_line(i) for i in range(1, steps + 1)), **changes)


def evaluation(correct: tuple[int, ...], name: str = "m", n: int = 8, **changes: object) -> Evaluation:
    fields: dict[str, object] = {
        "name": name,
        "problems": tuple(range(len(correct))),
        "n": (n,) * len(correct),
        "correct": correct,
        "k": (1, 4),
        "temperature": 1.0,
        "seed": 0,
        "mean_response_length": 12.34,
        "truncated_share": 0.125,
        "statuses": {"ok": n * len(correct) - 3, "timeout": 3},
        "mean_reward": sum(correct) / (n * len(correct)),
    }
    return Evaluation(**(fields | changes))  # type: ignore[arg-type]


class Page(HTMLParser):
    """Text, attributes and ids of a page; checks that tags are closed in order."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())
        self.charts = re.findall(r'<figure class="chart">.*?</figure>', self.html, flags=re.DOTALL)
        self.titles = [re.findall(r"<b>(.*?)</b>", chart)[0] for chart in self.charts]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)


def written(folder: Path, *arguments: Any, **options: Any) -> Page:
    write_report(folder / "report.html", *arguments, **options)
    return Page(folder / "report.html")


def kept(**changes: Any) -> KeptSample:
    fields: dict[str, Any] = {
        "step": 1, "problem": 7, "benchmark": "", "prompt": "1+1=", "response": "2", "reward": 1.0, "status": "ok",
        "truncated": False, "tokens": ["2", "<e>"], "external": [False, False], "logprob": [log(0.75), 0.0],
        "entropy": [0.5, 0.25], "advantage": [1.5, 1.5], "exploration_weight": [None, None],
    }  # fmt: skip
    return KeptSample(**(fields | changes))


def keep(folder: Path, name: str, *samples: KeptSample) -> Path:
    write_kept(folder / f"{name}.parquet", samples)
    return folder
