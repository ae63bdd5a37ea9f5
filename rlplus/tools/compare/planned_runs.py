"""Runs, memory and time of a comparison, before the first of its runs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from rlplus.tools.compare.config import BASE, Comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.plan import Cluster, Plan, make_plan, show_bytes
from rlplus.tools.plan.speed import ASSUMPTIONS
from rlplus.train.config import with_first_model


@dataclass(frozen=True)
class PlannedRuns:
    """The runs of a method in a setting. tries: of the search, each of `tried_steps`, without further rates.

    Steps are None where epochs or the data decide them, and hours where they or the speed of the GPU are unknown.
    """

    setting: str
    method: str
    runs: int
    tries: int
    tried_steps: int | None
    plan: Plan

    @property
    def hours(self) -> float | None:
        """All runs one after the other, without evaluations."""
        steps = self.plan.steps
        tried = self.tried_steps if self.tries else 0
        if not self.plan.seconds or steps is None or tried is None:
            return None
        return (self.runs * steps + self.tries * tried) * self.plan.seconds["total"] / 3600

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "method": self.method,
            "runs": self.runs,
            "tries": self.tries,
            "tried_steps": self.tried_steps,
            "steps": self.plan.steps,
            "hours": self.hours,
            "plan": self.plan.to_json(),
        }


def plan_comparison(comparison: Comparison, runner: Runner, cluster: Cluster) -> list[PlannedRuns]:
    """The runs of each method and setting on `cluster`, which trains one at a time.

    Errors as in `Runner.check` and `make_plan`; ValueError also for a setting whose model is made by a function.
    """
    runner.check()
    for name, each in comparison.settings.items():
        if each.prepare is not None:
            raise ValueError(f"settings.{name}: {each.prepare} makes its model, which is not known before: no plan")
    reported = Counter((run.setting, run.method) for run in runner.all() if run.method != BASE)
    tried = runner.searches()
    found = []
    for setting, method in dict.fromkeys((*tried, *reported)):
        chain = runner.chain(setting, 0, method)
        configs = [runner.config_of(run) for run in (chain[0], chain[-1])]
        tries = tried.get((setting, method), [])
        steps = runner.config_of(tries[0]).train.steps if tries else None
        plan = make_plan(with_first_model(configs)[-1], cluster)  # its own model is yet to be trained
        found.append(PlannedRuns(setting, method, reported[setting, method], len(tries), steps, plan))
    return found


def lines(planned: list[PlannedRuns]) -> Iterator[RenderableType]:
    """A table of all methods, what does not fit, and what is not in the hours."""
    several = len({each.setting for each in planned}) > 1
    first = planned[0].plan
    yield first.cluster.name
    yield from dict.fromkeys(each.plan.note for each in planned if each.plan.note)
    columns = ["method", "runs", "tries", "steps of a run", "memory of a GPU", "seconds a step", "hours"]
    table = Table(*(["setting"] if several else []), *columns)
    for column in table.columns[-6:]:
        column.justify = "right"
    for each in planned:
        seconds = each.plan.seconds.get("total")
        cells = [
            each.method,
            str(each.runs),
            str(each.tries),
            "?" if each.plan.steps is None else f"{each.plan.steps:,}",
            show_bytes(each.plan.memory.peak) + ("" if each.plan.fits else ", too much"),
            "?" if seconds is None else f"{seconds:.1f}",
            "?" if each.hours is None else f"{each.hours:.1f}",
        ]
        table.add_row(*([each.setting] if several else []), *cells)
    yield table
    hours = [each.hours for each in planned]
    known = sum(each for each in hours if each is not None)
    more = "" if None not in hours else ", and what is unknown"
    yield f"Together {sum(e.runs + e.tries for e in planned)} runs, {known:.0f} hours{more}: one run at a time."
    yield "Not in it: evaluations, validations, further rates of a search, and ends before train.steps."
    yield f"Assumed: {', '.join(ASSUMPTIONS)}."
    for each in planned:
        where = f" in {each.setting}" if several else ""
        yield from (f"{each.method}{where} does not fit: {problem}" for problem in each.plan.memory.problems)
