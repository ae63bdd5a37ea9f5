"""A small comparison for tests, and its file."""

from pathlib import Path

import yaml

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
