"""The order in which the models of a finished comparison add the numbers of the demo's hard problems.

    rlplus compare experiments/compare/paper.yaml --output runs/compare/paper
    python -m experiments.scratchpads runs/compare/paper foreign

Prints a Markdown table. A response is a guess if it writes no scratchpad; otherwise the first running sum tells the
order: it is the problem's first number, or its last one, up to one wrong digit, or neither. The numbers of guesses and
orders are percentages of the responses to hard problems of the test set `trained`, over all seeds; the last column
has the percentage of right ones by seed.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.toy.task import EASY, EMPTY, PLUS, SCRATCHPAD, WIDTH
from rlplus.common.textfiles import file_name, read_text
from rlplus.train.data import KeptSample, iter_kept

ORDERS = ("guess", "first to last", "last to first", "neither")


def order(numbers: Sequence[str], response: str) -> str:
    """One of ORDERS: how a response adds these numbers."""
    if not response.startswith(SCRATCHPAD):
        return ORDERS[0]
    begins = response.removeprefix(SCRATCHPAD)[:WIDTH]
    wrong = [sum(a != b for a, b in zip(number, begins, strict=False)) for number in (numbers[0], numbers[-1])]
    if len(begins) < WIDTH or min(wrong) > 1:
        return ORDERS[3]
    return ORDERS[1] if wrong[0] <= wrong[1] else ORDERS[2]


def hard_responses(run: Path) -> Iterator[tuple[str, KeptSample]]:
    """The responses of a run's evaluation to hard problems, with their orders."""
    for path in sorted(run.glob("samples/evaluation-trained-*.parquet")):
        for sample in iter_kept(path):
            numbers = [each for each in sample.prompt.removesuffix("=").split(PLUS) if EMPTY not in each]
            if len(numbers) > EASY:
                yield order(numbers, sample.response), sample


def row(label: str, runs: Sequence[Path]) -> list[str]:
    """A method's cells, from its run of each seed."""
    orders: Counter[str] = Counter()
    right = []
    for run in runs:
        found = list(hard_responses(run))
        if not found:
            raise SystemExit(f"want the samples of an evaluation on hard problems in {run / 'samples'}; got none")
        orders.update(name for name, _ in found)
        right.append(sum(sample.right is True for _, sample in found) / len(found))
    shares = [orders[name] / orders.total() for name in ORDERS]
    return [label, *(f"{100 * share:.0f}" for share in shares), ", ".join(f"{100 * share:.0f}" for share in right)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count in which order the models of a comparison add.")
    parser.add_argument("folder", type=Path, help="of a comparison, with its runs and its results.json")
    parser.add_argument("setting", help="one of its settings")
    args = parser.parse_args(argv)
    every = json.loads(read_text(args.folder / "results.json"))["outcomes"]
    runs: dict[str, list[Path]] = {}
    for one in every:
        if one["setting"] == args.setting:
            folder = args.folder / "runs" / file_name(one["setting"]) / f"seed-{one['seed']}" / file_name(one["method"])
            runs.setdefault(one["method"], []).append(folder)
    if not runs:
        known = ", ".join(dict.fromkeys(one["setting"] for one in every))
        raise SystemExit(f"want a setting with finished runs ({known}); got {args.setting}")
    header = ["method", *ORDERS, "right, by seed"]
    lines = [header, ["---"] * len(header), *(row(method, folders) for method, folders in runs.items())]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
