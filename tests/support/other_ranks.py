"""Runs on two ranks, on one and on two again, whose responses follow from the prompt alone: nothing is drawn."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from engine_runs import changed, write_start
from safetensors.torch import load_file
from trainer_runs import run_config

from rlplus.common import agree
from rlplus.common.agree import initialize_distributed
from rlplus.train.config import Config, load_config
from rlplus.train.data import Sample
from rlplus.train.rollout import Completion, Request, Sampling
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import open_run, train

STEPS = (2, 4, 6)  # where the number of ranks changes, and the end
LORA = {"rank": 4, "alpha": 8}
SMALL_GROUPS = {"deepspeed": {"zero_optimization": {"sub_group_size": 5000}}}
OF_FILES = {"path": "untied", "scratch": None, "dtype": "float32"}
AVERAGE = {"name": "self-distill", "template": "{prompt}{demonstration}", "teacher": "average"}
TWO_HEADS = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}


def sft(stage: int, dtype: str = "float32", **settings: Any) -> dict[str, dict[str, Any]]:
    return {"algorithm": {"preset": "sft"}, "model": {"dtype": dtype}, "train": {"zero_stage": stage} | settings}


def rl(preset: str, stage: int, recipe: dict[str, Any] | None = None, **sections: Any) -> dict[str, dict[str, Any]]:
    given: dict[str, dict[str, Any]] = {"algorithm": {"preset": preset, "recipe": recipe or {}}} | sections
    return given | {"train": {"zero_stage": stage, "prompts_per_update": 2} | given.get("train", {})}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "ZeRO-1": sft(1),
    "ZeRO-2": sft(2),
    "ZeRO-3": sft(3),
    "ZeRO-1, bfloat16, in turns": sft(1, "bfloat16", deepspeed={"zero_optimization": {"round_robin_gradients": True}}),
    "ZeRO-2, offloaded": sft(2, offload_optimizer="cpu"),
    "ZeRO-3, offloaded, bfloat16": sft(3, "bfloat16", offload_optimizer="cpu", offload_params="cpu"),
    "ZeRO-3, shard_head": sft(3, shard_head=True) | {"model": OF_FILES},
    "LoRA, ZeRO-2": sft(2) | {"model": {"dtype": "float32", "lora": LORA}},
    "LoRA, ZeRO-3": sft(3) | {"model": {"dtype": "bfloat16", "lora": LORA}},
    "LoRA, ZeRO-3, whole in the checkpoint": sft(3) | {"model": OF_FILES | {"path": "unsafe", "lora": LORA}},
    "LoRA, nf4": sft(1) | {"model": {"dtype": "bfloat16", "lora": LORA | {"quantization": "nf4"}}},
    "sequences": sft(2, sequence_parallel=2) | {"model": {"dtype": "float32", "scratch": TWO_HEADS}},
    "waiting": rl("relift", 3, {"batch": 5}, train=SMALL_GROUPS),
    "remembered rollouts": rl("exgrpo", 2, {"start": 0.0, "share": 0.5}),
    "a critic": rl("ppo", 3, {"critic_updates": 2, "lr": 1e-3, "warmup_steps": 0}),
    "a reward model": rl("prime", 2, {"lr": 1e-3}),
    "prefixes": rl("uft", 1, {"steps": 6}),
    "an average": rl("grpo", 3, AVERAGE, model={"dtype": "bfloat16"}),
    "LoRA, an average": rl("grpo", 2, AVERAGE, model={"dtype": "float32", "lora": LORA}),
    "unfinished": rl("rlplus", 2, rollout={"segment": 3}, model={"dtype": "bfloat16"}),
    "batches ahead": rl("rlplus", 2, rollout={"mode": "process"}, train={"overlap": 2}),
}  # fmt: skip


class FixedEngine(TransformersEngine):
    """Its tokens are hashes of what stands before them; members of a group that begin differ in the first one."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[_continued(r.prompt, r.max_tokens, member) for member in range(r.n)] for r in requests]


