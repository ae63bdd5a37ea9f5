"""The KL penalty in the reward: advantages against float64, a sequence at a time, and a run with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_runs import grade
from torch import Tensor
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples

from rlplus.train.data import Sample
from rlplus.train.recipe import Batch
from rlplus.train.trainer import Run, open_run, train
from rlplus.train.trainer.loop import Step

TEMPERATURE = 0.7


@contextmanager
def moved_run(folder: Path, algorithm: dict[str, Any]) -> Iterator[tuple[Run, list[Sample], list[Tensor]]]:
    """A run whose policy has left its reference; samples, and log p - log p_ref of their tokens in float64."""
    config = run_config(folder, algorithm=algorithm, rollout={"temperature": TEMPERATURE})
    with open_run(config) as run:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in run.policy.engine.module.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
        scratch = str(run.folder.path / "scratch")
        lm, reference = (AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64) for _ in range(2))
        weights = {name.removeprefix("lm."): p for name, p in run.policy.engine.module.named_parameters()}
        lm.load_state_dict({name: p.detach().double() for name, p in weights.items()}, strict=False)  # a tied head
        samples, gaps = batch_of_samples(), list[Tensor]()
        for s in samples:
            s.external = False
            ids, first = torch.tensor([[*s.prompt, *s.response]]), len(s.prompt) - 1
            p, q = ((model(ids).logits[0, first:-1] / TEMPERATURE).log_softmax(-1) for model in (lm, reference))
            gaps.append((p - q).detach().gather(1, torch.tensor(s.response)[:, None]).squeeze(1))
        yield run, samples, gaps


def test_ppo_takes_the_penalty_off_the_reward_of_each_token(tmp_path: Path) -> None:
    """GAE written out, with the outcome at the last token and a critic whose values are known."""
    options = {"gamma": 0.9, "gae_lambda": 0.8, "whiten": False}
    with moved_run(tmp_path, {"preset": "ppo", "reward_kl_coef": 0.3, "recipe": options}) as (run, samples, gaps):
        recipe: Any = run.recipe
        recipe.critic = SimpleNamespace(value=lambda batch: batch.target / 100, device=torch.device("cpu"))
        Step(run).credit(Batch([], samples, 0.0))
    for s, gap in zip(samples, gaps, strict=True):
        n, V = len(s.response), [token / 100 for token in s.response] + [0.0]
        rewards = [-0.3 * float(k1) for k1 in gap]
        rewards[-1] += s.reward
        delta = [rewards[t] + 0.9 * V[t + 1] - V[t] for t in range(n)]
        want = [sum(0.72 ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        assert s.advantage == pytest.approx(want, rel=1e-4, abs=1e-4)
        assert s.returns == pytest.approx([V[t] + want[t] for t in range(n)], rel=1e-4, abs=1e-4)


def test_a_group_compares_rewards_less_the_penalties_of_whole_responses(tmp_path: Path) -> None:
    """Tokens that the policy did not write, which are not trained on, have none."""
    with moved_run(tmp_path, {"preset": "grpo", "reward_kl_coef": 0.3}) as (run, samples, gaps):
        inserted = max(samples, key=lambda s: len(s.response))
        inserted.trained = [True, False, *[True] * (len(inserted.response) - 2)]
        gaps[samples.index(inserted)][1] = 0.0
        step = Step(run)
        step.credit(Batch([], samples, 0.0))
    penalties = 0.3 * torch.stack([gap.sum() for gap in gaps])
    total, count = step.tally.means["reward/kl_penalty"]
    assert (total, count) == (pytest.approx(float(penalties.sum()), rel=1e-4, abs=1e-4), 16)
    for group in range(4):
        members = [i for i, s in enumerate(samples) if s.group == group]
        rewards = torch.stack([samples[i].reward - penalties[i] for i in members])
        want = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        assert [samples[i].advantage for i in members] == pytest.approx(want.tolist(), rel=1e-3, abs=1e-3)


def test_a_run_is_held_near_the_model_that_it_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to take off before the first update; the rewards that are reported are the grader's."""
    grade(monkeypatch, lambda sample: float(sample.response[0] % 2))
    algorithm = {"preset": "grpo", "reward_kl_coef": 0.1}
    rows = metrics(train(run_config(tmp_path, algorithm=algorithm, train={"steps": 3, "lr": 1e-2})))
    assert rows[0]["reward/kl_penalty"] == 0
    assert rows[2]["reward/kl_penalty"] != 0
    assert all(0 <= row["reward/internal"] <= 1 and row["reward/internal"] * 16 % 1 == 0 for row in rows)
    assert all("actor/loss_kl" not in row or row["actor/loss_kl"] == 0 for row in rows)
