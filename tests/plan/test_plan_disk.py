"""The plan of the disk against the checkpoints of real runs."""

import pytest
import quick
from plan_cases import CPU, make_plan
from trainer_runs import run_config

from rlplus.train.trainer import train

SCRATCH = {"hidden_size": 64, "layers": 4, "heads": 2, "intermediate_size": 256, "max_position_embeddings": 64}
CASES = {
    "zero-2": {"model": {"dtype": "bfloat16"}},
    "zero-3": {"model": {"dtype": "bfloat16"}, "train": {"zero_stage": 3}},
    "fp32": {"model": {"dtype": "float32"}},
    "adapters": {"model": {"dtype": "bfloat16", "lora": {"rank": 64}}},
    "eight bits": {"model": {"dtype": "bfloat16"}, "train": {"optimizer": "adamw8bit"}},
    "average": {
        "model": {"dtype": "bfloat16"},
        "algorithm": {
            "preset": "grpo",
            "recipe": {"name": "self-distill", "template": "{prompt}{demonstration}", "teacher": "average"},
        },
    },
    "values": {"model": {"dtype": "bfloat16"}, "algorithm": {"preset": "ppo"}},
}


@pytest.mark.parametrize("case", quick.only(["adapters", "zero-3"], CASES))
def test_a_checkpoint_takes_what_is_planned(tmp_path, case):
    """Within 3%, and 300 kB for the random states and the names in each archive; at most as many as planned."""
    sections = {"checkpoint": {"every": 1, "keep": 1}, "validation": {"every": 0}} | CASES[case]
    sections["model"] = sections["model"] | {"scratch": SCRATCH}
    config = run_config(tmp_path, **sections)
    plan = make_plan(config, CPU)
    train(config)
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*")
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    assert 0 <= size - plan.checkpoint <= 0.03 * plan.checkpoint + 300_000, (size, plan.checkpoint)
    assert plan.checkpoints == 2


@pytest.mark.parametrize(("every", "checkpoints"), [(0, 4), (5, 5)])
def test_as_many_checkpoints_as_can_be_there(tmp_path, every, checkpoints):
    """The kept ones and the one being written; and the best one of the validations."""
    validation = {"every": every, "data": {"path": "validation.jsonl", "max_prompt_length": 8}} if every else {}
    config = run_config(tmp_path, checkpoint={"every": 1, "keep": 3}, validation=validation)
    assert make_plan(config, CPU).checkpoints == checkpoints