def _continued(prompt: Sequence[int], most: int, member: int) -> Completion:
    tokens: list[int] = []
    while len(tokens) < most and not (tokens and tokens[-1] % 7 == 0):
        tokens.append((crc32(repr([*prompt, *tokens]).encode()) + (0 if tokens else 50 * member)) % 250)
    return Completion(tokens, [-5.5] * len(tokens), tokens[-1] % 7 != 0)


@contextmanager
def fixed_rollouts() -> Iterator[None]:
    def make(config: Any, *rest: Any, seed: int, **settings: Any) -> FixedEngine:
        return FixedEngine(config, *rest, **settings)

    def score(samples: Sequence[Sample], *_: Any) -> None:
        for sample in samples:
            if not sample.scored:
                sample.reward = float(sample.demonstration or sum(sample.response) % 5 == 0)

    with (
        mock.patch("rlplus.train.trainer.run_parts.make_engine", make),
        mock.patch("rlplus.train.trainer.loop.score", score),
    ):
        yield


def write_cases(folder: Path) -> None:
    """The configuration of each case, of a run with all steps."""
    for place in ("untied", "unsafe"):
        write_start(folder / place, tied=False)
    write_unsafe(folder, load_file(folder / "unsafe/model.safetensors"))
    (folder / "unsafe/model.safetensors").unlink()
    for name, sections in CASES.items():
        given = {key: dict(section) for key, section in sections.items()}
        if given.get("model", {}).get("path"):
            given["model"]["path"] = str(folder / given["model"]["path"])
        given["train"] = {"steps": STEPS[-1], "prompts_per_step": 4} | given["train"]
        if sections["algorithm"]["preset"] != "sft":
            given["rollout"] = {"max_logprob_gap": 100.0} | given.get("rollout", {})
        (folder / f"{name}.yaml").write_text(run_config(folder, name, **given).to_yaml())


def write_unsafe(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Weights in a form of which a run takes no fingerprint, so that its checkpoints have what does not train."""
    torch.save(weights, folder / "unsafe/pytorch_model.bin")


def of_case(folder: Path, name: str, run: str, steps: int = STEPS[-1], parallel: int | None = None) -> Config:
    config = load_config(str(folder / f"{name}.yaml")).model_copy(update={"output_dir": str(folder / name / run)})
    parallel = min(config.train.sequence_parallel, dist.get_world_size()) if parallel is None else parallel
    return changed(config, "train", steps=steps, sequence_parallel=parallel)


def moved(config: Config) -> None:
    """The run's checkpoint by the ranks of now, in place of the one that it resumes from; no step is taken."""
    with open_run(config, resume="newest") as run:
        agree.barrier()
        if run.rank == 0:
            shutil.rmtree(run.folder.checkpoints)
        agree.barrier()
        run.save_checkpoint()


def on_two(folder: Path, name: str, again: bool) -> None:
    """The part of two ranks, at first and after one rank has gone on."""
    if again:
        train(of_case(folder, name, "parts", STEPS[2]), resume="newest")
        moved(of_case(folder, name, "moved", STEPS[1]))
        return
    train(of_case(folder, name, "whole"))
    train(of_case(folder, name, "parts", STEPS[0]))
    if dist.get_rank() == 0:
        for copy in ("first", "moved"):
            shutil.copytree(folder / name / "parts", folder / name / copy)


def on_one(folder: Path, name: str) -> None:
    """The part of one rank between them."""
    train(of_case(folder, name, "alone"))
    if "whole in the checkpoint" in name:  # other ranks take it there, not from the files
        weights = torch.load(folder / "unsafe/pytorch_model.bin")
        write_unsafe(folder, {name: 2 * weight for name, weight in weights.items()})
    train(of_case(folder, name, "parts", STEPS[1]), resume="newest")
    moved(of_case(folder, name, "moved", STEPS[1]))
    shutil.copytree(folder / name / "moved", folder / name / "one")


def main() -> None:
    folder, when, *names = sys.argv[1:]
    torch.set_num_threads(1)
    initialize_distributed()
    with fixed_rollouts():
        for name in names:
            on_two(Path(folder), name, again=when == "again")


if __name__ == "__main__":
    main()
