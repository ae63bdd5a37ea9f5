"""Tables of evaluations and runs, and the sentences that say what is in them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

import yaml

from rlplus.tools.report.run_reader import RunData
from rlplus.train.evaluation.clusters import misleading, note_of
from rlplus.train.evaluation.estimates import Estimate
from rlplus.train.evaluation.results import Evaluation, not_graded, paired_difference, pooled_pass_at, seeds_below

WORK = {  # phases of a step that compute, by time/<phase>, and the others
    "generate": "generate",
    "forward_backward": "forward, backward",
    "optimizer": "optimizer",
    "old_logprob": "old logprobs",
    "statistics": "statistics",
    "learners": "critic, reward model or teacher",
}
OVERHEAD = {"sync": "sync", "score": "score", "pack": "pack", "samples": "kept samples"}
_UNCHANGED = ("output_dir",)  # keys whose difference says nothing

EVALUATION_NOTE = (
    "pass@k: the share of problems of which at least one of k samples is right, by the unbiased estimate, with the 95% "
    "bootstrap interval over problems, and over seeds if there are several, then not below that of Student's t. "
    "Length: mean, in tokens. Cut off: samples that met the limit without an end. Unread: samples without a readable "
    "answer, which count as wrong, and those on which the grader failed, which do so only with reward.on_failure zero. "
    "Where all problems are solved, or none is, the interval is the exact binomial one. Differences are on the same "
    "problems, with 95% intervals; bold where 0 is outside, unless few seeds fall into two groups."
)

Tested = Mapping[str, Sequence[Evaluation]]
Trained = Mapping[str, Sequence[RunData]]


@dataclass(frozen=True)
class Cell:
    """Text, with a smaller one behind it."""

    text: str
    detail: str = ""
    strong: bool = False


@dataclass
class Table:
    """Cells by row; the first column names the row. note: what the reader should know."""

    header: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    title: str = ""

    def add(self, *cells: Cell | str) -> None:
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])


def interval(estimate: Estimate, sign: str = "", *, strong: bool = False) -> Cell:
    """The mean in percent, with the limits of its interval as the detail."""
    limits = f"{percent(estimate.low, sign)} to {percent(estimate.high, sign)}"
    return Cell(percent(estimate.mean, sign), limits, strong)


def percent(share: float, sign: str = "") -> str:
    """A percentage with one digit; a tie but for the last bits is rounded as a tie."""
    return f"{round(100 * share, 6):{sign}.1f}".replace("-", "−")


def _asked(tested: Tested) -> list[int]:
    return sorted({k for evaluations in tested.values() for one in evaluations for k in one.k})


def _reaches(evaluations: Sequence[Evaluation], k: int) -> bool:
    return all(one.largest_k >= k for one in evaluations)


def result_tables(benchmarks: Mapping[str, Tested]) -> list[Table]:
    """The tables of each benchmark, behind one of all where there are several."""
    tables: list[Table | None] = [overview_table(benchmarks)]
    for name, tested in benchmarks.items():
        tables += [evaluation_table(tested, name), difference_table(tested), seed_table(tested)]
    return [table for table in tables if table is not None]


def overview_table(benchmarks: Mapping[str, Tested]) -> Table | None:
    """pass@k at the least k asked for, by model and benchmark, and the mean over benchmarks; None of a single one."""
    if len(benchmarks) < 2:
        return None
    ks = {name: _asked(tested)[0] for name, tested in benchmarks.items()}
    table = Table(["%", *(f"{name}, pass@{k}" for name, k in ks.items()), "mean"])
    for label in dict.fromkeys(label for tested in benchmarks.values() for label in tested):
        means = [
            pooled_pass_at(tested[label], ks[name]).mean if label in tested else None
            for name, tested in benchmarks.items()
        ]
        known = [mean for mean in means if mean is not None]
        whole = percent(fmean(known)) if len(known) == len(means) else ""
        table.add(label, *("" if mean is None else percent(mean) for mean in means), whole)
    return table


def evaluation_table(tested: Tested, benchmark: str) -> Table:
    ks = _asked(tested)
    header = ["model", *(f"pass@{k}, %" for k in ks), "problems × samples", "seeds", "length", "cut off", "unread"]
    table = Table([*header, "graded by"], title=benchmark)
    for label, evaluations in tested.items():
        problems = {len(one.problems) for one in evaluations}
        samples = {n for one in evaluations for n in one.n}
        unread = sum((Counter(one.statuses) for one in evaluations), Counter[str]())
        table.add(
            label,
            *(interval(pooled_pass_at(evaluations, k)) if _reaches(evaluations, k) else "" for k in ks),
            f"{_span(problems)} × {_span(samples)}",
            str(len(evaluations)),
            f"{fmean([one.mean_response_length for one in evaluations]):.1f}",
            f"{fmean([one.truncated_share for one in evaluations]):.1%}",
            not_graded(unread),
            ", ".join(dict.fromkeys(one.grader for one in evaluations)),
        )
    return table


def model_warnings(benchmarks: Mapping[str, Tested]) -> list[str]:
    """A sentence for each label whose results, of one seed, are of several models: files of an earlier one are left."""
    warnings = []
    for label in dict.fromkeys(label for tested in benchmarks.values() for label in tested):
        by_benchmark = [(name, tested[label]) for name, tested in benchmarks.items() if label in tested]
        for seed in range(min(len(evaluations) for _, evaluations in by_benchmark)):
            models = {name: evaluations[seed].model for name, evaluations in by_benchmark if evaluations[seed].model}
            if len({model.rpartition("@")[2] for model in models.values()}) > 1:  # wherever their folders are
                each = ", ".join(f"{name} of {model}" for name, model in models.items())
                warnings.append(f"{label}: results of different models: {each}. Evaluate all with the same one.")
    return warnings


def difference_table(tested: Tested) -> Table | None:
    """All pairs of a few models, else each against the first one."""
    labels = list(tested)
    pairs = list(combinations(labels, 2)) if len(labels) <= 4 else [(labels[0], label) for label in labels[1:]]
    ks = _asked(tested)
    table = Table(["difference in points", *(f"pass@{k}" for k in ks)])
    incomparable = []
    for first, second in pairs:
        one = tested[first]
        other = tested[second]
        if [e.problems for e in one] != [e.problems for e in other]:
            incomparable.append(f"{second} − {first}")
            continue
        row: list[Cell | str] = [f"{second} − {first}"]
        for k in ks:
            if not (_reaches(one, k) and _reaches(other, k)):
                row.append("")
                continue
            estimate = paired_difference(one, other, k)
            clear = (estimate.low > 0 or estimate.high < 0) and not in_groups(tested, k)
            row.append(interval(estimate, "+", strong=clear))
        table.add(*row)
    notes = [f"Not comparable, since problems or seeds differ: {', '.join(incomparable)}."] if incomparable else []
    if names := list(dict.fromkeys(name for k in ks for name in in_groups(tested, k))):
        notes.append(note_of(names, len(tested[names[0]])))
    table.note = " ".join(notes)
    return table if pairs else None


def in_groups(tested: Tested, k: int) -> list[str]:
    """The models whose seeds are few and have two outcomes at this k."""
    return [
        label
        for label, each in tested.items()
        if _reaches(each, k) and misleading([one.values(k).mean().item() for one in each])
    ]


def seed_table(tested: Tested) -> Table | None:
    """pass@k of each seed. None unless several models have the same seeds, and several, on the same problems."""
    first, *others = tested.values()
    problems = [one.problems for one in first]
    ks = [k for k in _asked(tested) if all(_reaches(evaluations, k) for evaluations in tested.values())]
    if len(first) < 2 or not others or not ks or any([one.problems for one in each] != problems for each in others):
        return None
    shown = sorted({ks[0], ks[-1]})
    title = f"Seed by seed: {' / '.join(f'pass@{k}' for k in shown)}, %"
    table = Table(["seed", *tested], title=title, note=seeds_line(tested, ks[-1]))
    for seed in zip(*tested.values(), strict=True):
        cells = (" / ".join(percent(one.values(k).mean().item()) for k in shown) for one in seed)
        table.add(str(seed[0].seed), *cells)
    return table


def seeds_line(tested: Tested, k: int) -> str:
    """A sentence: on how many seeds each model solves fewer problems than the first one with k samples."""
    (name, first), *others = tested.items()
    counts = (f"{label} on {seeds_below(first, each, k)} of {len(first)} seeds" for label, each in others)
    return f"pass@{k} over all problems is below that of {name}: {', '.join(counts)}."


def headline(trained: Trained, benchmarks: Mapping[str, Tested], first: str) -> str:
    """The result in a sentence; `first` names the model that it begins with, if that was tested."""
    if not benchmarks:
        return " ".join(_progress(label, runs[0]) for label, runs in trained.items())
    labels = dict.fromkeys(label for tested in benchmarks.values() for label in tested)
    ordered = sorted(labels, key=lambda label: label != first)
    if len(benchmarks) > 1:
        return _average(benchmarks, ordered)
    (tested,) = benchmarks.values()
    evaluations = tested[ordered[0]]
    ks = [k for k in _asked({"": evaluations}) if _reaches(evaluations, k)]
    shown = sorted({ks[0], ks[-1]})
    best = [pooled_pass_at(evaluations, k) for k in shown]
    problems = _span({len(one.problems) for one in evaluations})
    text = f"{ordered[0]} solves {percent(best[0].mean)}% of {problems} problems with {_samples(shown[0])} "
    text += f"(95% interval {100 * best[0].low:.0f} to {100 * best[0].high:.0f})"
    text += "".join(f" and {percent(e.mean)}% with {k}" for e, k in zip(best[1:], shown[1:], strict=True))
    others = []
    for label in ordered[1:]:
        each = [f"{percent(pooled_pass_at(tested[label], k).mean)}%" for k in shown if _reaches(tested[label], k)]
        others.append(f"{label} {' and '.join(each)}")
    return f"{'; '.join([text, *others])}."


def _average(benchmarks: Mapping[str, Tested], labels: Sequence[str]) -> str:
    """Means over benchmarks at the least k, of the models that were tested on all of them."""
    parts: list[str] = []
    for label in labels:
        if all(label in tested for tested in benchmarks.values()):
            means = [pooled_pass_at(tested[label], _asked(tested)[0]).mean for tested in benchmarks.values()]
            parts.append(f"{label} {'solves ' if not parts else ''}{percent(fmean(means))}%")
    ks = {_asked(tested)[0] for tested in benchmarks.values()}
    each = f" with {_samples(min(ks))}" if len(ks) == 1 else ""
    if not parts:
        return f"{len(benchmarks)} benchmarks, and no model that was tested on all of them."
    return f"{'; '.join(parts)} of the problems{each}, as a mean over {len(benchmarks)} benchmarks."


def _samples(k: int) -> str:
    return "one sample" if k == 1 else f"{k} samples"


def _progress(label: str, run: RunData) -> str:
    steps, rewards = run.curve("reward/internal")
    if not rewards:
        return f"{label}: {run.metrics[-1]['step']:,} steps without a reward of its own responses."
    part = max(1, len(rewards) // 10)
    change = f"from {fmean(rewards[:part]):.3f} to {fmean(rewards[-part:]):.3f}"
    return f"{label}: the mean reward went {change} in {steps[-1]:,} steps (the first and the last tenth of them)."


def run_table(trained: Trained) -> Table:
    table = Table(["run", "steps", "generated tokens", "time", "reward, last tenth"])
    for name, run in named(trained):
        last = run.metrics[-1]
        seconds = [step["time/step"] for step in run.metrics if "time/step" in step]
        rewards = run.curve("reward/internal")[1]
        tail = rewards[-max(1, len(rewards) // 10) :]
        table.add(
            name,
            f"{last['step']:,}",
            f"{last['generated_tokens']:,}",
            f"{sum(seconds):,.0f} s" if seconds else "",
            f"{fmean(tail):.3f}" if tail else "",
        )
    table.note = " ".join(f"{name}: {run.end}." for name, run in named(trained) if run.end)
    return table


def phase_table(trained: Trained) -> Table | None:
    """A step's time by phase, without evaluations and each run's first step, which warms up. None if unknown.

    Phases that no run has are left out.
    """
    logged = {name for runs in trained.values() for run in runs for step in run.metrics for name in step}
    work = {p: label for p, label in WORK.items() if f"time/{p}" in logged}
    other = {p: label for p, label in OVERHEAD.items() if f"time/{p}" in logged}
    last = f"overhead: all from {next(iter(other.values()), 'rest')} on"
    table = Table(["run", "step", *work.values(), *other.values(), "rest", last], title="Where the time goes")
    for label, runs in trained.items():
        steps = [step for run in runs for step in run.metrics[1:] if "time/step" in step]
        seconds = {p: sum(s.get(f"time/{p}", 0.0) for s in steps) for p in ("step", "evaluate", *work, *other)}
        if (whole := seconds["step"] - seconds["evaluate"]) <= 0:
            continue
        overhead = whole - sum(seconds[phase] for phase in work)
        rest = overhead - sum(seconds[phase] for phase in other)
        shares = [*(seconds[phase] for phase in (*work, *other)), rest, overhead]
        table.add(label, f"{whole / len(steps):.3g} s", *(f"{part / whole:.1%}" for part in shares))
    return table if table.rows else None


def configuration_table(trained: Trained) -> Table | None:
    """The keys whose values differ between the first runs of the labels; None for a single label."""
    settings = {label: runs[0].settings for label, runs in trained.items()}
    if len(settings) < 2:
        return None
    table = Table(["key", *settings], title="What differs")
    for key in dict.fromkeys(key for each in settings.values() for key in each):
        values = [_value(each[key]) if key in each else "(no such key)" for each in settings.values()]
        if len(set(values)) > 1 and key not in _UNCHANGED:
            table.add(key, *values)
    if not table.rows:
        table.note = "The configurations are the same but for output_dir."
    return table


def _value(value: object) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("\n...\n").strip()
    )


def provenance_table(trained: Trained) -> Table | None:
    """Date, command, commits, hardware and versions of each run's last start; None where no run noted any."""
    started = [(name, run) for name, run in named(trained) if run.starts]
    if not started:
        return None
    table = Table(["", *(name for name, _ in started)])
    facts = [_facts(run) for _, run in started]
    for key in dict.fromkeys(key for each in facts for key in each):
        first, *others = [each.get(key, "") for each in facts]
        table.add(key, first, *("the same" if fact and fact == first else fact for fact in others))
    return table


def _facts(run: RunData) -> dict[str, str]:
    last = run.starts[-1]
    facts = {"started": str(run.starts[0].get("date", ""))}
    if len(run.starts) > 1:
        resumed = (f"{start.get('date')} at step {start.get('step')}" for start in run.starts[1:])
        facts["resumed"] = ", ".join(resumed)
    facts["command"] = str(last.get("command", ""))
    facts |= {f"commit, {place}": str(commit) for place, commit in last.get("commits", {}).items()}
    facts |= {str(name): str(value) for name, value in last.get("hardware", {}).items()}
    versions = (f"{name} {version}" for name, version in last.get("versions", {}).items())
    return facts | {"versions": ", ".join(versions)}


def named(trained: Trained) -> list[tuple[str, RunData]]:
    """Every run with a name of its own."""
    return [
        (label if len(runs) == 1 else f"{label}, run {seed} of {len(runs)}", run)
        for label, runs in trained.items()
        for seed, run in enumerate(runs, 1)
    ]


def _span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)}–{max(values)}"
