"""Tables of evaluations and runs, as HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import combinations

from rlplus.evaluation import Estimate, Evaluation, paired_difference, pooled_pass_at, seeds_below
from rlplus.report.runs import RunData

_FEW_SEEDS = 5  # see pooled_pass_at
_WORK = {
    "generate": "generate",
    "forward_backward": "forward, backward",
    "optimizer": "optimiser",
    "old_logprob": "old logprobs",
    "statistics": "statistics",
    "learners": "critic or reward model",
}
_OVERHEAD = {"sync": "sync", "score": "score", "pack": "pack"}


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


def evaluation_table(tested: Mapping[str, list[Evaluation]]) -> str:
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
        "cut off: samples that met the limit without an end; not scored: samples without a readable answer, which "
        "count as wrong, and those on which the grader failed, which do so only with reward.on_failure zero. Where all "
        "problems are solved, or none is, the interval is the exact binomial one."
    )
    if any(1 < len(evaluations) < _FEW_SEEDS for evaluations in tested.values()):
        text += f" With fewer than {_FEW_SEEDS} seeds an interval is too narrow to speak for further seeds."
    return f'{_table(header, rows)}<p class="small">{text}</p>'


def difference_table(tested: Mapping[str, list[Evaluation]]) -> str:
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


def seed_table(tested: Mapping[str, list[Evaluation]]) -> str:
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
    """A sentence: on how many seeds each model solves fewer problems than the first one with k samples."""
    (name, first), *others = tested.items()
    counts = (f"{label} on {seeds_below(first, each, k)} of {len(first)} seeds" for label, each in others)
    return f"pass@{k} over all problems is below that of {name}: {', '.join(counts)}."


def run_table(trained: Mapping[str, list[RunData]]) -> str:
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


def phase_table(trained: Mapping[str, list[RunData]]) -> str:
    """Where a step's time goes, evaluations and each run's first step, which warms up, left out. Empty if unknown.

    Phases that no run has are left out.
    """
    logged = {name for runs in trained.values() for run in runs for step in run.metrics for name in step}
    work, other = ({p: label for p, label in part.items() if f"time/{p}" in logged} for part in (_WORK, _OVERHEAD))
    rows = []
    for label, runs in trained.items():
        steps = [step for run in runs for step in run.metrics[1:] if "time/step" in step]
        seconds = {p: sum(s.get(f"time/{p}", 0.0) for s in steps) for p in ("step", "evaluate", *work, *other)}
        if (whole := seconds["step"] - seconds["evaluate"]) <= 0:
            continue
        overhead = whole - sum(seconds[phase] for phase in work)
        rest = overhead - sum(seconds[phase] for phase in other)
        shares = [*(seconds[phase] for phase in (*work, *other)), rest, overhead]
        rows.append([escape(label), f"{whole / len(steps):.3g} s", *(f"{part / whole:.1%}" for part in shares)])
    if not rows:
        return ""
    last = f"overhead: all from {next(iter(other.values()), 'rest')} on"
    return _table(["", "step", *work.values(), *other.values(), "rest", last], rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)}–{max(values)}"
