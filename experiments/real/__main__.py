"""python -m experiments.real PLAN FOLDER [key=value ...]: methods on GSM8K with a pretrained model, up to a figure.

PLAN is `cpu` (two cores, some hours) or `gpu` (one GPU), the comparison of that name in this folder. FOLDER gets the
data, what `rlplus compare` writes and the figure; the same command goes on where it was stopped. Without a network
--model is a folder, and --train and --test are GSM8K's files. key=value: of the training configuration.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from rlplus.common.durable import write_text
from rlplus.tools.compare.outcomes import Results

from .compared_figure import draw

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def prepare(folder: Path, train: str | None, test: str | None) -> None:
    """Write GSM8K as the configurations read it, unless it is there."""
    if (folder / "test.parquet").is_file():
        return
    given = [f"--{name}={file}" for name, file in (("train", train), ("test", test)) if file is not None]
    command = [sys.executable, str(ROOT / "examples/prepare_data.py"), "gsm8k", "--output", str(folder), *given]
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def write_plan(name: str, folder: Path, model: str | None) -> Path:
    """The comparison in `folder`, on its data, and on `model` if one is given. -> its file."""
    comparison = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    run: dict[str, Any] = yaml.safe_load((HERE / comparison["run"]).read_text())
    if model is not None:
        run["model"]["path"] = model
    for data in (run["data"], *(run[section]["data"] for section in ("validation", "evaluation") if section in run)):
        data["path"] = str(folder / "gsm8k" / Path(data["path"]).name)
    write_text(folder / "run.yaml", yaml.safe_dump(run, sort_keys=False))
    file = folder / f"{name}.yaml"
    write_text(file, yaml.safe_dump(comparison | {"run": "run.yaml"}, sort_keys=False, allow_unicode=True))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.real", description=__doc__)
    parser.add_argument("plan", choices=["cpu", "gpu"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", help="folder or name on the hub; default: the plan's")
    parser.add_argument("--train", metavar="FILE", help="GSM8K's train.jsonl; default: from the hub")
    parser.add_argument("--test", metavar="FILE", help="GSM8K's test.jsonl; default: from the hub")
    parser.add_argument("--presets", help="some of the plan's methods, names with commas")
    parser.add_argument("--seeds", type=int)
    options = parser.parse_intermixed_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder / "gsm8k", options.train, options.test)
    file = write_plan(options.plan, folder, options.model)
    some = [f"--{name}={value}" for name in ("presets", "seeds") if (value := getattr(options, name)) is not None]
    output = folder / "comparison"
    command = [sys.executable, "-m", "rlplus", "compare", str(file), "--output", str(output), *some, *options.overrides]
    if status := subprocess.run(command).returncode:
        sys.exit(status)
    draw(Results.load(output / "results.json"), folder / "figure.svg")


if __name__ == "__main__":
    main()
