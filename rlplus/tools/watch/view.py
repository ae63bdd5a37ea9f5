"""The parts of the page, as HTML: the runs' cards, their curves and their newest samples."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from rlplus.common.terminal import duration
from rlplus.tools.report import environment, label_styles, render
from rlplus.tools.report.charts import curve_sections, number
from rlplus.tools.report.tables import OVERHEAD, WORK
from rlplus.tools.watch.followed_run import FollowedRun, Life
from rlplus.tools.watch.plain_warnings import warnings_of

TEMPLATES = "rlplus.tools.watch"
RECENT = 10  # steps whose means the cards show
PARTS = ("now", "curves", "samples")
_STATES = {  # word and style of the dot for each `Life.state`
    "running": ("training", "good"),
    "finished": ("finished", "done"),
    "stopped": ("stopped", "bad"),
    "failed": ("failed", "bad"),
    "gone": ("no sign of life", "bad"),
    "unknown": ("state unknown", "done"),
}


@dataclass(frozen=True)
class Fact:
    """A number under its name. change: from the steps before, empty if there are too few."""

    name: str
    value: str
    change: str = ""


@dataclass(frozen=True)
class Share:
    """A phase's part of the last steps' time, as a piece of a bar that is 100 wide."""

    name: str
    start: float
    width: float

    @property
    def text(self) -> str:
        return f"{self.name} {self.width:.0f}%"


@dataclass
class Card:
    """A run at a glance. phase_done: the share of its phase's work that is done, None where that is unknown."""

    label: str
    style: str
    state: str
    tone: str
    percent: float | None = None
    place: str = ""
    left: str = ""
    phase: str = ""
    phase_facts: str = ""
    phase_done: float | None = None
    message: str = ""
    warnings: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)


class View:
    """The page of several runs; `update` it before asking for a part. What has not changed is not rendered again."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self.runs = list(runs)
        self._environment = environment(TEMPLATES)
        self._rendered: dict[str, tuple[str, str]] = {}  # the state shown and its HTML, for each part

    def update(self) -> None:
        for run in self.runs:
            run.update()

    @property
    def styles(self) -> dict[str, str]:
        return label_styles({run.label: [run.data] for run in self.runs}, ())

    @property
    def title(self) -> str:
        """The progress of the runs, for a browser's tab."""
        done = (run.life.now and f"{_percent(run.life.now['share_done']):.0f}%" for run in self.runs)
        return " · ".join(f"{percent or '–'} {run.label}" for percent, run in zip(done, self.runs, strict=True))

    def part(self, name: str) -> tuple[str, str]:
        """The version of a part and its HTML."""
        if name == "now":
            html = self._fragment("now", cards=[card(run, self.styles[run.label]) for run in self.runs])
            return _hash(html), html
        version = _hash(repr([(run.changed, run.samples_version if name == "samples" else "") for run in self.runs]))
        if self._rendered.get(name, ("", ""))[0] != version:
            self._rendered[name] = version, self._curves() if name == "curves" else self._samples()
        return self._rendered[name]

    def _curves(self) -> str:
        trained = {run.label: [run.data] for run in self.runs if run.data.metrics}
        return self._fragment("curves", sections=curve_sections(trained, self.styles))

    def _samples(self) -> str:
        return self._fragment("samples", runs=self.runs, styles=self.styles)

    def _fragment(self, name: str, **values: Any) -> str:
        module: Any = self._environment.get_template("watch_parts.html").module
        return str(getattr(module, name)(**values))

    def page(self) -> str:
        parts = {name: (version, Markup(html)) for name in PARTS for version, html in [self.part(name)]}
        return render(
            "watch.html",
            TEMPLATES,
            further=("watch.css", "watch.js"),
            title=self.title,
            parts=parts,
        ).lstrip()


