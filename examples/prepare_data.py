"""Write GSM8K or OpenR1-Math as the configurations read them: Parquet files for training and validation.

    python examples/prepare_data.py gsm8k          # data/gsm8k/train, validation and test.parquet
    python examples/prepare_data.py openr1-math    # data/openr1-math/train and validation.parquet

Rows come from the Hugging Face hub, or with --train and --test from copies of the same files (JSONL or Parquet).
gsm8k (openai/gsm8k): columns prompt, answer and demonstration, the worked solution without the calculator's input
and with the answer in a box. openr1-math (Elliott/Openr1-Math-46k-8192, LUFFY's selection of OpenR1-Math-220k): verl's
columns prompt, reward_model and target, the trace of DeepSeek-R1. The first of equal training prompts is kept, so
that no problem for validation is trained on.
"""

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rlplus.train.data.row_files import Row, read_rows
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing.name} is not installed: pip install -e ".[train]"') from None

SEED = 0  # chooses the problems for validation
_CALCULATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Source:
    """The layout of rows, their conversion, and the data paths of the splits."""

    layout: str
    convert: Callable[[Row], Row]
    train: str
    test: str | None = None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write public data as the configurations read them.")
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--train", help="file in place of the hub's training data")
    parser.add_argument("--test", help="file in place of the hub's test data (gsm8k)")
    parser.add_argument("--validation", type=int, default=500, help="problems held out for validation; default 500")
    parser.add_argument("--output", type=Path, help="folder; default data/SOURCE")
    args = parser.parse_args(argv)
    source = SOURCES[args.source]
    output = args.output or Path("data") / args.source
    files = split(convert(args.train or source.train, source), args.validation)
    if source.test is not None:
        files["test"] = convert(args.test or source.test, source)
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = output / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows")


def convert(path: str, source: Source) -> list[Row]:
    """The rows of a file or of a split on the hub. ValueError, with the place, for another layout."""
    converted = []
    for where, row in read_rows([path], None, None):
        try:
            converted.append(source.convert(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: want {source.layout}; got {row!r:.200}") from error
    return converted


def split(rows: list[Row], validation: int) -> dict[str, list[Row]]:
    """Rows for training and `validation` others, drawn with a fixed seed; both keep the order."""
    distinct: dict[str, Row] = {}
    for row in rows:
        distinct.setdefault(str(row["prompt"]), row)
    if not 0 < validation < len(distinct):
        raise ValueError(f"want --validation from 1 to {len(distinct) - 1}, fewer than prompts; got {validation}")
    held_out = set(random.Random(SEED).sample(range(len(distinct)), validation))
    files: dict[str, list[Row]] = {"train": [], "validation": []}
    for i, row in enumerate(distinct.values()):
        files["validation" if i in held_out else "train"].append(row)
    return files


def gsm8k(row: Row) -> Row:
    solution, answer = row["answer"].rsplit("####", 1)
    answer = answer.strip().replace(",", "")
    return {
        "prompt": row["question"],
        "answer": answer,
        "demonstration": f"{_CALCULATION.sub('', solution).strip()}\nThe answer is \\boxed{{{answer}}}.",
    }


def openr1_math(row: Row) -> Row:
    (target,) = row["target"]
    return {
        "prompt": row["prompt"],
        "reward_model": {"ground_truth": row["reward_model"]["ground_truth"]},
        "target": target["content"],
    }


SOURCES = {
    "gsm8k": Source(
        "question and answer: a solution with calculations such as <<48/2=24>>, and a last line such as #### 1,600",
        gsm8k,
        "hf://openai/gsm8k/main/train",
        "hf://openai/gsm8k/main/test",
    ),
    "openr1-math": Source(
        "prompt, reward_model.ground_truth and target, a list of one message",
        openr1_math,
        "hf://Elliott/Openr1-Math-46k-8192/train",
    ),
}


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_data.py: {error} (--train and --test take files in place of the hub's)")
