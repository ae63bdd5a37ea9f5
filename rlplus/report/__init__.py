"""One self-contained HTML file of runs and evaluations: curves, tables, configurations."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rlplus.evaluation import Evaluation
from rlplus.report.charts import CURVES, curve_chart, label_colours, legend, pass_chart
from rlplus.report.runs import RunData, load_run
from rlplus.report.tables import difference_table, evaluation_table, phase_table, run_table, seed_table, seeds_line
from rlplus.textfiles import write_text

__all__ = ["RunData", "load_run", "seeds_line", "write_report"]

Runs = Mapping[str, RunData | Sequence[RunData]]  # by label; a sequence holds one run per seed
Evaluations = Mapping[str, Evaluation | Sequence[Evaluation]]

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; color: #222; background: #fff;
  max-width: 1080px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p, li { max-width: 46rem; } .small, figcaption span { color: #666; font-size: .87rem; }
.warning { border-left: 4px solid #e69f00; padding: .2rem .8rem; background: #fff8e6; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: .2rem 0 .9rem; }
.legend i { display: inline-block; width: 1.5rem; height: .28rem; border-radius: 2px; margin-right: .45rem;
  vertical-align: middle; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 1.6rem 1.8rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figcaption span { font-weight: 400; margin-left: .5rem; }
figure svg { width: 100%; height: auto; }
svg text { font-family: system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; border-bottom: 1px solid #eee; }
th { font-weight: 600; border-bottom-color: #bbb; } th:first-child, td:first-child { text-align: left; }
td small { color: #777; margin-left: .35rem; }
details { margin: .4rem 0; } summary { cursor: pointer; }
pre { background: #f6f6f6; padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.4; }
"""


def write_report(
    path: Path, runs: Runs, evaluations: Evaluations, title: str = "Report", notes: Sequence[str] = ()
) -> None:
    """Write the report. The same label means the same colour; evaluations without a run of that label are grey.

    With several seeds under a label, curves show each of them and evaluations are pooled.
    """
    if not runs and not evaluations:
        raise ValueError("want at least one run or evaluation to report on, got none")
    trained = {label: [run] if isinstance(run, RunData) else list(run) for label, run in runs.items()}
    tested = {label: [one] if isinstance(one, Evaluation) else list(one) for label, one in evaluations.items()}
    colours = label_colours(trained, tested)
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes)]
    for label, label_runs in trained.items():
        warnings = sorted({warning for run in label_runs for warning in run.warnings})
        parts += [f'<p class="warning">{escape(f"{label}: {warning}")}</p>' for warning in warnings]
    if tested:
        parts += ["<h2>Evaluation</h2>", evaluation_table(tested), difference_table(tested), seed_table(tested)]
    charts = [pass_chart(tested, colours)] if tested else []
    charts += [curve_chart(trained, colours, *curve) for curve in CURVES] if trained else []
    parts += ["<h2>Curves</h2>", legend(colours), f'<div class="charts">{"".join(charts)}</div>']
    if trained:
        parts += ["<h2>Training</h2>", run_table(trained), phase_table(trained)]
        parts += ["<h2>Configurations</h2>", *_configurations(trained)]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_CSS}</style>"
    )
    body = "\n".join(parts)
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    write_text(path, page)


def _configurations(trained: Mapping[str, list[RunData]]) -> list[str]:
    parts = []
    for label, runs in trained.items():
        for seed, run in enumerate(runs, 1):
            name = escape(label if len(runs) == 1 else f"{label}, run {seed} of {len(runs)}")
            parts.append(f"<details><summary>{name}</summary><pre>{escape(run.config)}</pre></details>")
    return parts
