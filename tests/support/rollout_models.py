"""Tiny models and engines on them, for the tests of rollouts."""

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import Completion, Request, RolloutEngine, make_engine
from rlplus.train.rollout.process_engine import ProcessEngine

EOS, PAD, VOCABULARY, MAX_MODEL_LEN = 1, 0, 48, 320
PROMPTS = [[5, 9, 12], [7], [5, 9, 12, 30, 31, 22, 8, 2, 40]]

# Values in a server's answer in the place of a token of 48, and of a logprob.
ODD_TOKENS: list[object] = [-1, 48, 2**70, 5.5, 5.0, "5", True, None]
ODD_LOGPROBS: list[object] = [3.0, -1e300, -(10**400), math.nan, -math.inf, math.inf, 10**400, True, "-1.0"]


def tiny_model(tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """A model of two layers, far from uniform; vLLM's attention on the CPU needs heads of width 32."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=tied,
            initializer_range=0.12 if tied else 0.2,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        return Qwen2ForCausalLM(config).float().eval()


def save(model: Qwen2ForCausalLM, path: Path) -> None:
    model.save_pretrained(path)
    # The defaults of published models, exaggerated: none of them may change the sampling.
    GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.2, repetition_penalty=5.0, eos_token_id=[EOS, 20]
    ).save_pretrained(path)


def start(kind: str, path: Path, **options: object) -> RolloutEngine:
    config = RolloutConfig(
        engine=kind,  # type: ignore[arg-type]
        max_response_length=16,
        kv_cache_memory_mb=options.pop("cache_mb", 16),  # type: ignore[arg-type]
        tensor_parallel_size=options.pop("tensor_parallel_size", 1),  # type: ignore[arg-type]
    )
    return make_engine(
        config,
        str(path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        end_ids=[EOS],
        pad_token_id=PAD,
        seed=0,
        **options,  # type: ignore[arg-type]
    )


def requests(prompts: Sequence[Sequence[int]], n: Sequence[int], max_tokens: int) -> list[Request]:
    return [Request(prompt, count, max_tokens) for prompt, count in zip(prompts, n, strict=True)]


def logprobs(model: Qwen2ForCausalLM, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """(len(response), V): the distributions that the tokens of response were drawn from, one sequence on its own."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)


def gap(model: Qwen2ForCausalLM, groups: list[list[Completion]], prompts: Sequence[Sequence[int]], t: float) -> float:
    """The largest difference between an engine's logprob and the model's."""
    gaps = [
        logprobs(model, prompt, c.tokens, t).gather(1, torch.tensor(c.tokens)[:, None])[:, 0] - torch.tensor(c.logprob)
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    return max(float(difference.abs().max()) for difference in gaps)


def global_state() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_default_dtype(),
        os.sched_getaffinity(0),
        os.environ.get("LD_PRELOAD"),
        os.environ.get("LOCAL_WORLD_SIZE"),
    ]


def start_process(kind: str, path: Path, **changes: object) -> ProcessEngine:
    config = RolloutConfig(
        engine=kind,  # type: ignore[arg-type]
        mode="process",
        max_response_length=16,
        kv_cache_memory_mb=16,
        **changes,  # type: ignore[arg-type]
    )
    engine = make_engine(
        config,
        str(path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        end_ids=[EOS],
        pad_token_id=PAD,
        seed=0,
    )
    assert isinstance(engine, ProcessEngine)
    return engine
