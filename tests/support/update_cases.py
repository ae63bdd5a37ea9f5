"""Samples of one update, their micro-batches, and the gradient that they must have."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlplus.train.algorithm import Algorithm
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample
from rlplus.train.learner import make_micro_batches
from rlplus.train.trainer import Run


def packed(
    run: Run, samples: list[Sample], config: Config | None = None, algorithm: Algorithm | None = None
) -> list[MicroBatch]:
    """The micro-batches of one update of the run, or of another configuration or algorithm."""
    algorithm = algorithm or run.recipe.algorithm
    return make_micro_batches(samples, algorithm, config or run.config, run.pad_id, run.policy.device)


def batch_of_samples(seed: int = 0) -> list[Sample]:
    """Groups of three rollouts and a demonstration with distinct rewards and lengths."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for group in range(4):
        for member in range(4):
            lengths = [int(torch.randint(1, 9, (), generator=generator)) for _ in range(2)]
            prompt, response = (torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths)
            external = member == 3
            samples.append(
                Sample(prompt, response, group, external, False, None, reward=float(external or member == group))
            )
    return samples


def naive_gradients(
    run: Run, samples: list[Sample], temperature: float = 1.0, model: Path | None = None
) -> dict[str, torch.Tensor]:
    """RL-PLUS eq. 1-7 written out in float64, a sequence at a time, through the plain model: no package code."""
    lm = AutoModelForCausalLM.from_pretrained(str(model or run.folder.path / "scratch"), dtype=torch.float64)
    tokens = sum(len(s.response) for s in samples)
    for group in range(4):
        members = [s for s in samples if s.group == group]
        rewards = torch.tensor([s.reward for s in members], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for s, advantage in zip(members, advantages, strict=True):
            (naive_loss(lm, s, advantage, torch.tensor(s.external), temperature) / tokens).backward()
    return {name: p.grad for name, p in lm.named_parameters()}


def check_gradients(model: nn.Module, want: Mapping[str, Tensor]) -> None:
    """Compare the gradients of a learner's module, then cleared, with `want` in float64, by the plain model's names."""
    got = {name.removeprefix("lm."): p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        # A bias sums what its weight sums; the keys' own sum is nearly 0, and has the rounding of its terms.
        terms = want.get(name.removesuffix("bias") + "weight", gradient)
        bound = 1e-6 * max(float(gradient.abs().max()), float(terms.abs().max()))
        torch.testing.assert_close(got[name].double(), gradient, rtol=1e-4, atol=bound, msg=name)


def dropped(s: Sample, vocabulary: int) -> Tensor:
    """(T, V) bool: the tokens that the sampler did not keep, a token at a time."""
    rows, start = [], 0
    for count in [0] * len(s.response) if s.kept is None else s.kept.counts:
        kept = s.kept.tokens[start : start + count] if s.kept is not None else []
        start += count
        rows.append([count > 0 and token not in kept for token in range(vocabulary)])
    return torch.tensor(rows)


def naive_loss(lm: PreTrainedModel, s: Sample, advantage: Tensor, external: Tensor, temperature: float = 1.0) -> Tensor:
    """The sum over a response; advantage, external: one number for the response, or (T,)."""
    ids = torch.tensor([[*s.prompt, *s.response]])
    logits = lm(ids).logits[0, len(s.prompt) - 1 : -1]
    logp = (logits / temperature).masked_fill(dropped(s, logits.shape[1]), -torch.inf).log_softmax(-1)
    p = logp.gather(1, torch.tensor(s.response)[:, None]).squeeze(1).exp()
    old = p.detach()
    weight = torch.where(external, 4 * p / (3 * old + 1) * (1 - old) ** 0.5, p / old)
    return -(advantage * weight).sum()
