"""The tables and figures of a comparison, for the terminal and as one self-contained HTML file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean

from rich.table import Table as TerminalTable
from rich.text import Text

from rlplus.tools.compare.config import BASE, Study, best_rate
from rlplus.tools.compare.outcomes import CURVES, Results
from rlplus.tools.report import render
from rlplus.tools.report.charts import ACCENT, Chart, Series, pass_chart, step_chart
from rlplus.tools.report.tables import Cell, Table, interval, percent
from rlplus.train.evaluation.clusters import misleading, note_of, unseen
from rlplus.train.evaluation.estimates import Estimate
from rlplus.train.evaluation.results import Evaluation, join, paired_difference, pooled_pass_at

MOST_LINES = 6  # drawn per chart
NOTE = (
    "pass@k: the share of problems of which at least one of k samples is right, with 95% intervals over seeds "
    "and problems. Differences are on the same problems of the same seeds; bold where 0 is outside the interval, "
    "unless few seeds fall into two groups. In the plot of intervals a stroke is a seed. "
    "Methods are shown once they have finished on all seeds."
)


@dataclass(frozen=True)
class Tested:
    """The evaluations of a setting, by method, then by test set; one per seed.

    same_problems: the seeds have the same ones, as where data are not made for each seed.
    """

    methods: dict[str, dict[str, list[Evaluation]]]
    same_problems: bool

    @property
    def sets(self) -> list[str]:
        """The test sets, in the order of their problems."""
        return list(next(iter(self.methods.values()), {}))

    def estimate(self, method: str, k: int, name: str | None = None) -> Estimate:
        """Mean pass@k on a test set, or on the problems of all of them."""
        return pooled_pass_at(self.of(method, name), k, same_problems=self.same_problems)

    def difference(self, first: str, second: str, k: int, name: str | None = None) -> Estimate:
        """pass@k of `second` minus pass@k of `first` on a test set, or on the problems of all of them."""
        return paired_difference(self.of(first, name), self.of(second, name), k, same_problems=self.same_problems)

    def of(self, method: str, name: str | None = None) -> list[Evaluation]:
        """A method's evaluation of each seed, on a test set or on the problems of all of them."""
        sets = self.methods[method]
        if name is not None:
            return sets[name]
        return [join(list(seed), seed=seed[0].seed) for seed in zip(*sets.values(), strict=True)]

    def seeds(self, method: str, k: int, name: str | None = None) -> list[float]:
        """Each seed's mean pass@k on a test set, or on the problems of all of them."""
        return [one.values(k).mean().item() for one in self.of(method, name)]

    def in_groups(self, k: int, name: str | None = None) -> list[str]:
        """The methods whose seeds are few and have two outcomes there."""
        return [method for method in self.methods if misleading(self.seeds(method, k, name))]

    def mean(self, method: str) -> float:
        """Mean pass@1 over the problems of all test sets."""
        return fmean(one.values(1).mean().item() for one in self.of(method))


@dataclass(frozen=True)
class Bar:
    """A row of an interval plot: a mean, its limits and the seeds' means, in shares."""

    label: str
    style: str
    estimate: Estimate
    seeds: list[float]


@dataclass(frozen=True)
class Part:
    """A setting of a study, drawn and tabled."""

    title: str
    bars: list[Bar]
    charts: list[Chart]
    tables: list[Table]


def page_of(results: Results, title: str) -> str:
    """The page with every study's tables and figures, HTML."""
    studies = [
        (
            name,
            _summary(results, study),
            [part for setting in study.settings if (part := _part(results, study, setting))],
        )
        for name, study in results.comparison.studies.items()
    ]
    page = render(
        "compare.html",
        __package__ or "",
        title=title,
        headline=headline(results),
        note=NOTE,
        studies=studies,
        search=_search_tables(results),
        runs=_run_tables(results),
        provenance=results.provenance,
    )
    return page.lstrip()


def headline(results: Results) -> str:
    """The result of the first study in a sentence per setting."""
    study = next(iter(results.comparison.studies.values()))
    sentences = []
    for setting in study.settings:
        tested = tested_in(results, study, setting)
        means = {method: tested.mean(method) for method in tested.methods if method != BASE}
        ranked = sorted(means, key=lambda method: (method != study.compared_with, -means[method]))
        shown = [f"{method} {percent(means[method])}%" for method in ranked[:3]]
        if shown:
            base = [f"the base model {percent(tested.mean(BASE))}%"] if BASE in tested.methods else []
            sentences.append(f"{setting + ': ' if setting else ''}{', '.join([*shown, *base])}")
    if not sentences:
        return "No method has finished yet."
    return f"Problems solved with one sample. {'; '.join(sentences)}."


