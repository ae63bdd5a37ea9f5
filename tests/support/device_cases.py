"""Runs on a device: every preset, and settings with code of their own; simulated_runs.py, test_runs_on_a_gpu.py."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_runs import same
from trainer_runs import run_config

from rlplus.tools.verify import verify_run
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.data import Sample
from rlplus.train.trainer import train

SHOWN = "{prompt}{demonstration}"
AVERAGE = {"name": "self-distill", "teacher": "average", "template": SHOWN}
Sections = dict[str, dict[str, Any]]
SETTINGS: dict[str, Sections] = {
    "kernels": {"train": {"backend": "triton"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}, "train": {"backend": "triton"}},
    "eager": {"model": {"attention": "eager"}},
    "lora": {"model": {"lora": {"rank": 4}}},
    "lora, shared": {"model": {"lora": {"rank": 4}}, "rollout": {"share_weights": True}},
    "segments": {"rollout": {"segment": 4}},
    "kept sets": {"rollout": {"top_p": 0.9, "top_k": 20}},
    "fp32 head": {"rollout": {"head_dtype": "float32"}, "model": {"dtype": "bfloat16"}},
    "no checkpointing": {"model": {"gradient_checkpointing": False}, "train": {"max_scratch_mb": 1}},
    "mismatch": {"algorithm": {"preset": "grpo", "objective": {"mismatch_cap": 2.0}, "skip_grad_norm": 1e-6}},
    "top entropy": {"algorithm": {"preset": "rlplus", "top_entropy": 0.5, "objective": {"entropy_coef": 0.01}}},
    "reference": {"algorithm": {"preset": "rlplus", "objective": {"kl_coef": 0.1}}},
    "deterministic": {"train": {"deterministic": True}},
    "zero 3": {"train": {"zero_stage": 3}},
    "routing": {"model": {"path": "MIXTURE", "scratch": None}, "rollout": {"routing_replay": True}},
    "average": {"algorithm": {"preset": "grpo", "recipe": AVERAGE | {"loss": "sampled"}}},
    "lora, average": {"algorithm": {"preset": "grpo", "recipe": AVERAGE}, "model": {"lora": {"rank": 4}}},
    "validation": {
        "validation": {"every": 1, "samples": 3, "k": [1, 2], "data": {"path": "TASK", "max_prompt_length": 8}}
    },
}
OPTIONAL: dict[str, Sections] = {"eight bits": {"train": {"optimizer": "adamw8bit"}}}  # needs bitsandbytes
SHORT: dict[str, Sections] = {  # presets that do not fit into the tiny task as they are
    name: {"algorithm": {"preset": name}, "rollout": {"max_response_length": 12}} for name in ("prefix-rft", "bread")
} | {
    name: {"algorithm": {"preset": name, "recipe": ALGORITHMS[name].recipe.model_dump() | {"template": SHOWN}}}
    for name in ("opsd", "sdft", "sdpo")
}


def sections(name: str, teacher: Path) -> Sections:
    if name in SETTINGS | OPTIONAL:
        text = json.dumps((SETTINGS | OPTIONAL)[name])
        for what, path in {"MIXTURE": teacher.parent / "mixture", "TASK": teacher.parent / "task.jsonl"}.items():
            text = text.replace(what, str(path))
        found: Sections = json.loads(text)
        return found
    algorithm: dict[str, Any] = {"preset": name}
    if ALGORITHMS[name].recipe.name == "distill":
        algorithm["recipe"] = ALGORITHMS[name].recipe.model_dump() | {"teacher": str(teacher)}
    return SHORT.get(name, {"algorithm": algorithm})


def check(folder: Path, changes: Sections, **train_options: Any) -> None:
    """Two steps; the third in float64, where the loss is an objective's; the second again, with the same bits.

    train_options: of the section train, where the changes do not say.
    """
    config = run_config(folder, **(changes | {"checkpoint": {"every": 1}}))
    update = {"prompts_per_update": 2} | train_options | changes.get("train", {})
    config = config.model_copy(update={"train": config.train.model_copy(update=update)})
    whole = train(config)
    recipe = config.algorithm.resolve().recipe
    verified = not (recipe.own_loss or recipe.weighs_tokens or config.rollout.routing_replay)
    if verified and (wrong := verify_run(whole).wrong):
        raise AssertionError(f"{wrong[0]}")
    again = shutil.copytree(whole, folder / "again")
    shutil.rmtree(again / "model")
    train(config.model_copy(update={"output_dir": str(again)}), resume="step-000001")
    if not same(whole, again):
        raise AssertionError("a resumed run has other weights")


def draw_rewards(samples: Sequence[Sample], *_: Any) -> None:
    """As in recipe_cases.py, but often enough that the step which is verified has an update."""
    for sample in samples:
        sample.reward = float(sample.demonstration or sum(sample.response) % 3 == 0)
