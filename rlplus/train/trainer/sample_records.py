"""The samples of a step that are kept to be read, and what the policy says of their tokens."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.loss import exploration_weight
from rlplus.train.data import Example, KeptSample, MicroBatch, Sample, per_token, token_texts
from rlplus.train.learner import by_sample
from rlplus.train.recipe import Batch
from rlplus.train.trainer.run import Run

Answered = tuple[Example, Sample]


def kept_samples(run: Run, batch: Batch, ungraded: Sequence[Answered]) -> list[KeptSample]:
    """The first `log.sample_groups` groups of rank 0's batch, and as many samples of `ungraded` at most.

    Collective: a forward pass over them, in which the other ranks take part with dummies.
    """
    config = run.config
    groups = run.config.log.sample_groups
    chosen: list[Answered] = []
    if run.rank == 0:
        chosen = [(batch.examples[s.group], s) for s in batch.samples if s.group < groups]
        chosen += ungraded[: groups * config.rollout.group_size]
    if (parallel := config.train.sequence_parallel) > 1:  # the ranks of its group compute parts of the same samples
        chosen = agree.gathered(chosen, parallel)[0]

    def statistics(micro: MicroBatch) -> Tensor:
        return torch.stack(run.policy.statistics(micro), 1)

    values = by_sample([s for _, s in chosen], statistics, config, run.pad_id, run.policy.device)
    keep = partial(_kept, run)
    return [keep(*answered, *each.unbind(1)) for answered, each in zip(chosen, values, strict=True)]


def _kept(run: Run, example: Example, sample: Sample, logprob: Tensor, entropy: Tensor) -> KeptSample:
    tokens = len(sample.response)
    external = list(per_token(sample.external, tokens))
    weights = exploration_weight(logprob, run.recipe.algorithm.objective.gamma).tolist()
    return KeptSample(
        step=run.progress.step + 1,
        problem=example.index,
        benchmark="",
        prompt=run.tokenizer.decode(list(sample.prompt)),
        response=run.decode(sample.response),
        reward=None if sample.masked else sample.reward,
        status=sample.status,
        truncated=sample.truncated,
        tokens=token_texts(run.tokenizer, sample.response),
        external=external,
        logprob=logprob.tolist(),
        entropy=entropy.tolist(),
        exploration_weight=[w if shown else None for w, shown in zip(weights, external, strict=True)],
        advantage=None if sample.masked else list(per_token(sample.advantage, tokens)),
        answer=example.answer,
        detail=sample.detail,
        grade=sample.grade,
    )