def terminal_tables(results: Results) -> Iterator[TerminalTable]:
    """Every study's tables for the terminal."""
    for name, study in results.comparison.studies.items():
        for table in _summary(results, study):
            yield _for_terminal(table, f"{name} · {table.title}")
        for setting in study.settings:
            for table in setting_tables(results, study, setting):
                yield _for_terminal(table, " · ".join(filter(None, (name, setting, table.title))))


def _for_terminal(table: Table, title: str) -> TerminalTable:
    shown = TerminalTable(*table.header, title=title, caption=table.note or None)
    for row in table.rows:
        texts = (f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in row)
        shown.add_row(*(Text(text, "bold") if cell.strong else text for text, cell in zip(texts, row, strict=True)))
    return shown


def tested_in(results: Results, study: Study, setting: str) -> Tested:
    """The evaluations of the methods that are finished on every seed of the study, the base first."""
    found = {}
    for method in dict.fromkeys((BASE, *study.methods)):
        outcomes = results.of(setting, method, study.seed_numbers)
        if len(outcomes) == study.seeds:
            seeds = [outcomes[seed].results for seed in study.seed_numbers]
            names = sorted(seeds[0], key=lambda name: seeds[0][name].problems[0])
            found[method] = {name: [each[name] for each in seeds] for name in names}
    return Tested(found, same_problems=results.comparison.settings[setting].prepare is None)


def setting_tables(results: Results, study: Study, setting: str) -> list[Table]:
    """pass@k of each finished method on each test set and on all together, and the differences from the reference."""
    tested = tested_in(results, study, setting)
    if not tested.methods:
        return []
    first = tested.of(next(iter(tested.methods)), tested.sets[0])
    ks = sorted({k for one in first for k in one.k})
    columns: list[tuple[str | None, int]]
    columns = [(name, k) for name in tested.sets for k in (ks if name == tested.sets[0] else ks[:1])]
    if len(tested.sets) > 1:
        columns.append((None, ks[0]))
    header = [f"{'all' if name is None else name}, pass@{k}".removeprefix(", ") for name, k in columns]
    solved = Table(["method", *header], title="Problems solved, %")
    for method in tested.methods:
        solved.add(method, *(interval(tested.estimate(method, k, name)) for name, k in columns))
    tables = [solved, *_seed_table(tested, ks[0])]
    reference = study.compared_with
    others = [method for method in tested.methods if method != reference]
    if reference not in tested.methods or not others:
        return tables
    apart = {column: tested.in_groups(column[1], column[0]) for column in columns}
    differences = Table(["method", *header], title=f"Difference from {reference}, points")
    for method in others:
        estimates = {(name, k): tested.difference(reference, method, k, name) for name, k in columns}
        strong = {column: (e.low > 0 or e.high < 0) and not apart[column] for column, e in estimates.items()}
        differences.add(method, *(interval(e, "+", strong=strong[column]) for column, e in estimates.items()))
    if names := [method for method in tested.methods if any(method in each for each in apart.values())]:
        differences.note = note_of(names, study.seeds)
    return [*tables, differences]


def _seed_table(tested: Tested, k: int) -> Iterator[Table]:
    """pass@k of each seed over the problems of all test sets, where there are several."""
    seeds = [one.seed for one in tested.of(list(tested.methods)[-1])]  # the base model may have one evaluation for all
    if len(seeds) > 1:
        table = Table(["method", *(f"seed {seed}" for seed in seeds)], title=f"Seed by seed, pass@{k}, %")
        table.note = unseen(len(seeds))
        for method in tested.methods:
            table.add(method, *map(percent, tested.seeds(method, k)))
        yield table


def _summary(results: Results, study: Study) -> list[Table]:
    """All settings side by side, where there are several: pass@1 over all test sets."""
    if len(study.settings) < 2:
        return []
    each = {setting: tested_in(results, study, setting) for setting in study.settings}
    table = Table(["method", *study.settings], title="All settings: problems solved with one sample, %")
    for method in dict.fromkeys((BASE, *study.methods)):
        if any(method in tested.methods for tested in each.values()):
            done = (tested.estimate(method, 1) if method in tested.methods else None for tested in each.values())
            table.add(method, *("" if estimate is None else interval(estimate) for estimate in done))
    return [table]


