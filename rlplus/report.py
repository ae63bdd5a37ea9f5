"""One HTML file of runs and evaluations: curves, tables, configurations. It loads nothing from anywhere."""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from rlplus.evaluation import Estimate, Evaluation, paired_difference, pooled_pass_at, seeds_below
from rlplus.textfiles import read_text, write_text

# Okabe and Ito's colours, told apart with any colour vision; grey for what was not trained here.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREYS = ("#555555", "#999999", "#bbbbbb")
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
_CURVES = (  # metric, title, label of the y axis
    ("reward/internal", "Reward", "mean reward of own responses"),
    ("actor/entropy_internal", "Entropy", "entropy of own responses (nats)"),
    ("response_length/mean", "Response length", "mean length (tokens)"),
)
_FEW_SEEDS = 5  # see pooled_pass_at
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


_WORK = {
    "generate": "generate",
    "forward_backward": "forward, backward",
    "optimizer": "optimiser",
    "old_logprob": "old logprobs",
}
_OVERHEAD = {"sync": "sync", "score": "score", "pack": "pack"}


@dataclass(frozen=True)
class RunData:
    """What a run left behind: the text of config.yaml, one object of metrics a step, warnings for the readers."""

    config: str
    metrics: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...] = ()

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Generated tokens so far and the metric, at the steps that have it."""
        steps = [step for step in self.metrics if metric in step]
        return [step["generated_tokens"] for step in steps], [step[metric] for step in steps]


Runs = Mapping[str, RunData | Sequence[RunData]]  # by label; a sequence holds one run a seed
Evaluations = Mapping[str, Evaluation | Sequence[Evaluation]]


def load_run(folder: Path) -> RunData:
    """Read config.yaml and metrics.jsonl of a run. A last line without its end (a killed run) is left out and noted.

    ValueError if a file is missing, no step is complete, or a line is not an object with "step" and "generated_tokens".
    """
    texts = []
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"want the folder of a run, with config.yaml and metrics.jsonl; {folder} has no {name}")
        texts.append(read_text(folder / name))
    config, lines = texts
    complete, _, cut = lines.rpartition("\n")
    metrics = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            step = json.loads(line)
            if not {"step", "generated_tokens"} <= step.keys():
                raise ValueError(f"got the keys {sorted(step)}")
        except (ValueError, AttributeError) as error:
            wanted = 'want a JSON object with "step" and "generated_tokens"'
            raise ValueError(f"{folder / 'metrics.jsonl'}, line {number}: {wanted}; {error}") from error
        metrics.append(step)
    if not metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no complete step yet")
    warning = f"The last line of metrics.jsonl was cut off after step {metrics[-1]['step']}: the run was killed there."
    return RunData(config, tuple(metrics), (warning,) if cut else ())


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
    colours = _colours(trained, tested)
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes)]
    for label, label_runs in trained.items():
        warnings = sorted({warning for run in label_runs for warning in run.warnings})
        parts += [f'<p class="warning">{escape(f"{label}: {warning}")}</p>' for warning in warnings]
    if tested:
        parts += ["<h2>Evaluation</h2>", _evaluation_table(tested), _difference_table(tested), _seed_table(tested)]
    charts = [_pass_chart(tested, colours)] if tested else []
    charts += [_curve_chart(trained, colours, *curve) for curve in _CURVES] if trained else []
    parts += ["<h2>Curves</h2>", _legend(colours), f'<div class="charts">{"".join(charts)}</div>']
    if trained:
        parts += ["<h2>Training</h2>", _run_table(trained), _phase_table(trained)]
        parts += ["<h2>Configurations</h2>", *_configurations(trained)]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_CSS}</style>"
    )
    body = "\n".join(parts)
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    write_text(path, page)


def _colours(trained: Mapping[str, object], tested: Mapping[str, object]) -> dict[str, str]:
    colours, greys = cycle(_COLOURS), cycle(_GREYS)
    labels = list(tested) + [label for label in trained if label not in tested]
    return {label: next(greys if trained and label not in trained else colours) for label in labels}


def _legend(colours: Mapping[str, str]) -> str:
    entries = (f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in colours.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def _chart(name: str, title: str, remark: str, draw: Callable[[Axes], None]) -> str:
    style: Any = _STYLE | {"svg.hashsalt": name}
    with rc_context(style):
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", svg)  # ids are shared by all figures of a page
    caption = f"<figcaption>{escape(title)}<span>{escape(remark)}</span></figcaption>"
    return f'<figure role="img" aria-label="{escape(title)}">{caption}{svg}</figure>'


def _curve_chart(
    trained: Mapping[str, list[RunData]], colours: Mapping[str, str], metric: str, title: str, y_label: str
) -> str:
    without = [label for label, runs in trained.items() if not any(run.curve(metric)[0] for run in runs)]
    remark = "thin: each step; thick: moving average"
    if any(len(runs) > 1 for runs in trained.values()):
        remark = "moving averages, one line a seed"
    if without:
        remark = f"not logged by {', '.join(without)}"

    def draw(axes: Axes) -> None:
        for label, runs in trained.items():
            for run in runs:
                tokens, values = run.curve(metric)
                smooth = _moving_average(values, len(values) // 20)
                if len(runs) == 1 and smooth != values:
                    axes.plot(tokens, values, color=colours[label], alpha=0.25, linewidth=0.8)
                axes.plot(tokens, smooth, color=colours[label], linewidth=1.8 if len(runs) == 1 else 1.2)
        axes.set(xlabel="generated tokens", ylabel=y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return _chart(metric.replace("/", "-"), title, remark, draw)


def _moving_average(values: list[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on each side. Fewer near the start, as many on both sides, since much changes there;
    near the end the mean of what there is."""
    windows = (values[i - min(reach, i) : i + min(reach, i) + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _pass_chart(tested: Mapping[str, list[Evaluation]], colours: Mapping[str, str]) -> str:
    def draw(axes: Axes) -> None:
        ticks: set[int] = set()
        for label, evaluations in tested.items():
            most = min(min(evaluation.n) for evaluation in evaluations)
            ks = sorted({2**i for i in range(most.bit_length())} | {k for one in evaluations for k in one.k})
            ticks |= set(ks)
            estimates = [pooled_pass_at(evaluations, k) for k in ks]
            lows, highs = [e.low for e in estimates], [e.high for e in estimates]
            axes.fill_between(ks, lows, highs, color=colours[label], alpha=0.15, linewidth=0)
            axes.plot(ks, [e.mean for e in estimates], color=colours[label], linewidth=1.8, marker="o", markersize=3.5)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="k (samples a problem)", ylabel="share of problems solved (pass@k)", ylim=(0, 1.02))

    return _chart("pass-at-k", "pass@k", "band: 95% interval", draw)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`header` is text; `rows` are HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _interval(estimate: Estimate, form: str = ".3f") -> str:
    cell = f"{estimate.mean:{form}}<small>[{estimate.low:{form}}, {estimate.high:{form}}]</small>"
    return cell.replace("-", "−")


def _asked(tested: Mapping[str, list[Evaluation]]) -> list[int]:
    return sorted({k for evaluations in tested.values() for one in evaluations for k in one.k})


def _reaches(evaluations: Sequence[Evaluation], k: int) -> bool:
    return all(one.largest_k >= k for one in evaluations)


def _evaluation_table(tested: Mapping[str, list[Evaluation]]) -> str:
    ks = _asked(tested)
    rows = []
    for label, evaluations in tested.items():
        problems = {len(one.problems) for one in evaluations}
        samples = {n for one in evaluations for n in one.n}
        unread: dict[str, int] = {}
        for one in evaluations:
            for status, count in one.statuses.items():
                if status != "ok":
                    unread[status] = unread.get(status, 0) + count
        rows.append([
            escape(label),
            *(_interval(pooled_pass_at(evaluations, k)) if _reaches(evaluations, k) else "" for k in ks),
            f"{_span(problems)} × {_span(samples)}",
            str(len(evaluations)),
            f"{_mean([one.mean_response_length for one in evaluations]):.1f}",
            f"{_mean([one.truncated_share for one in evaluations]):.1%}",
            escape(", ".join(f"{count:,} {status}" for status, count in sorted(unread.items()))) or "none",
        ])  # fmt: skip
    header = [
        "Model",
        *(f"pass@{k}" for k in ks),
        "problems × samples",
        "seeds",
        "mean length",
        "cut off",
        "not scored",
    ]
    text = (
        "pass@k: the share of problems of which at least one of k samples is right, by the unbiased estimate; in "
        "brackets the 95% bootstrap interval over problems, and over seeds if there are several. Length in tokens; "
        "cut off: samples that met the limit without an end; not scored: samples without a readable answer, or whose "
        "grading failed; they count as wrong. Where all problems "
        "are solved, or none is, the interval is the exact binomial one."
    )
    if any(1 < len(evaluations) < _FEW_SEEDS for evaluations in tested.values()):
        text += f" With fewer than {_FEW_SEEDS} seeds an interval is too narrow to speak for further seeds."
    return f'{_table(header, rows)}<p class="small">{text}</p>'


def _difference_table(tested: Mapping[str, list[Evaluation]]) -> str:
    """All pairs of a few models, else each against the first one."""
    labels = list(tested)
    pairs = list(combinations(labels, 2)) if len(labels) <= 4 else [(labels[0], label) for label in labels[1:]]
    ks = _asked(tested)
    rows, apart = [], []
    for first, second in pairs:
        one, other = tested[first], tested[second]
        if [e.problems for e in one] != [e.problems for e in other]:
            apart.append(f"{second} − {first}")
            continue
        row = [f"{escape(second)} − {escape(first)}"]
        for k in ks:
            if not (_reaches(one, k) and _reaches(other, k)):
                row.append("")
                continue
            estimate = paired_difference(one, other, k)
            cell = _interval(estimate, "+.3f")
            row.append(f"<b>{cell}</b>" if estimate.low > 0 or estimate.high < 0 else cell)
        rows.append(row)
    text = "Differences on the same problems, with 95% intervals; bold where 0 is outside."
    if apart:
        text += f" Not comparable, since problems or seeds differ: {', '.join(apart)}."
    table = _table(["Difference", *(f"pass@{k}" for k in ks)], rows) if rows else ""
    return f'{table}<p class="small">{escape(text)}</p>' if pairs else ""


def _seed_table(tested: Mapping[str, list[Evaluation]]) -> str:
    """pass@k of each seed. Empty unless several models have the same seeds, and several, on the same problems."""
    first, *others = tested.values()
    problems = [one.problems for one in first]
    ks = [k for k in _asked(tested) if all(_reaches(evaluations, k) for evaluations in tested.values())]
    if len(first) < 2 or not others or not ks or any([one.problems for one in each] != problems for each in others):
        return ""
    shown = sorted({ks[0], ks[-1]})
    rows = [
        [str(seed[0].seed), *(" / ".join(f"{one.values(k).mean().item():.3f}" for k in shown) for one in seed)]
        for seed in zip(*tested.values(), strict=True)
    ]
    title = f"<h3>Seed by seed: {' / '.join(f'pass@{k}' for k in shown)}</h3>"
    return f'{title}{_table(["Seed", *tested], rows)}<p class="small">{escape(seeds_line(tested, ks[-1]))}</p>'


def seeds_line(tested: Mapping[str, Sequence[Evaluation]], k: int) -> str:
    """On how many seeds each model solves less than the first one with k samples, as a sentence."""
    (name, first), *others = tested.items()
    counts = (f"{label} on {seeds_below(first, each, k)} of {len(first)} seeds" for label, each in others)
    return f"pass@{k} over all problems is below that of {name}: {', '.join(counts)}."


def _run_table(trained: Mapping[str, list[RunData]]) -> str:
    rows = []
    for label, runs in trained.items():
        for seed, run in enumerate(runs, 1):
            last = run.metrics[-1]
            seconds = [step["time/step"] for step in run.metrics if "time/step" in step]
            rewards = run.curve("reward/internal")[1]
            tail = rewards[-max(1, len(rewards) // 10) :]
            rows.append([
                escape(label if len(runs) == 1 else f"{label}, run {seed} of {len(runs)}"),
                f"{last['step']:,}",
                f"{last['generated_tokens']:,}",
                f"{sum(seconds):,.0f} s" if seconds else "",
                f"{_mean(tail):.3f}" if tail else "",
            ])  # fmt: skip
    header = ["Run", "steps", "generated tokens", "time", "reward, mean of the last tenth"]
    return _table(header, rows)


def _phase_table(trained: Mapping[str, list[RunData]]) -> str:
    """Where a step's time goes, evaluations and each run's first step, which warms up, left out. Empty if unknown."""
    rows = []
    for label, runs in trained.items():
        steps = [step for run in runs for step in run.metrics[1:] if "time/step" in step]
        seconds = {p: sum(s.get(f"time/{p}", 0.0) for s in steps) for p in ("step", "evaluate", *_WORK, *_OVERHEAD)}
        if (whole := seconds["step"] - seconds["evaluate"]) <= 0:
            continue
        overhead = whole - sum(seconds[phase] for phase in _WORK)
        rest = overhead - sum(seconds[phase] for phase in _OVERHEAD)
        shares = [*(seconds[phase] for phase in (*_WORK, *_OVERHEAD)), rest, overhead]
        rows.append([escape(label), f"{whole / len(steps):.3g} s", *(f"{part / whole:.1%}" for part in shares)])
    if not rows:
        return ""
    return _table(["", "step", *_WORK.values(), *_OVERHEAD.values(), "rest", "overhead: all from sync on"], rows)


def _configurations(trained: Mapping[str, list[RunData]]) -> list[str]:
    parts = []
    for label, runs in trained.items():
        for seed, run in enumerate(runs, 1):
            name = escape(label if len(runs) == 1 else f"{label}, run {seed} of {len(runs)}")
            parts.append(f"<details><summary>{name}</summary><pre>{escape(run.config)}</pre></details>")
    return parts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)}–{max(values)}"
