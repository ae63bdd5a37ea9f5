"""A small comparison for tests, and its file."""

import sys
from pathlib import Path

import yaml

from rlplus.tools.compare.comparing import MARK
from rlplus.tools.compare.config import load_comparison
from rlplus.tools.compare.launches import Runner

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
QUICK = {"base": {"batch": 1, "learnt_loss": 100.0, "sloppy_steps": 1}}  # any loss will do
FILE = {
    "run": str(EXPERIMENTS / "demo.yaml"),
    "overrides": {"rollout.engine": "transformers", "evaluation.data.benchmark": "set"},
    "settings": {"one": {"prepare": "experiments.toy:prepare", "options": QUICK}},
    "methods": {
        "SFT": {"preset": "sft", "overrides": {"train.generated_tokens": None, "train.steps": 30}},
        "GRPO": {"preset": "grpo-official"},
        "SFT+GRPO": {"preset": "grpo-official", "after": "SFT"},
        "GRPO long": {"preset": "grpo-official", "searched_as": "GRPO", "overrides": {"train.generated_tokens": 900}},
    },
    "studies": {"Methods": {"settings": ["one"], "methods": ["SFT", "GRPO", "SFT+GRPO", "GRPO long"], "seeds": 2}},
    "search": {"rates": [1e-3, 3e-3, 1e-2]},
}


def written(folder: Path, data: object) -> Path:
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


# A stand-in for `python -m rlplus`: writes what a run writes. A model's quality is in a file, and rises by the learning
# rate, up to 3e-3; every call adds a line to calls.txt.
COMMAND = """
import json, sys
from pathlib import Path

_, _, command, *arguments = sys.argv
with open(Path(__file__).parent / "calls.txt", "a") as calls:
    calls.write(command + "\\n")
values = dict(argument.split("=", 1) for argument in arguments if "=" in argument and argument[0] != "-")
values = {key: json.loads(value) for key, value in values.items()}
rate, first = values.get("train.lr"), 0
if rate == 0.666:
    sys.exit("no such luck")
if command == "train":
    folder, start = Path(values["output_dir"]), Path(values.get("model.path", "")) / "quality"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    before = int(start.read_text()) if start.exists() else 0
    (folder / "model/quality").write_text(str(before + (8 if rate == 3e-3 else 4)))
    (folder / "config.yaml").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 7, "generated_tokens": 70, "reward/internal": 0.5}\\n')
else:
    options = dict(zip(arguments[::2], arguments[1::2]))
    with open(Path(__file__).parent / "models.txt", "a") as models:
        models.write(options["--model"] + "\\n")
    quality, output = Path(options["--model"]) / "quality", Path(options["--output"])
    right = int(quality.read_text()) if quality.exists() else 1
    for name in ("trained", "lengths"):
        result = dict(name=name, problems=list(range(first, first + 4)), n=[32] * 4, k=[1, 32], temperature=1.0, seed=0)
        result |= dict(correct=[right + i for i in range(4)], statuses={"ok": 128})
        result |= dict(mean_response_length=5.0, truncated_share=0.0, mean_reward=None)
        (output / f"evaluation-{name}.json").write_text(json.dumps(result))
        first += 4
"""


def launcher_in(folder: Path) -> str:
    """The stand-in, as a launcher."""
    script = folder / "command.py"
    script.write_text(COMMAND)
    return f"{sys.executable} {script}"


def calls(folder: Path) -> list[str]:
    """The commands that the stand-in has run."""
    return (folder / "calls.txt").read_text().split()


def prepared(folder: Path) -> Path:
    """The folder of the comparison, with its base models and data."""
    output = folder / "out"
    runner = Runner(load_comparison(written(folder, FILE)), EXPERIMENTS / "demo.yaml", output)
    for seed in (0, 1, 1000):
        preparation = runner.preparation("one", seed)
        assert preparation is not None
        preparation.make()
    (output / MARK).touch()
    return output