def card(run: FollowedRun, style: str) -> Card:
    life = run.life
    last = run.data.metrics[-1] if run.data.metrics else {}
    state, tone = _STATES.get(life.state, (life.state, "done"))
    found = Card(run.label, style, state, tone, warnings=warnings_of(run), facts=_facts(run.data.metrics))
    found.shares = _shares(run.data.metrics[-RECENT:])
    found.place = f"step {last['step']:,}" if last else "before the first step"
    if life.now is not None:
        _add_progress(found, life, life.now)
    return found


def _add_progress(found: Card, life: Life, now: Mapping[str, Any]) -> None:
    found.message = str(now.get("message", ""))
    ended = time.strftime("%d %b %H:%M", time.localtime(float(now["written"])))
    found.percent = _percent(now.get("share_done", 0.0))
    if now.get("step") is not None:
        limit = now.get("limit")  # 0.3.0 did not write it
        found.place = f"step {now['step']:,} of {'at most ' if limit else ''}{now['steps']:,} done"
        found.place += f", {found.percent:g}% of {limit}" if limit else ""
    if life.state != "running":
        found.left = f"{'last seen' if life.state == 'gone' else 'since'} {ended}"
        if life.state == "gone":
            found.phase = f"it was in: {now['phase']}"
        return
    if now.get("seconds_left") is not None:
        left = max(0.0, now["seconds_left"] - life.since)
        end = time.strftime("%H:%M" if left < 43200 else "%d %b %H:%M", time.localtime(time.time() + left))
        found.left = f"{duration(left)} left, until about {end}"
    elif found.percent < 100:
        found.left = "time left known after the first step"
    found.phase = now["phase"]
    facts = [f"for {duration(now['phase_seconds'] + life.since)}"]
    if now.get("total"):
        ranks = f", rank 0 of {now['ranks']}" if now.get("ranks", 1) > 1 else ""
        facts.insert(0, f"{now['done']:,} of {now['total']:,} {now['unit']}{ranks}")
        found.phase_done = min(1.0, now["done"] / now["total"])
    if now.get("tokens_per_second"):
        facts.append(f"{now['tokens_per_second']:,.0f} tokens/s")
    found.phase_facts = " · ".join(facts)


def _percent(share: float) -> float:
    """The share in percent, rounded down: 100 is the end."""
    return int(1000 * share + 1e-6) / 10


def _facts(metrics: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """Means of the last steps, with the change from as many before them; a step's time is the median."""
    recent = metrics[-RECENT:]
    before = metrics[-2 * RECENT : -RECENT]
    found = []
    for name, title, unit in (
        ("reward/internal", "reward", ""),
        ("response_length/mean", "response length", " tokens"),
        ("actor/entropy_internal", "entropy", " nats"),
        ("tokens_per_second", "generation", " tokens/s"),
    ):
        values = _values(recent, name)
        earlier = _values(before, name)
        if not values:
            continue
        change = ""
        if len(earlier) == RECENT:
            difference = fmean(values) - fmean(earlier)
            change = f"{'+' if difference >= 0 else '−'}{number(float(f'{abs(difference):.2g}'))}"
        found.append(Fact(title, f"{number(_rounded(fmean(values)))}{unit}", change))
    if seconds := _values(recent, "time/step"):
        found.append(Fact("a step", duration(median(seconds))))
    if validated := _values(metrics, "validation/reward"):
        found.append(Fact("best validation", number(_rounded(max(validated)))))
    return found


def _values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(step[name]) for step in steps if name in step]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _shares(steps: Sequence[Mapping[str, Any]]) -> list[Share]:
    """Where the last steps' time went, without phases below a hundredth."""
    whole = sum(_values(steps, "time/step"))
    shares: list[Share] = []
    start = 0.0
    for phase, label in {**WORK, **OVERHEAD, "evaluate": "evaluation"}.items():
        width = 100 * sum(_values(steps, f"time/{phase}")) / whole if whole else 0.0
        if width >= 1:
            shares.append(Share(label, round(start, 2), round(min(width, 100 - start), 2)))
            start += width
    return shares


def _hash(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
