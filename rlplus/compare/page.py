"""The tables and figures of a comparison, for the terminal and as one self-contained HTML file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from rich.table import Table as TerminalTable

from rlplus.compare.config import BASE, Comparison, Study
from rlplus.compare.results import CURVES, Outcome, Results
from rlplus.evaluation import Estimate, Evaluation, join, paired_difference, pooled_pass_at
from rlplus.report import ACCENT, render
from rlplus.report.charts import Chart, Curve, Series, pass_chart, step_chart
from rlplus.report.tables import Cell, Table, interval, percent
from rlplus.textfiles import write_text

MOST_LINES = 6  # of a chart
TITLES = {
    "reward/internal": Curve("reward/internal", "Training reward", "mean of own responses"),
    "actor/entropy_internal": Curve("actor/entropy_internal", "Entropy", "nats, own responses"),
    "response_length/mean": Curve("response_length/mean", "Response length", "tokens"),
    "actor/prob_external": Curve("actor/prob_external", "Probability", "mean p of demonstrated tokens"),
}
NOTE = (
    "pass@k: the share of problems of which at least one of k samples is right, with 95% bootstrap intervals over "
    "seeds and problems. Differences are on the same problems of the same seeds; bold where 0 is outside the interval. "
    "Methods are shown once they have finished on all seeds."
)

Tested = dict[str, dict[str, list[Evaluation]]]  # by method, then by test set; one evaluation per seed


@dataclass(frozen=True)
class Bar:
    """A row of an interval plot: a mean and its limits, in shares."""

    label: str
    style: str
    estimate: Estimate


@dataclass(frozen=True)
class Part:
    """A setting of a study, drawn and tabled."""

    title: str
    bars: list[Bar]
    charts: list[Chart]
    tables: list[Table]


def write_page(path: Path, results: Results, comparison: Comparison, title: str) -> None:
    """Write the page with every study's tables and figures."""
    studies = [
        (
            name,
            _summary(results, study),
            [part for setting in study.settings if (part := _part(results, study, setting))],
        )
        for name, study in comparison.studies.items()
    ]
    page = render(
        "compare.html",
        __package__ or "",
        title=title,
        headline=headline(results, comparison),
        note=NOTE,
        studies=studies,
        search=_search_tables(results),
        runs=_run_tables(results, comparison),
        provenance=results.provenance,
    )
    write_text(path, page.lstrip())


def headline(results: Results, comparison: Comparison) -> str:
    """The result of the first study in a sentence per setting."""
    study = next(iter(comparison.studies.values()))
    sentences = []
    for setting in study.settings:
        tested = _tested(results, study, setting)
        if not tested:
            continue
        means = {method: _estimate(each, 1).mean for method, each in tested.items()}
        ranked = sorted(means, key=lambda method: -means[method])
        first = study.compared_with if study.compared_with in means else ranked[0]
        others = [method for method in ranked if method not in (first, BASE)][:2]
        shown = [f"{first} {percent(means[first])}%", *(f"{method} {percent(means[method])}%" for method in others)]
        base = [f"the base {percent(means[BASE])}%"] if BASE in means else []
        sentences.append(f"{setting + ': ' if setting else ''}{', '.join([*shown, *base])}")
    if not sentences:
        return "No method has finished yet."
    return f"Problems solved with one sample. {'; '.join(sentences)}."


def terminal_tables(results: Results, comparison: Comparison) -> Iterator[TerminalTable]:
    """Every study's tables for the terminal."""
    for name, study in comparison.studies.items():
        for table in _summary(results, study):
            yield _for_terminal(table, name)
        for setting in study.settings:
            for table in setting_tables(results, study, setting):
                yield _for_terminal(table, " · ".join(filter(None, (name, setting, table.title))))


def _for_terminal(table: Table, title: str) -> TerminalTable:
    shown = TerminalTable(*table.header, title=title)
    for row in table.rows:
        shown.add_row(*(f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in row))
    return shown


def _tested(results: Results, study: Study, setting: str) -> Tested:
    """The evaluations of the methods that are finished on every seed of the study, the base first."""
    found: Tested = {}
    for method in dict.fromkeys((BASE, *study.methods)):
        outcomes = results.of(setting, method, study.seeds)
        if len(outcomes) == study.seeds:
            seeds = [outcomes[seed] for seed in range(study.seeds)]
            found[method] = {name: [one.results[name] for one in seeds] for name in _sets(seeds[0])}
    return found


def _sets(outcome: Outcome) -> list[str]:
    """The test sets, in the order of their problems."""
    return sorted(outcome.results, key=lambda name: outcome.results[name].problems[0])


def _estimate(sets: Mapping[str, Sequence[Evaluation]], k: int) -> Estimate:
    """Mean pass@k over all test sets' problems together."""
    return pooled_pass_at(_joined(sets), k)


def _joined(sets: Mapping[str, Sequence[Evaluation]]) -> list[Evaluation]:
    """All test sets' problems as one evaluation per seed."""
    return [join(list(seed), seed=seed[0].seed) for seed in zip(*sets.values(), strict=True)]


