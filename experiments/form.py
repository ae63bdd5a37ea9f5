"""Does the form of demonstrations decide if RL-PLUS helps: `python -m experiments.form RESULTS` prints the tests.

Decision 077 fixed them before the runs. RESULTS is the results.json of experiments/compare/form.yaml; seeds that lack a
run are left out.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.significance import exact_interval, finds_the_skill, holm, permutation_p, right_samples
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.report.tables import percent

OWN, OTHER, GRPO = "RL-PLUS, own form", "RL-PLUS, without the first number", "GRPO, without demonstrations"
RUNS = {  # setting and method; GRPO sees no demonstrations, so that its runs are those of both settings
    GRPO: ("own", "GRPO"),
    OTHER: ("without the first number", "RL-PLUS"),
    OWN: ("own", "RL-PLUS"),
}
DIFFERENCES = ((OWN, OTHER), (OWN, GRPO), (OTHER, GRPO))  # the first is the interaction of the form with RL-PLUS − GRPO
LEAST = 10  # seeds of a verdict


@dataclass(frozen=True)
class Difference:
    """A difference over the seeds.

    mean: a share of all samples. above: the seeds on which it is above 0. p, corrected: None with too few seeds.
    """

    of: str
    less: str
    mean: float
    above: int
    p: float | None
    corrected: float | None


def complete(results: Results) -> dict[str, list[Outcome]]:
    """The outcomes of each kind of run on the seeds that have all of them, by seed."""
    found = {name: results.of(*place) for name, place in RUNS.items()}
    seeds = sorted(set.intersection(*(set(each) for each in found.values())))
    if not seeds:
        raise ValueError(f"want a seed with the runs {'; '.join(RUNS)}; there is none")
    return {name: [each[seed] for seed in seeds] for name, each in found.items()}


def pass_at_1(outcome: Outcome) -> float:
    """The share of right samples over all problems."""
    return right_samples(outcome) / sum(sum(one.n) for one in outcome.results.values())


def differences_of(results: Results) -> list[Difference]:
    """The three differences, with a permutation test each and its p by Holm."""
    runs = complete(results)
    right = {name: np.array([right_samples(one) for one in outcomes]) for name, outcomes in runs.items()}
    mean = {name: fmean(map(pass_at_1, outcomes)) for name, outcomes in runs.items()}
    raw = [permutation_p(right[of] - right[less]) for of, less in DIFFERENCES]
    verdict = len(runs[GRPO]) >= LEAST
    return [
        Difference(
            of,
            less,
            mean[of] - mean[less],
            int(np.sum(right[of] > right[less])),
            p if verdict else None,
            corrected if verdict else None,
        )
        for (of, less), p, corrected in zip(DIFFERENCES, raw, holm(raw), strict=True)
    ]


def run_rows(results: Results) -> list[tuple[str, ...]]:
    """For each kind of run pass@1, the seeds that find the skill, and pass@1 of these and of the others apart."""
    rows = []
    for name, outcomes in complete(results).items():
        parts: dict[bool, list[float]] = {True: [], False: []}
        for one in outcomes:
            parts[finds_the_skill(one)].append(pass_at_1(one))
        count, seeds = len(parts[True]), len(outcomes)
        low, high = exact_interval(count, seeds)
        found = f"{count} of {seeds} ({100 * low:.0f} to {100 * high:.0f} %)"
        apart = (percent(fmean(each)) if each else "" for each in parts.values())
        rows.append((name, percent(fmean(map(pass_at_1, outcomes))), found, *apart))
    return rows


def tested_rows(results: Results) -> list[tuple[str, ...]]:
    """The differences in points, on how many seeds they are above 0, and the tests."""
    seeds = len(complete(results)[GRPO])

    def text(p: float | None) -> str:
        return "" if p is None else "< .0001" if p < 1e-4 else f"{p:.4f}"

    return [
        (f"{d.of} − {d.less}", percent(d.mean, "+"), f"{d.above} of {seeds}", text(d.p), text(d.corrected))
        for d in differences_of(results)
    ]


RUN_HEADER = ("runs", "pass@1, %", "find the skill (95 %)", "pass@1 of those", "pass@1 of the others")
TESTED_HEADER = ("difference", "points", "seeds above 0", "p", "p by Holm")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of experiments/compare/form.yaml")
    results = Results.load(parser.parse_args().results)
    for header, rows in ((RUN_HEADER, run_rows(results)), (TESTED_HEADER, tested_rows(results))):
        print("\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)), end="\n\n")


if __name__ == "__main__":
    main()
