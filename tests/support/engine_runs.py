"""Helpers for tests of runs whose engine breaks or runs ahead."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import by_torchrun
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus.train.config import Config
from rlplus.train.data import Example, Sample, byte_tokenizer
from rlplus.train.recipe import Ask
from rlplus.train.rollout import Respond, RolloutEngine
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.rollout.vllm_engine import VLLMEngine
from rlplus.train.trainer.engine import PROBE_TOKENS
from rlplus.train.trainer.rollouts import Going, begin, generate, room


def write_start(folder: Path, *, tied: bool) -> Path:
    """A model to start from, with a tied head or not, and the byte tokenizer; vLLM can run it on the CPU."""
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        shape = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.12,
            tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )  # fmt: skip
        Qwen2ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def same(first: Path, second: Path) -> bool:
    one, other = model(first), model(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def whole_groups(
    engine: RolloutEngine,
    examples: Sequence[Example],
    asks: Sequence[Ask],
    config: Config,
    respond: Respond,
    seed: int,
) -> list[Sample]:
    """Every group's members, without segments."""
    going = [Going(examples[s.group], s, room(s, config)) for s in begin(examples, asks)]
    return generate(engine, going, config, respond, seed, version=0)


def engine_in_this_process(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have runs make the process's engine here: only where it runs differs, and starting it takes seconds.

    -> settings of the engine that differ from the run's, to be filled in.
    """
    changes: dict[str, Any] = {}

    def make(config: Any, *rest: Any, **settings: Any) -> TransformersEngine:
        settings.pop("seed")
        return TransformersEngine(config, *rest, **settings | changes)

    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_engine", make)
    return changes


def leave_out(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Have the transformers engine give None for a field of its completions."""
    generate = TransformersEngine.generate

    def without(engine: Any, *args: Any) -> Any:
        groups = generate(engine, *args)
        for completion in (c for group in groups for c in group):
            object.__setattr__(completion, field, None)
        return groups

    monkeypatch.setattr(TransformersEngine, "generate", without)


def in_the_middle_of_vllms(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> list[int]:
    """Call the function in the third step of vLLM's second batch; returns a number for each batch."""
    original, calls = VLLMEngine._run, []

    def run(engine: Any, requests: Any) -> Any:
        if requests[0][1].max_tokens != PROBE_TOKENS:
            calls.append(1)
            if len(calls) == 2:
                step, steps = engine._llm.llm_engine.step, []

                def third(*args: Any, **options: Any) -> Any:
                    steps.append(1)
                    if len(steps) == 3:
                        action()
                    return step(*args, **options)

                engine._llm.llm_engine.step = third
        return original(engine, requests)

    patch.setattr(VLLMEngine, "_run", run)
    return calls


def fail(monkeypatch: pytest.MonkeyPatch, *calls: int) -> list[int]:
    """The engine breaks in these calls of generate that ask for a batch, half-way and for good; returns the calls."""
    original, count = TransformersEngine._generate_batch, [0]

    def breaking(engine: Any, batch: Any, sampling: Any) -> Any:
        if batch[0].max_tokens != PROBE_TOKENS:
            count[0] += 1
            if count[0] in calls:
                engine._model = None
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return original(engine, batch, sampling)

    monkeypatch.setattr(TransformersEngine, "_generate_batch", breaking)
    return count


@contextmanager
def launched(config: Config, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`rlplus train` on two ranks, with pipes."""
    path = Path(f"{config.output_dir}.yaml")
    path.write_text(config.to_yaml())
    command = by_torchrun("-m", "rlplus", "train", path, *options)
    with processes.started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def torchrun(config: Config, *options: str) -> None:
    with launched(config, *options) as process:
        _, error = process.communicate(timeout=processes.PATIENCE_S)
    assert process.returncode == 0, error[-4000:]
