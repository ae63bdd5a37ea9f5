"""Teachers of a tiny policy, and the divergence of two models in float64, a sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rlplus.data import Sample, byte_tokenizer


def make_teacher(folder: Path, name: str = "teacher", seed: int = 7, **changes: Any) -> Path:
    """A larger model with random weights and the byte tokenizer, whose distributions are far from uniform."""
    path, tokenizer = folder / name, byte_tokenizer()
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(Qwen2Config(**(values | changes))).save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return path


def log_probabilities(
    lm: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> Tensor:
    """(T, V), of what can stand in the place of each response token."""
    ids = torch.tensor([[*prompt, *response]])
    return (lm(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def sampled(logp: Tensor, sample: Sample) -> Tensor:
    """(T,), of the response's tokens."""
    return logp.gather(1, torch.tensor(sample.response)[:, None]).squeeze(1)


def divergence(logp: Tensor, logq: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """(T,) by the definition; p: the student's, q: the teacher's."""
    p, q = logp.exp(), logq.exp()
    if kind == "reverse_kl":
        return (p * (logp - logq)).sum(-1)
    if kind == "forward_kl":
        return (q * (logq - logp)).sum(-1)
    logm = (beta * q + (1 - beta) * p).log()
    return (beta * q * (logq - logm) + (1 - beta) * p * (logp - logm)).sum(-1)
