"""Helpers for the tests of recipes: hand-made batches, gradients in float64, and runs killed and resumed."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same
from torch import Tensor
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM, PreTrainedModel
from update_cases import check_gradients, packed

from rlplus.train.algorithm import Algorithm
from rlplus.train.config import Config
from rlplus.train.data import Example, MicroBatch, Sample
from rlplus.train.recipe import Batch, Recipe, Update, make_recipe
from rlplus.train.trainer import Interrupted, Run, train


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    return make_recipe(run_config(folder, **sections))


def drawn_batch(rewards: Sequence[Sequence[float]], first: int = 0, without: Sequence[int] = ()) -> Batch:
    """A group for each prompt, with these rewards; prompts are numbered from `first`, those `without` have no text."""
    examples = [
        Example(
            first + i, (first + i + 1,), "", None if i in without else (7, 8, first + i + 1), demonstration_reward=1.0
        )
        for i in range(len(rewards))
    ]
    samples = [
        Sample(examples[group].prompt, [9, 10 + member], group, False, False, None, reward=reward)
        for group, members in enumerate(rewards)
        for member, reward in enumerate(members)
    ]
    return Batch(examples, samples, 0.0)


def shown(samples: Sequence[Sample]) -> list[int]:
    """The numbers of the prompts whose demonstrations are among the samples."""
    return [sample.prompt[0] - 1 for sample in samples if sample.demonstration]


def check_gradient(
    run: Run, updates: Sequence[tuple[Sequence[MicroBatch], Algorithm]], loss: Callable[[Any], Tensor]
) -> None:
    """The gradient of these updates is the gradient of `loss`, a function of the model in float64."""
    lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
    loss(lm).backward()
    model = run.policy.engine.module
    model.zero_grad()
    for micro_batches, algorithm in updates:
        for micro in micro_batches:
            model(micro, run.policy._loss_op(algorithm.objective, micro)).loss.backward()
    check_gradients(model, {name: p.grad for name, p in lm.named_parameters()})


def packed_updates(run: Run, *updates: Update) -> list[tuple[list[MicroBatch], Algorithm]]:
    return [(packed(run, update.samples, algorithm=update.algorithm), update.algorithm) for update in updates]


def tokens_of(lm: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """The logprob and the entropy of each response token."""
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    logp = lm(ids).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, torch.tensor(sample.response)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def sampled_loss(
    lm: PreTrainedModel, samples: Sequence[Sample], limit: int, members: Sequence[Sample] | None = None
) -> Tensor:
    """-A r without clip or std, over 8 times the length limit. members: of the groups, if there are others, too."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        group = [other.reward for other in members or samples if other.group == sample.group]
        logp, _ = tokens_of(lm, sample)
        total = total - (sample.reward - sum(group) / len(group)) * (logp - logp.detach()).exp().sum() / (8 * limit)
    return total


def draw_rewards(samples: Sequence[Sample], *_: Any) -> None:
    """Replaces the grader: rewards that an untrained model gets now and then, so that some groups are solved."""
    for sample in samples:
        sample.reward = float(sample.demonstration or sum(sample.response) % 7 == 0)


def demonstrations_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """Have runs draw their rewards; -> a list that gets what their steps demonstrate."""
    seen: list[Sample] = []

    def score(samples: Sequence[Sample], *rest: Any) -> None:
        draw_rewards(samples, *rest)
        seen.extend(sample for sample in samples if sample.demonstration)

    monkeypatch.setattr("rlplus.train.trainer.loop.score", score)
    return seen


def resumed_config(folder: Path, output: str, algorithm: dict[str, Any], steps: int = 20) -> Config:
    train_section = {"steps": steps, "prompts_per_update": 2, "lr": 1e-4}
    rollout = {"engine": "transformers", "group_size": 3, "max_response_length": 8}
    return run_config(folder, output, algorithm=algorithm, train=train_section, rollout=rollout)


def resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], kind: type[Recipe], steps: int = 20
) -> list[dict[str, float]]:
    """The metrics of a run. One that is killed in step 5 and resumed has the same metrics and model, bit for bit.

    SIGTERM comes when the recipe has changed its state and before the policy changes.
    """
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    whole = train(resumed_config(folder, "whole", algorithm, steps))
    rows = metrics(whole)
    assert len(rows) == steps
    config = resumed_config(folder, "parts", algorithm, steps)
    updates, calls = kind.updates, [0]

    def killing(recipe: Recipe, batch: Batch) -> Any:
        made = updates(recipe, batch)
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(kind, "updates", killing)
        with pytest.raises(Interrupted):
            train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == "step-000004"
    train(config, resume="newest")
    assert same(whole, Path(config.output_dir))
    assert metrics(Path(config.output_dir)) == rows
    return rows
