"""Does the form of demonstrations decide if RL-PLUS helps: `python -m experiments.form RESULTS` prints the tests.

Decision 077 fixed them before the runs. RESULTS is the results.json of experiments/compare/form.yaml, or of
form-rates.yaml; seeds that lack a run are left out.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.significance import exact_interval, finds_the_skill, holm, permutation_p, right_samples
from rlplus.tools.compare.outcomes import Outcome, Results
from rlplus.tools.report.tables import percent

GRPO = "GRPO, without demonstrations"
OWN = "RL-PLUS, own form"
OTHER = "RL-PLUS, without the first number"
REVERSED = "RL-PLUS, reversed"
OWN_EXACT = "RL-PLUS, own form, exact"
OTHER_EXACT = "RL-PLUS, without the first number, exact"
REVERSED_EXACT = "RL-PLUS, reversed, exact"
OWN_OMEGA = "p/p_ω, own form"
OTHER_OMEGA = "p/p_ω, without the first number"
OWN_SFT = "SFT, own form"
OTHER_SFT = "SFT, without the first number"
OWN_BOTH = "SFT+GRPO, own form"
OTHER_BOTH = "SFT+GRPO, without the first number"
RUNS = {  # setting and method; GRPO sees no demonstrations, so that its runs are those of every setting
    GRPO: ("own", "GRPO"),
    OTHER: ("without the first number", "RL-PLUS"),
    OWN: ("own", "RL-PLUS"),
}
CELLS = RUNS | {
    REVERSED: ("reversed", "RL-PLUS"),
    OWN_EXACT: ("own and exact", "RL-PLUS"),
    OTHER_EXACT: ("without the first number and exact", "RL-PLUS"),
    REVERSED_EXACT: ("reversed and exact", "RL-PLUS"),
    OWN_OMEGA: ("own", "p/p_ω"),
    OTHER_OMEGA: ("without the first number", "p/p_ω"),
    OWN_SFT: ("own", "SFT"),
    OTHER_SFT: ("without the first number", "SFT"),
    OWN_BOTH: ("own", "SFT+GRPO"),
    OTHER_BOTH: ("without the first number", "SFT+GRPO"),
}
SETTINGS = {  # those whose other methods came last, by the end of their names
    "own form, exact": "own and exact",
    "without the first number, exact": "without the first number and exact",
    "reversed": "reversed",
    "reversed, exact": "reversed and exact",
}
OTHER_METHODS = {
    f"{method}, {name}": (setting, method)
    for name, setting in SETTINGS.items()
    for method in ("SFT", "SFT+GRPO", "p/p_ω", "RL-PLUS")
} | {GRPO: CELLS[GRPO]}
RESPONSES = "RL-PLUS, own right responses"
RESPONSES_BOTH = "SFT+GRPO, own right responses"
WITH_RESPONSES = {each: CELLS[each] for each in (GRPO, OTHER, OWN_EXACT)} | {
    RESPONSES: ("own responses", "RL-PLUS"),
    RESPONSES_BOTH: ("own responses", "SFT+GRPO"),
}
RATES = {
    f"{name}, {rate}": (setting, f"{method}{at}")
    for name, (setting, method) in RUNS.items()
    for rate, at in (("5e-4", " at half the rate"), ("1e-3", ""), ("2e-3", " at twice the rate"))
}
DIFFERENCES = ((OWN, OTHER), (OWN, GRPO), (OTHER, GRPO))  # the first is the interaction of the form with RL-PLUS − GRPO
CELL_DIFFERENCES = (
    (OWN_EXACT, OTHER_EXACT),
    (OWN_EXACT, REVERSED_EXACT),
    (OWN_EXACT, GRPO),
    (OWN, REVERSED),
    (OWN, OWN_BOTH),
    (OWN, OWN_OMEGA),
    (OWN_BOTH, OTHER_BOTH),
)
METHOD_DIFFERENCES = (
    (OWN_EXACT, "SFT+GRPO, own form, exact"),
    (OWN_EXACT, "SFT, own form, exact"),
    (OWN_EXACT, "p/p_ω, own form, exact"),
    (OTHER_EXACT, "p/p_ω, without the first number, exact"),
    (REVERSED, "p/p_ω, reversed"),
    (REVERSED_EXACT, "p/p_ω, reversed, exact"),
    ("p/p_ω, reversed, exact", GRPO),
    ("SFT+GRPO, own form, exact", "SFT+GRPO, without the first number, exact"),
    ("SFT+GRPO, own form, exact", "SFT+GRPO, reversed, exact"),
)
RESPONSE_DIFFERENCES = ((RESPONSES, GRPO), (RESPONSES, OTHER), (RESPONSES, OWN_EXACT), (RESPONSES, RESPONSES_BOTH))
PARTS = {  # Holm in each part
    "first": (RUNS, DIFFERENCES),
    "cells": (CELLS, CELL_DIFFERENCES),
    "methods": (OTHER_METHODS, METHOD_DIFFERENCES),
    "responses": (WITH_RESPONSES, RESPONSE_DIFFERENCES),
    "rates": (RATES, ()),
}
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


def complete(results: Results, part: str = "first") -> dict[str, list[Outcome]]:
    """The outcomes of each kind of run of a part on the seeds that have all of them, by seed."""
    runs, _ = PARTS[part]
    found = {name: results.of(*place) for name, place in runs.items()}
    seeds = sorted(set.intersection(*(set(each) for each in found.values())))
    if not seeds:
        raise ValueError(f"want a seed with the runs {'; '.join(runs)}; there is none")
    return {name: [each[seed] for seed in seeds] for name, each in found.items()}


def pass_at_1(outcome: Outcome) -> float:
    """The share of right samples over all problems."""
    return right_samples(outcome) / sum(sum(one.n) for one in outcome.results.values())


def differences_of(results: Results, part: str = "first") -> list[Difference]:
    """The differences of a part, with a permutation test each and its p by Holm."""
    _, differences = PARTS[part]
    runs = complete(results, part)
    right = {name: np.array([right_samples(one) for one in outcomes]) for name, outcomes in runs.items()}
    mean = {name: fmean(map(pass_at_1, outcomes)) for name, outcomes in runs.items()}
    raw = [permutation_p(right[of] - right[less]) for of, less in differences]
    verdict = len(next(iter(runs.values()))) >= LEAST
    return [
        Difference(
            of,
            less,
            mean[of] - mean[less],
            int(np.sum(right[of] > right[less])),
            p if verdict else None,
            corrected if verdict else None,
        )
        for (of, less), p, corrected in zip(differences, raw, holm(raw), strict=True)
    ]


def run_rows(results: Results, part: str = "first") -> list[tuple[str, ...]]:
    """For each kind of run pass@1, the seeds that find the skill, and pass@1 of these and of the others apart."""
    rows = []
    for name, outcomes in complete(results, part).items():
        parts: dict[bool, list[float]] = {True: [], False: []}
        for one in outcomes:
            parts[finds_the_skill(one)].append(pass_at_1(one))
        count, seeds = len(parts[True]), len(outcomes)
        low, high = exact_interval(count, seeds)
        found = f"{count} of {seeds} ({100 * low:.0f} to {100 * high:.0f} %)"
        apart = (percent(fmean(each)) if each else "" for each in parts.values())
        rows.append((name, percent(fmean(map(pass_at_1, outcomes))), found, *apart))
    return rows


def difference_rows(results: Results, part: str = "first") -> list[tuple[str, ...]]:
    """The differences in points, on how many seeds they are above 0, and the tests."""
    seeds = len(next(iter(complete(results, part).values())))

    def text(p: float | None) -> str:
        return "" if p is None else "< .0001" if p < 1e-4 else f"{p:.4f}"

    return [
        (f"{d.of} − {d.less}", percent(d.mean, "+"), f"{d.above} of {seeds}", text(d.p), text(d.corrected))
        for d in differences_of(results, part)
    ]


RUN_HEADER = ("runs", "pass@1, %", "find the skill (95 %)", "pass@1 of those", "pass@1 of the others")
TESTED_HEADER = ("difference", "points", "seeds above 0", "p", "p by Holm")


def main() -> None:
    """Print the runs of each part, and its tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of experiments/compare/form.yaml")
    results = Results.load(parser.parse_args().results)
    for part in PARTS:
        try:
            tables = ((RUN_HEADER, run_rows(results, part)), (TESTED_HEADER, difference_rows(results, part)))
        except ValueError as error:
            print(f"{part}: {error}\n")
            continue
        for header, rows in (each for each in tables if each[1]):
            print("\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)), end="\n\n")


if __name__ == "__main__":
    main()
