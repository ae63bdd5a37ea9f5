"""A tiny task and the configuration of runs on it, for the tests of trainer, checkpoint and command line."""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import processes

from rlplus.train.config import Config


def write_task(folder: Path, n: int = 6) -> Path:
    """`n` prompts like "3+4=", answers and demonstrations, as JSONL."""
    path = folder / "task.jsonl"
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3), "demonstration": f"<{i + i % 3}>"} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_config(folder: Path, output: str = "run", **sections: dict[str, Any]) -> Config:
    """A run of a random one-layer model; `sections` change what stands here."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "scratch": {
                "hidden_size": 32,
                "layers": 1,
                "heads": 1,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
            },
            "dtype": "float32",
        },
        "data": {"path": str(write_task(folder)), "demonstration": "demonstration", "max_prompt_length": 8},
        "reward": {"kind": "exact_match", "pattern": "<([^>]*)>", "workers": 1},
        "rollout": {"engine": "transformers", "group_size": 4, "max_response_length": 8},
        "algorithm": {"preset": "rlplus"},
        "train": {"steps": 2, "prompts_per_step": 4, "tokens_per_micro_batch": 64, "lr": 1e-3},
        "checkpoint": {"every": 0},
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return Config.model_validate({"output_dir": str(folder / output)} | values)


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint's state, with its CRC-32, as if it had been written so."""
    text = json.dumps(state)
    (checkpoint / "state.json").write_text(text)
    (checkpoint / "state.crc32").write_text(f"{zlib.crc32(text.encode()):08x}")


def environment() -> dict[str, str]:
    """For a run in a process of its own: on the CPU, and no rank of a group that this process is in."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in launcher}
    return clean | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}


def by_torchrun(*command: object, ranks: int = 2) -> list[str]:
    """The command line. `command` begins with a script, with -m or with an option of torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launch, *map(str, command)]


def on_ranks(*command: object, ranks: int = 2, **variables: str) -> str:
    """Run it; -> the output of all ranks. AssertionError, with what they said, if one fails."""
    done = processes.run(by_torchrun(*command, ranks=ranks), env=environment() | variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def metrics(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what differs between two identical runs: the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]
