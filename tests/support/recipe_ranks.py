"""Runs of recipes on one or several ranks, with responses that depend on the prompt alone: for `test_recipe_ranks.py`.

    torchrun --nproc_per_node 2 tests/support/recipe_ranks.py FOLDER OUTPUT

Each case's run goes to FOLDER/OUTPUT-<case>.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from recipe_cases import draw_rewards
from teachers import make_teacher
from trainer_runs import run_config

from rlplus.train.rollout import Completion, Request, Sampling
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import train
from rlplus.train.trainer.engine import SyncedEngine

CASES: dict[str, dict[str, Any]] = {
    "relift": {"preset": "relift", "recipe": {"batch": 5}},
    "hpt": {"preset": "hpt"},
    "uft": {"preset": "uft", "recipe": {"steps": 4}},
    "prefix-rft": {"preset": "prefix-rft", "recipe": {"steps": 4}},
    "bread": {"preset": "bread", "objective": {"kl_coef": 0.0}},
    "srft": {"preset": "srft"},
    "exgrpo": {"preset": "exgrpo", "recipe": {"start": 0.0}},
    "prime": {"preset": "prime", "recipe": {"update": "before", "lr": 1e-3}},
    "distill": {"preset": "grpo", "recipe": {"name": "distill", "loss": "jsd"}},
    "sampled": {"preset": "grpo", "recipe": {"name": "distill", "loss": "sampled"}},
    "self": {"preset": "grpo", "recipe": {"name": "self-distill", "template": "{prompt}{demonstration}"}},
    "sdpo": {"preset": "sdpo", "recipe": {"template": "{prompt}{demonstration}", "shown_reward": 0.0}},
}


def responses(engine: Any, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
    """Replaces an engine's responses: the same for a prompt on every rank, with logprobs of no model."""
    groups = []
    for request in requests:
        random = Random(str(list(request.prompt)))
        texts = [
            [random.randrange(200) for _ in range(random.randint(1, request.max_tokens))] for _ in range(request.n)
        ]
        groups.append([Completion(tokens, [-random.uniform(3, 7) for _ in tokens], False) for tokens in texts])
    return groups


def train_all(folder: Path, output: str) -> None:
    changes = {"steps": 6, "prompts_per_update": 2, "lr": 1e-4}
    # Made before the first run: in a process group transformers writes the files of its first rank only.
    teacher = make_teacher(folder, f"teacher-{output}-{os.environ.get('RANK')}")
    with (
        mock.patch.object(TransformersEngine, "generate", responses),
        mock.patch.object(SyncedEngine, "_probe", return_value=(torch.zeros(1), [])),
        mock.patch("rlplus.train.trainer.loop.score", draw_rewards),
    ):
        for name, algorithm in CASES.items():
            if algorithm.get("recipe", {}).get("name") == "distill":
                algorithm = algorithm | {"recipe": algorithm["recipe"] | {"teacher": str(teacher)}}
            rollout = {"engine": "transformers", "group_size": 4, "max_response_length": 8, "max_logprob_gap": 100.0}
            train(run_config(folder, f"{output}-{name}", algorithm=algorithm, train=changes, rollout=rollout))


if __name__ == "__main__":
    train_all(Path(sys.argv[1]), sys.argv[2])
