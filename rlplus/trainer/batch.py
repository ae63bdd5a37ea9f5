"""From prompts to micro-batches: who is in a group, what each member is worth, what each token weighs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.config import Config
from rlplus.data import Example, MicroBatch, Sample, pack
from rlplus.objective import Algorithm, group_advantages, token_weights
from rlplus.reward import Scorer
from rlplus.rollout import RolloutEngine


def generate(
    engine: RolloutEngine, examples: Sequence[Example], algorithm: Algorithm, config: Config, seed: int
) -> list[Sample]:
    """Every group's members, in order: its rollouts, then its demonstration where the algorithm uses one.

    A demonstration takes the place of a rollout, which is not generated. A prompt without one gets a full group.
    """
    takes_place = [algorithm.demonstrations in ("group", "apart") and e.demonstration is not None for e in examples]
    rollouts: list[list] = [[] for _ in examples]
    if algorithm.demonstrations != "only":
        rollouts = engine.generate(
            [e.prompt for e in examples],
            [config.rollout.group_size - taken for taken in takes_place],
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_length,
            seed=seed,
        )
    samples = []
    for group, (example, completions) in enumerate(zip(examples, rollouts, strict=True)):
        for c in completions:
            samples.append(Sample(example.prompt, c.tokens, group, False, c.truncated, c.logprob))
        if example.demonstration is not None and algorithm.demonstrations != "none":
            samples.append(Sample(example.prompt, example.demonstration, group, True, False, None))
    return samples


def score(
    samples: Sequence[Sample], examples: Sequence[Example], scorer: Scorer, decode: Callable[..., str]
) -> list[str]:
    """Set every sample's reward; returns each one's status, "ok" or what went wrong."""
    scores = scorer([decode(s.response) for s in samples], [examples[s.group].answer for s in samples])
    for sample, result in zip(samples, scores, strict=True):
        sample.reward = result.value
    return [result.status for result in scores]


def set_advantages(samples: Sequence[Sample], algorithm: Algorithm) -> None:
    """Group-relative advantages; demonstrations that stand apart do not enter the statistics."""
    external = torch.tensor([s.external for s in samples], dtype=torch.bool)
    advantages = group_advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor([s.group for s in samples], dtype=torch.int64),
        normalize_std=algorithm.normalize_std,
        include=~external if algorithm.demonstrations == "apart" else None,
    )
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def make_micro_batches(
    samples: Sequence[Sample], algorithm: Algorithm, config: Config, pad_id: int, device: torch.device
) -> list[MicroBatch]:
    """Weigh, select and pack the samples of one update; all ranks get equally many micro-batches.

    The denominators are those of the whole batch. Samples without a gradient are then left out, which changes nothing
    but the time: with KL and entropy off, those of zero advantage and external ones without a loss.
    """
    weights = _token_weights(samples, algorithm, config)
    o = algorithm.objective
    everyone = bool(o.kl_coef or o.entropy_coef)
    kept = [i for i, s in enumerate(samples) if everyone or _has_gradient(s, algorithm)]
    batches = pack(
        [samples[i] for i in kept],
        [weights[i] for i in kept],
        row_length=config.max_sample_length,
        tokens_per_micro_batch=config.train.tokens_per_micro_batch,
        pad_id=pad_id,
    )
    most = int(_all_reduce(len(batches), dist.ReduceOp.MAX))
    # A rank with fewer micro-batches runs dummies, backward pass included: a rank that skips one deadlocks ZeRO.
    batches += [_dummy(pad_id) for _ in range(most - len(batches))]
    batches = [batch.to(device) for batch in batches]
    if o.entropy_coef and algorithm.reduction == "official":
        # The official scripts' bonus is a mean over response tokens, while their loss is normalised by length alone.
        tokens = _all_reduce(sum(len(s.response) for s in samples), dist.ReduceOp.SUM)
        for batch in batches:
            batch.entropy_weight = (batch.token_weight != 0).float() / tokens
    return batches


def _has_gradient(sample: Sample, algorithm: Algorithm) -> bool:
    return algorithm.objective.external_gradient(sample.advantage) if sample.external else sample.advantage != 0


def _token_weights(samples: Sequence[Sample], algorithm: Algorithm, config: Config) -> list[Tensor]:
    lengths = torch.tensor([len(s.response) for s in samples], dtype=torch.int64)
    external = torch.tensor([s.external for s in samples], dtype=torch.bool)
    apart = algorithm.demonstrations == "apart"
    kinds = (~external, external) if apart else (torch.ones_like(external),)
    tokens = tuple(int(_all_reduce(int(lengths[kind].sum()), dist.ReduceOp.SUM)) for kind in kinds)
    sequences = tuple(int(_all_reduce(int(kind.sum()), dist.ReduceOp.SUM)) for kind in kinds)
    flat = token_weights(
        torch.ones(int(lengths.sum()), dtype=torch.bool),
        algorithm.reduction,
        max_length=config.rollout.max_response_length,
        total_tokens=tokens if apart else tokens[0],  # type: ignore[arg-type]
        total_sequences=sequences if apart else sequences[0],  # type: ignore[arg-type]
        sequence_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        external=external.repeat_interleave(lengths) if apart else None,
    )
    return list(flat.split(lengths.tolist()))


def _dummy(pad_id: int) -> MicroBatch:
    """A micro-batch of one token of weight 0."""
    sample = Sample([pad_id], [pad_id], 0, False, False, None)
    return pack([sample], [torch.zeros(1)], row_length=2, tokens_per_micro_batch=2, pad_id=pad_id)[0]


def _all_reduce(value: float, op: Any) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    if torch.cuda.is_available():
        tensor = tensor.cuda()
    dist.all_reduce(tensor, op)
    return tensor.item()
