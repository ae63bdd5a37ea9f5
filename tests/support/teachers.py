"""Teachers of a tiny policy, and the divergence of two models in float64, a sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from trainer_runs import run_config
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from update_cases import batch_of_samples

from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample, byte_tokenizer
from rlplus.train.recipe import Batch, Update, demonstration
from rlplus.train.trainer import Run

K = 5  # likeliest tokens of a teacher


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


def taught(folder: Path, output: str = "run", loss: str = "reverse_kl", **sections: Any) -> Config:
    """A run on demonstrations; without a teacher in `recipe`, by the column `teacher_topk` of taught.jsonl."""
    recipe = {"name": "distill", "loss": loss} | sections.pop("recipe", {"teacher_topk": K})
    if not {"teacher", "teacher_states"} & recipe.keys():
        sections["data"] = {"path": str(folder / "taught.jsonl"), "teacher_topk": "teacher_topk"} | sections.pop(
            "data", {}
        )
    return run_config(folder, output, algorithm={"preset": "sft", "recipe": recipe}, **sections)


def shown(run: Run) -> Update:
    """All demonstrations as one update."""
    samples = [demonstration(example, group) for group, example in enumerate(run.examples)]
    run.recipe.credit(Batch([], samples, 0.0))
    return Update(samples, run.recipe.algorithm)


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


def rollouts() -> list[Sample]:
    """Samples as an update has them: of different lengths, one with tokens that are not the policy's."""
    samples = batch_of_samples()
    for sample in samples:
        sample.external = False
    longest = max(samples, key=lambda sample: len(sample.response))
    longest.trained = [place % 3 != 1 for place in range(len(longest.response))]
    return samples


def trained(sample: Sample) -> Tensor:
    return torch.tensor(sample.trained).expand(len(sample.response))


def gradients(run: Run, update: Update, batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient that the recipe leaves in DeepSpeed's engine, which is cleared."""
    outputs = run.recipe.accumulate(update, batches)
    parameters = dict(run.policy.engine.module.lm.named_parameters())
    found = {name: safe_get_full_grad(p).clone() for name, p in parameters.items() if p.requires_grad}
    run.policy.engine.optimizer.zero_grad()
    return sum(float(out.loss) for out in outputs), found