def _part(results: Results, study: Study, setting: str) -> Part | None:
    tested = tested_in(results, study, setting)
    if not tested.methods:
        return None
    lines = _chosen(tested, study)
    styles = _styles(tested, study, lines)
    bars = [
        Bar(method, styles[method], tested.estimate(method, 1), tested.seeds(method, 1)) for method in tested.methods
    ]
    bars.sort(key=lambda bar: -bar.estimate.mean)
    charts = [
        pass_chart(
            {method: tested.of(method, name) for method in lines},
            styles,
            name or "All problems",
            same_problems=tested.same_problems,
        )
        for name in tested.sets
    ]
    charts += _dynamics(results, study, setting, lines, styles)
    return Part(setting, bars, charts, setting_tables(results, study, setting))


def _chosen(tested: Tested, study: Study) -> list[str]:
    """The methods that are drawn as lines: the base, the reference, and the best of the others."""
    fixed = [method for method in (BASE, study.compared_with) if method in tested.methods]
    others = sorted((method for method in tested.methods if method not in fixed), key=lambda m: -tested.mean(m))
    chosen = {*fixed, *others[: MOST_LINES - len(fixed)]}
    return [method for method in tested.methods if method in chosen]


def _styles(tested: Tested, study: Study, lines: Sequence[str]) -> dict[str, str]:
    """The style of each method; `plain` for those that are no lines."""
    others = cycle(f"other{i}" for i in range(1, 6))
    fixed = {BASE: "plain", study.compared_with: ACCENT}
    drawn = {method: fixed.get(method) or next(others) for method in lines}
    return {method: drawn.get(method, "plain") for method in tested.methods}


def _dynamics(
    results: Results, study: Study, setting: str, methods: Sequence[str], styles: Mapping[str, str]
) -> list[Chart]:
    """A chart of each metric over the steps, a line per seed."""
    charts = []
    outcomes = {
        method: results.of(setting, method, study.seed_numbers).values() for method in methods if method != BASE
    }
    last = max((one.steps for each in outcomes.values() for one in each), default=0)
    for curve in CURVES:
        logged = [(method, one) for method, each in outcomes.items() for one in each if curve.metric in one.curves]
        series = [Series(method, *one.curves[curve.metric]) for method, one in logged]
        if series:
            charts.append(step_chart(series, styles, curve, list(outcomes), last))
    return charts


def _search_tables(results: Results) -> list[Table]:
    """Mean pass@1 on the validation problems, by method and learning rate, of each setting; the chosen rate bold."""
    tables = []
    for setting, methods in results.rates.items():
        rates = sorted({rate for each in methods.values() for rate in each}, key=float)
        table = Table(["method", *rates, "steps", "generated tokens"], title=setting)
        at_an_end = []
        for method, each in methods.items():
            tried = {float(rate): score for rate, score in each.items()}
            chosen = best_rate(tried)
            if chosen in (min(tried), max(tried)):
                at_an_end.append(method)
            scores = ((float(rate), each.get(rate)) for rate in rates)
            cells = ("" if score is None else Cell(percent(score), strong=rate == chosen) for rate, score in scores)
            table.add(method, *cells, *map(_span, zip(*results.search_runs[setting][method].values(), strict=True)))
        if at_an_end:
            table.note = f"At an end of the range, beyond which another may be better: {', '.join(at_an_end)}."
        tables.append(table)
    return tables


def _span(counts: Sequence[int]) -> str:
    """The least and the greatest."""
    low = min(counts)
    high = max(counts)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _run_tables(results: Results) -> list[Table]:
    """Means over seeds of what the runs took."""
    tables = []
    for setting in results.comparison.settings:
        table = Table(["method", "runs", "learning rate", "steps", "generated tokens", "minutes"], title=setting)
        for method in dict.fromkeys(one.method for one in results.outcomes if one.setting == setting):
            runs = list(results.of(setting, method).values())
            table.add(
                method,
                str(len(runs)),
                ", ".join(sorted({f"{one.rate:g}" for one in runs if one.rate})),
                f"{sum(one.steps for one in runs) / len(runs):,.0f}",
                f"{sum(one.generated_tokens for one in runs) / len(runs):,.0f}",
                f"{sum(one.seconds for one in runs) / len(runs) / 60:.1f}",
            )
        if table.rows:
            tables.append(table)
    return tables
