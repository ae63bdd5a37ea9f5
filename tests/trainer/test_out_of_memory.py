"""Out of GPU memory, in every phase: one message that says what would help, and a step that can be done again."""

import re
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from engine_runs import changed, same
from trainer_runs import metrics, run_config

from rlplus.tools.cli import main
from rlplus.tools.plan import make_cluster, make_plan, show_bytes
from rlplus.tools.plan.advice import PHASES, advise
from rlplus.train.config import Config
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.learner.policy import Policy
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import OutOfMemory, train

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."
PLACES: dict[str, tuple[Any, str]] = {
    "sync": (TransformersEngine, "push_weights"),
    "generate": (TransformersEngine, "_generate_batch"),
    "old_logprob": (Policy, "logprob"),
    "forward_backward": (PackedModel, "forward"),
    "optimizer": (Policy, "step"),
}


def run_out(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Run out of memory in that phase of step 3."""
    push = TransformersEngine.push_weights
    owner, name = PLACES[phase]
    original = getattr(owner, name)
    reached: list[bool] = []

    def note_step(engine: Any, weights: Any, version: int) -> None:
        reached[:] = [True] * (version == 2)
        push(engine, weights, version)

    def short_of_memory(this: Any, *args: Any, **options: Any) -> Any:
        if phase == "sync":
            reached[:] = [True] * (args[1] == 2)
        if reached and (phase != "forward_backward" or torch.is_grad_enabled()):
            reached.clear()
            raise torch.OutOfMemoryError(f"{TEXT}\nException raised from malloc at CUDACachingAllocator.cpp")
        return original(this, *args, **options)

    monkeypatch.setattr(TransformersEngine, "push_weights", note_step)
    monkeypatch.setattr(owner, name, short_of_memory)


def options(zero_stage: int) -> dict[str, Any]:
    return {"steps": 4, "prompts_per_update": 2, "zero_stage": zero_stage}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A run's folder by ZeRO stage."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {stage: train(run_config(folder, str(stage), train=options(stage))) for stage in (1, 3)}


@pytest.mark.parametrize(
    ("phase", "zero_stage"),
    quick.only(
        (("old_logprob", 1), ("forward_backward", 3)),
        [*((phase, 1) for phase in PLACES), ("old_logprob", 3), ("forward_backward", 3)],
    ),
)
def test_one_message_and_the_step_can_be_done_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    undisturbed: dict[int, Path],
    phase: str,
    zero_stage: int,
) -> None:
    whole = undisturbed[zero_stage]
    every = {"every": 1 if phase == "optimizer" else 0}  # its step cannot be given up
    config = run_config(tmp_path, "short", train=options(zero_stage), checkpoint=every)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    with monkeypatch.context() as patch:
        run_out(patch, phase)
        capsys.readouterr()
        assert main(["train", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    newest = Path(config.output_dir) / "checkpoints/step-000002"
    assert message.startswith("rlplus train: ")
    assert TEXT in message
    assert phase == "generate" or f"out of memory in {phase}: {TEXT} The newest" in message
    assert f" The newest checkpoint is {newest}. The plan expected " in message
    assert "CUDACachingAllocator" not in message or phase == "generate"
    assert " It takes less with --resume and " in message or phase not in ("old_logprob", "forward_backward")
    assert same(whole, train(config, resume="newest"))
    assert metrics(whole) == metrics(Path(config.output_dir))


def test_no_memory_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(TEXT)

    monkeypatch.setattr("rlplus.train.learner.policy.deepspeed.initialize", full)
    (tmp_path / "run.yaml").write_text(run_config(tmp_path).to_yaml())
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"rlplus train: out of memory in start: {TEXT} There is no checkpoint yet. The plan expected " in message


def test_no_memory_for_a_checkpoint_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(tmp_path, train={"steps": 1})
    train(config)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(TEXT)

    monkeypatch.setattr("deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint", full)
    with pytest.raises(OutOfMemory, match=r"^out of memory in start: CUDA out of memory"):
        train(changed(config, "train", steps=2), resume="newest")


def test_what_the_advice_says_a_switch_saves_is_what_the_plan_says(tmp_path: Path) -> None:
    """And what it says of --resume."""
    config = run_config(tmp_path, model={"dtype": "bfloat16"}, train={"tokens_per_micro_batch": 4096})
    cluster = make_cluster(4, "a100-40g")
    for phase, moments in PHASES.items():
        text = advise(config, cluster, phase)
        now = make_plan(config, cluster).memory
        fullest = max(map(now.total, moments))
        assert text.startswith(f"The plan expected {show_bytes(fullest)} of 40.0 GiB there (")
        for part in text.split(" It takes less ")[1:]:
            for switch, saved in re.findall(r"((?:[\w.]+=\S+ )+)\(-([\d.]+ [GM]iB)\)", part):
                overrides = switch.split()
                values = config.model_dump()
                for override in overrides:
                    key, value = override.split("=")
                    section, name = key.split(".")
                    values[section][name] = type(values[section][name] or 0)(value) if value != "true" else True
                memory = make_plan(Config.model_validate(values), cluster).memory
                less = fullest - max(map(memory.total, moments))
                assert less > 0
                assert saved == show_bytes(less)
                assert part.startswith("with --resume") == ({o.split("=")[0] for o in overrides} <= RESUMABLE)


RESUMABLE = {"train.max_scratch_mb", "train.tokens_per_micro_batch", "model.gradient_checkpointing"}
RESUMABLE |= {"rollout.sleep", "rollout.gpu_memory_utilization", "rollout.kv_cache_memory_mb", "rollout.share_weights"}


def test_a_resume_may_take_less_memory(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 1})
    train(config)
    less = changed(config, "train", steps=2, max_scratch_mb=1, tokens_per_micro_batch=32)
    folder = train(changed(less, "model", gradient_checkpointing=True), resume="newest")
    assert [row["step"] for row in metrics(folder)] == [1, 2]