def setting_tables(results: Results, study: Study, setting: str) -> list[Table]:
    """pass@k of each finished method on each test set, and the differences from the reference."""
    tested = _tested(results, study, setting)
    if not tested:
        return []
    first = next(iter(tested.values()))
    ks = sorted({k for each in first.values() for one in each for k in one.k})
    columns = [(name, k) for name in first for k in (ks if name == next(iter(first)) else ks[:1])]
    header = [f"{name}, pass@{k}" if name else f"pass@{k}" for name, k in columns]
    solved = Table(["method", *header], title="Problems solved, %")
    for method, sets in tested.items():
        solved.add(method, *(interval(pooled_pass_at(sets[name], k)) for name, k in columns))
    reference = study.compared_with
    if reference not in tested or len(tested) == 1:
        return [solved]
    apart = Table(["method", *header], title=f"Difference from {reference}, points")
    for method, sets in tested.items():
        if method != reference:
            apart.add(method, *(_difference(tested[reference][name], sets[name], k) for name, k in columns))
    return [solved, apart]


def _difference(first: Sequence[Evaluation], second: Sequence[Evaluation], k: int) -> Cell:
    estimate = paired_difference(first, second, k)
    return interval(estimate, "+", strong=estimate.low > 0 or estimate.high < 0)


def _summary(results: Results, study: Study) -> list[Table]:
    """All settings side by side, where there are several: pass@1 over all test sets."""
    if len(study.settings) < 2:
        return []
    each = {setting: _tested(results, study, setting) for setting in study.settings}
    table = Table(["method", *study.settings], title="All settings: problems solved with one sample, %")
    for method in dict.fromkeys((BASE, *study.methods)):
        if any(method in tested for tested in each.values()):
            cells = (interval(_estimate(tested[method], 1)) if method in tested else "" for tested in each.values())
            table.add(method, *cells)
    return [table]


def _part(results: Results, study: Study, setting: str) -> Part | None:
    tested = _tested(results, study, setting)
    if not tested:
        return None
    styles = _styles(tested, study)
    bars = [Bar(method, styles[method], _estimate(sets, 1)) for method, sets in tested.items()]
    lines = _chosen(tested, study)
    charts = [
        pass_chart({method: tested[method][name] for method in lines}, styles, name or "All problems")
        for name in next(iter(tested.values()))
    ]
    return Part(
        setting,
        bars,
        [*charts, *_dynamics(results, study, setting, lines, styles)],
        setting_tables(results, study, setting),
    )


def _chosen(tested: Tested, study: Study) -> list[str]:
    """The methods that are drawn as lines: the base, the reference, and the best of the others."""
    means = {method: _estimate(sets, 1).mean for method, sets in tested.items()}
    fixed = [method for method in (BASE, study.compared_with) if method in tested]
    others = sorted((method for method in tested if method not in fixed), key=lambda method: -means[method])
    chosen = {*fixed, *others[: MOST_LINES - len(fixed)]}
    return [method for method in tested if method in chosen]


def _styles(tested: Tested, study: Study) -> dict[str, str]:
    others = cycle(f"other{i}" for i in range(1, 6))
    styles = {BASE: "plain", study.compared_with: ACCENT}
    drawn = [method for method in _chosen(tested, study) if method not in styles]
    styles |= {method: next(others) for method in drawn}
    return {method: styles.get(method, "plain") for method in tested}


def _dynamics(
    results: Results, study: Study, setting: str, methods: Sequence[str], styles: Mapping[str, str]
) -> list[Chart]:
    """A chart of each metric over the steps, a line per seed."""
    charts = []
    outcomes = {method: results.of(setting, method, study.seeds).values() for method in methods if method != BASE}
    last = max((one.steps for each in outcomes.values() for one in each), default=0)
    for metric in CURVES:
        logged = [(method, one) for method, each in outcomes.items() for one in each if metric in one.curves]
        series = [Series(method, *one.curves[metric]) for method, one in logged]
        if series:
            charts.append(step_chart(series, styles, TITLES[metric], list(outcomes), last))
    return charts


def _search_tables(results: Results) -> list[Table]:
    """Mean pass@1 on the validation problems, by method and learning rate, of each setting; the chosen rate bold."""
    tables = []
    for setting, methods in results.rates.items():
        rates = sorted({rate for each in methods.values() for rate in each}, key=float)
        table = Table(["method", *rates], title=setting)
        for method, each in methods.items():
            best = max(each.values())
            chosen = next(rate for rate, value in each.items() if value == best)
            table.add(method, *(Cell(percent(each[rate]), strong=rate == chosen) for rate in rates))
        tables.append(table)
    return tables


def _run_tables(results: Results, comparison: Comparison) -> list[Table]:
    """Means over seeds of what the runs took."""
    tables = []
    for setting in comparison.settings:
        table = Table(["method", "runs", "learning rate", "steps", "generated tokens", "minutes"], title=setting)
        for method in dict.fromkeys(one.method for one in results.outcomes if one.setting == setting):
            runs = list(results.of(setting, method, 1000).values())
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
