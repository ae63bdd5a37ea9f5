"""One self-contained HTML file of runs and evaluations: results, curves, samples, configurations."""

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlplus.common.durable import write_text
from rlplus.tools.report import charts, tables
from rlplus.tools.report.charts import ACCENT
from rlplus.tools.report.foreign_demonstrations import familiarity_notes
from rlplus.tools.report.run_reader import RunData, load_run
from rlplus.tools.report.samples_text import show_samples
from rlplus.tools.report.shaded_samples import Moment, moments
from rlplus.tools.report.tables import seeds_line
from rlplus.train.evaluation.results import Evaluation

__all__ = ["RunData", "load_run", "render", "seeds_line", "show_samples", "write_report"]

Runs = Mapping[str, RunData | Sequence[RunData]]  # keys: labels; a sequence holds one run per seed
Evaluations = Mapping[str, Mapping[str, Evaluation | Sequence[Evaluation]]]  # keys: benchmarks, then labels


def write_report(
    path: Path,
    runs: Runs,
    evaluations: Evaluations,
    title: str = "Report",
    notes: Sequence[str] = (),
    kinds: Mapping[str, Collection[int]] | None = None,
    samples: Mapping[str, Path] = MappingProxyType({}),
    warnings: Sequence[str] = (),
) -> None:
    """Write the report. The same label means the same colour; one of a run of RL-PLUS has the accent.

    evaluations: by benchmark, which may be "" where there is one. With several seeds under a label, curves show each of
    them, evaluations are pooled, and samples are the first one's.
    kinds: parts of the problems, by name, whose pass@k is drawn by itself, too.
    samples: folders of the samples of what was evaluated but not trained, by label. A run knows its own.
    warnings: further ones, besides those about runs, models and samples.
    """
    if not runs and not evaluations:
        raise ValueError("want at least one run or evaluation to report on, got none")
    trained = {label: [run] if isinstance(run, RunData) else list(run) for label, run in runs.items()}
    tested = {
        benchmark: {label: [one] if isinstance(one, Evaluation) else list(one) for label, one in each.items()}
        for benchmark, each in evaluations.items()
    }
    styles = label_styles(trained, dict.fromkeys(label for each in tested.values() for label in each))
    accent = next((label for label, style in styles.items() if style == ACCENT), "")
    warnings = [*warnings, *_warnings(trained, tested)]
    folders = {label: each[0].samples for label, each in trained.items()} | dict(samples)
    shown = {label: _moments(label, folder, warnings) for label, folder in folders.items() if folder is not None}
    page = render(
        "page.html",
        title=title,
        notes=[*notes, *familiarity_notes(trained)],
        headline=tables.headline(trained, tested, accent),
        warnings=warnings,
        styles=styles,
        pass_charts=_pass_charts(tested, styles, kinds or {}),
        result_tables=tables.result_tables(tested),
        result_note=tables.EVALUATION_NOTE,
        curves=charts.curve_sections(trained, styles),
        seeds=any(len(each) > 1 for each in trained.values()),
        samples={label: found for label, found in shown.items() if found},
        run_tables=[table for table in (tables.run_table(trained), tables.phase_table(trained)) if table and trained],
        provenance=tables.provenance_table(trained),
        differences=tables.configuration_table(trained),
        configurations=[(name, run.config) for name, run in tables.named(trained)],
    )
    write_text(path, page.lstrip())


def label_styles(trained: Mapping[str, Sequence[RunData]], tested: Iterable[str]) -> dict[str, str]:
    """The style of each label, in the order of the tables: the accent for the first run of RL-PLUS, else for the first
    run; greys and further colours for others; `plain` for what was not trained here, where anything was."""
    presets = {label: str(runs[0].settings.get("algorithm.preset", "")) for label, runs in trained.items()}
    first = next((label for label, name in presets.items() if name.startswith("rlplus")), next(iter(trained), None))
    others = cycle(f"other{i}" for i in range(1, 6))
    styles = {}
    for label in dict.fromkeys((*tested, *trained)):
        if label == first:
            styles[label] = ACCENT
        else:
            styles[label] = "plain" if trained and label not in trained else next(others)
    return styles


def _warnings(trained: tables.Trained, tested: Mapping[str, tables.Tested]) -> list[str]:
    found = [
        f"{label}: {warning}"
        for label, runs in trained.items()
        for warning in sorted({warning for run in runs for warning in run.warnings})
    ]
    return found + tables.model_warnings(tested)


def _moments(label: str, folder: Path, warnings: list[str]) -> list[Moment]:
    """The folder's moments; its damaged files are added to the warnings."""
    damaged: list[str] = []
    found = moments(folder, damaged)
    warnings += [f"{label}: {warning}" for warning in damaged]
    return found


def _pass_charts(
    benchmarks: Mapping[str, tables.Tested], styles: Mapping[str, str], kinds: Mapping[str, Collection[int]]
) -> list[charts.Chart]:
    """One of each benchmark, and one of each kind of its problems."""
    found = []
    for benchmark, tested in benchmarks.items():
        found.append(charts.pass_chart(tested, styles, benchmark or "All problems"))
        for name, problems in kinds.items():
            parts = {label: [one.among(problems) for one in each] for label, each in tested.items()}
            found.append(charts.pass_chart(parts, styles, name))
    return found


def _source(name: str, package: str = __name__) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _sources(end: str, package: str, further: Sequence[str]) -> str:
    """The source with this ending that all pages have, and those among `further`."""
    return "".join([_source(f"page{end}"), *(_source(name, package) for name in further if name.endswith(end))])


def render(template: str, package: str = __name__, *, further: Sequence[str] = (), **values: Any) -> str:
    """A page by a template of this or another package, with the style and the script of all pages.

    further: files of that package that are added to these, by their endings .css and .js.
    """
    script = _sources(".js", package, further)
    style = _sources(".css", package, further)
    return (
        environment(package)
        .get_template(template)
        .render(
            script=Markup(script),
            script_hash=b64encode(sha256(script.encode()).digest()).decode(),
            style=Markup(style),
            **values,
        )
    )


def environment(package: str) -> Environment:
    """The templates of a package and the macros of all pages."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(name, "") for name in dict.fromkeys((package, __name__))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
