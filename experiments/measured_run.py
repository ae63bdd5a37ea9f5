"""python -m experiments.measured_run FILE: a short training run on one GPU beside its plan, and resumed.

The model has the sizes of Qwen2.5-0.5B (--model) and random weights, the rollouts are transformers'. FILE gets the
plan, the run's peak memory and the metrics of its steps. Then the run is resumed from its checkpoint after two of three
steps, and the weights are compared. --tiny: small numbers, also without a GPU.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from math import nan
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rlplus.bench.__main__ import say
from rlplus.bench.machine import package_root, revision
from rlplus.common.durable import write_text
from rlplus.loss.guard.verdicts import versions
from rlplus.tools.cli import main as train
from rlplus.tools.plan import MOMENTS, Plan, make_plan, this_cluster
from rlplus.train.config import load_config
from rlplus.train.data import byte_tokenizer

STEPS = 3
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 192, "vocab_size": 300, "layer_types": None}  # fmt: skip


def make_model(folder: Path, name: str, tiny: bool) -> None:
    """A model of random weights with a byte-level tokenizer, in the sizes of a shipped configuration."""
    shipped = package_root() / "configs" / "models" / f"{name.replace('/', '--')}.json"
    if not shipped.is_file():
        known = ", ".join(sorted(path.stem.replace("--", "/", 1) for path in shipped.parent.glob("*.json")))
        raise SystemExit(f"want --model among {known}; got {name}")
    fields = json.loads(shipped.read_text()) | (TINY if tiny else {})
    tokenizer = byte_tokenizer()
    fields |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    kind = fields.pop("model_type")
    fields = {name: value for name, value in fields.items() if value is not None}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.bfloat16)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_data(file: Path, rows: int, length: int) -> None:
    """Sums with demonstrations of `length` bytes: additions of small numbers, one a line."""
    lines = []
    for i in range(rows):
        steps, text = (f"{k} + {k + i} = {2 * k + i}\n" for k in range(length)), ""
        while len(text) < length:
            text += next(steps)
        row = {"prompt": f"{i} + {2 * i} = ", "answer": str(3 * i), "demonstration": f"{text}\\boxed{{{3 * i}}}"}
        lines.append(json.dumps(row) + "\n")
    write_text(file, "".join(lines))


def write_settings(folder: Path, tiny: bool) -> Path:
    """The run's configuration and data, as files."""
    prompts, response, demonstration, micro = (4, 16, 64, 256) if tiny else (16, 256, 3500, 16_384)
    make_data(folder / "data.jsonl", 4 * prompts, demonstration)
    lengths = {"max_prompt_length": 32, "max_demonstration_length": demonstration + 64}
    cache = {"kv_cache_memory_mb": 100 if tiny else 8000}
    file = folder / "run.yaml"
    sections = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "gradient_checkpointing": not tiny},
        "data": {"path": str(folder / "data.jsonl"), "demonstration": "demonstration", **lengths},
        "reward": {"kind": "math_verify"},
        "rollout": {"engine": "transformers", "group_size": 8, "max_response_length": response, **cache},
        "algorithm": {"preset": "rlplus"},
        "train": {
            "steps": STEPS,
            "prompts_per_step": prompts,
            "tokens_per_micro_batch": micro,
            "lr": 1e-5,
            "deterministic": True,
        },
        "checkpoint": {"every": 2},
    }
    write_text(file, yaml.safe_dump(sections))
    return file


def run(file: Path, *options: str) -> dict[str, Any]:
    """Train in a process of its own. -> the seconds that it took, and its peak memory in bytes."""
    began = time.monotonic()
    command = [sys.executable, "-m", "experiments.measured_run", "--run", str(file), *options]
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"the run ended with status {status}")
    memory: dict[str, Any] = json.loads(file.with_name("memory.json").read_text())
    return {"seconds": time.monotonic() - began} | memory


def run_here(file: str, *options: str) -> None:
    """Train, and write this process's peak memory beside the configuration."""
    if status := train(["train", file, *options]):
        sys.exit(status)
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()  # the context's, the libraries'
        peak |= {"allocated": torch.cuda.max_memory_allocated(), "used": others + torch.cuda.max_memory_reserved()}
    write_text(Path(file).with_name("memory.json"), json.dumps(peak))


def same_weights(first: Path, second: Path) -> bool:
    """Whether the exported models have the same bits."""
    files = [sorted((folder / "model").glob("*.safetensors")) for folder in (first, second)]
    if not files[0]:
        raise ValueError(f"want a model's safetensors in {first / 'model'}; got none")
    return all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def table(plan: Plan, memory: dict[str, Any], step: dict[str, float]) -> str:
    """The plan beside the run, in lines."""
    lines = [f"{'':24}{'plan':>8}{'run':>8}"]
    if "allocated" in memory:
        parts = plan.memory.parts[max(MOMENTS, key=plan.memory.total)]
        tensors = sum(size for name, size in parts.items() if name not in ("reserve", "engine rest"))
        lines.append(f"{'tensors at most, GB':24}{tensors / 1e9:8.2f}{memory['allocated'] / 1e9:8.2f}")
        lines.append(f"{'GPU in use, GB':24}{plan.memory.peak / 1e9:8.2f}{memory['used'] / 1e9:8.2f}")
    for phase in ("generate", "forward and backward", "optimizer"):
        measured = step[f"time/{phase.replace(' and ', '_')}"]
        lines.append(f"{phase + ', s':24}{plan.seconds.get(phase, nan):8.3f}{measured:8.3f}")
    return "\n".join(lines)


def measure(folder: Path, model: str, tiny: bool, file: Path) -> None:
    make_model(folder / "model", model, tiny)
    settings = write_settings(folder, tiny)
    config = load_config(settings)
    plan = make_plan(config, this_cluster(config))
    memory = run(settings)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"revision": revision(), "versions": versions(), "model": model}
    found |= {"settings": settings.read_text().replace(str(folder), "FOLDER")}
    found |= {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    found |= {"plan": plan.to_json(), "memory": memory, "steps": steps}
    write_text(file, json.dumps(found, indent=1) + "\n")
    say(table(plan, memory, steps[-1]))
    again = shutil.copytree(folder / "run", folder / "again")
    shutil.rmtree(again / "model")
    run(settings, f"output_dir={again}", f"--resume=step-{STEPS - 1:06}")  # and do the last step once more
    found["resumed_same_bits"] = same_weights(folder / "run", folder / "again")
    write_text(file, json.dumps(found, indent=1) + "\n")
    say(f"resumed after {STEPS - 1} of {STEPS} steps: {'the same' if found['resumed_same_bits'] else 'other'} bits")


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_here(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m experiments.measured_run", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="of the results, JSON")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="sizes; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a model of a few numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.model, options.tiny, options.file)


if __name__ == "__main__":
    main()
