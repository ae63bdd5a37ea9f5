"""python -m experiments.real.sft_noise MODEL DATA FOLDER: fine-tuning with the exact and the sampled backward pass.

Two seeds with each, by preset sft on smollm2-135m.yaml; a seed has the same sequences in the same order with both.
MODEL is a folder of transformers' files, DATA one with train.parquet and test.parquet of `examples/prepare_data.py`.
FOLDER gets the runs, and sampled-sft.json with the loss of every step, before its update, and the noise of its
gradient. The same command goes on where it was stopped. About half an hour of one core.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplus.common.durable import write_text
from rlplus.tools.report import load_run

CONFIG = Path(__file__).with_name("smollm2-135m.yaml")
SETTINGS = {
    "algorithm.preset": "sft",
    "train.steps": 16,
    "train.prompts_per_step": 4,
    "train.lr": 2.0e-5,
    "checkpoint.every": 0,
    "log.samples_every": 0,
}
RUNS = [(seed, backward) for seed in (0, 1) for backward in ("exact", "sampled")]
METRICS = {"loss": "actor/loss", "entropy": "actor/entropy", "noise": "actor/backward_noise"}
METRICS |= {"elements": "actor/backward_elements", "flat_rows": "actor/backward_flat_rows"}


def train(folder: Path, overrides: dict[str, Any]) -> None:
    """A run in `folder`, from where it was stopped, unless it is finished."""
    if (folder / "model").is_dir():
        return
    values = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "rlplus", "train", "--resume=auto", str(CONFIG), f"output_dir={folder}", *values]
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def collected(folder: Path) -> Iterator[dict[str, Any]]:
    """A list of values by metric for each run, one value per step; none for what a run does not have."""
    for seed, backward in RUNS:
        data = load_run(folder / f"{backward}-{seed}")
        curves = {name: data.curve(metric)[1] for name, metric in METRICS.items()}
        yield {"seed": seed, "backward": backward} | {name: list(values) for name, values in curves.items() if values}


def main() -> None:
    """Make the runs that are missing, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m experiments.real.sft_noise", description=__doc__)
    for name in ("model", "data", "folder"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration, for all runs")
    options = parser.parse_args()
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in options.overrides)}
    files = {
        "data.path": str(options.data / "train.parquet"),
        "evaluation.data.path": str(options.data / "test.parquet"),
    }
    for seed, backward in RUNS:
        own = {"model.path": str(options.model), "train.seed": seed, "train.backward": backward}
        train(options.folder / f"{backward}-{seed}", SETTINGS | files | own | given)
    start = load_run(options.folder / "exact-0").starts[-1]
    found = {"model": options.model.name, "settings": SETTINGS | given, "runs": list(collected(options.folder))}
    found |= {"versions": start["versions"], "commits": start["commits"]}
    write_text(options.folder / "sampled-sft.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
