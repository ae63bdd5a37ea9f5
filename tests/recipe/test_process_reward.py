"""PRIME: the formulas in float64, the process reward model, a run with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_runs import grade, killed_and_resumed
from trainer_runs import run_config
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples, check_gradients

from rlplus.common.errors import SharedFailure
from rlplus.train.algorithm import outcome_loss, process_advantages
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import ProcessModel, by_sample, mean_batches
from rlplus.train.recipe import Batch
from rlplus.train.recipe.prime import ProcessRewardRecipe
from rlplus.train.trainer import Run, open_run
from rlplus.train.trainer.loop import Step


def test_advantages_are_their_definition() -> None:
    """A token's worth: process rewards from there on, each less its baseline; the outcome less the others'."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (1, 5, 3)]
    outcomes = [1.0, 0.0, 1.0]
    got = process_advantages(outcomes, scores)
    means = [float(score.mean()) for score in scores]
    for outcome, score, advantage in zip(outcomes, scores, got, strict=True):
        end = outcome - (sum(outcomes) - outcome) / 2
        rewards = [3 / 2 * float(q) - sum(means) / 2 for q in score]
        want = [sum(rewards[t:]) + end for t in range(len(score))]
        torch.testing.assert_close(advantage, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)
    assert [advantage.tolist() for advantage in process_advantages([1.0], [scores[1]])] == [[0.0] * 5]


def test_the_loss_of_outcomes_and_its_gradient() -> None:
    """Against torch's binary cross-entropy of whole sequences; tokens without weight, as of a dummy, add nothing."""
    generator = torch.Generator().manual_seed(1)
    lengths, outcomes = torch.tensor([2, 4, 1]), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 2, 3]).repeat_interleave(lengths)  # another micro-batch has sequence 1
    score = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = (1 / (3 * lengths.double())).repeat_interleave(lengths)
    loss = outcome_loss(score, outcomes.repeat_interleave(lengths), weight, sequence, 0.7)
    (got,) = torch.autograd.grad(loss, score)
    sums = torch.stack([part.sum() for part in score.split(lengths.tolist())])
    want = torch.nn.functional.binary_cross_entropy((0.7 * sums).sigmoid(), outcomes)
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(got, torch.autograd.grad(want, score)[0], rtol=1e-14, atol=0)
    assert outcome_loss(score, score, torch.zeros(7, dtype=torch.float64), sequence, 0.7) == 0


def prime(
    folder: Path, output: str = "run", train: Any = None, update: str = "after", temperature: float = 1.0
) -> Config:
    algorithm = {"preset": "prime", "recipe": {"lr": 3e-3, "beta": 0.5, "update": update}}
    settings = {"prompts_per_step": 6, "prompts_per_update": 3}
    rollout = {"temperature": temperature}
    return run_config(folder, output, algorithm=algorithm, train=settings | (train or {}), rollout=rollout)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that is built and never trained, but its reward model has moved away from the reference.

    It samples at a temperature, which the reward model does not have.
    """
    with open_run(prime(tmp_path_factory.mktemp("run"), temperature=0.6)) as run:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in run.learners["process"].engine.module.parameters():
                p.add_(0.02 * torch.randn(p.shape, generator=generator))
        yield run


def test_scores_and_the_gradient_are_those_of_single_sequences_in_float64(run: Run) -> None:
    """log pi_phi - log pi_ref of each token; the mean over sequences of the cross-entropy of the outcome."""
    process, samples = run.learners["process"], batch_of_samples()
    assert isinstance(process, ProcessModel)
    scratch = str(run.folder.path / "scratch")
    phi, ref = (AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64) for _ in range(2))
    moved = {name.removeprefix("lm."): p for name, p in process.engine.module.named_parameters()}
    phi.load_state_dict({name: p.detach().double() for name, p in moved.items()}, strict=False)  # a tied head

    def logprob(lm: Any, s: Sample) -> torch.Tensor:
        logp = lm(torch.tensor([[*s.prompt, *s.response]])).logits[0, len(s.prompt) - 1 : -1].log_softmax(-1)
        return logp.gather(1, torch.tensor(s.response)[:, None]).squeeze(1)

    scores = [logprob(phi, s) - logprob(ref, s).detach() for s in samples]
    for sample in samples:
        sample.external, sample.returns = False, [sample.reward] * len(sample.response)
    logits = 0.05 * torch.stack([score.sum() for score in scores])
    outcomes = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, outcomes)
    loss.backward()
    for got, want in zip(
        by_sample(samples, process.score, run.config, run.pad_id, process.device), scores, strict=True
    ):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-4, atol=1e-5)
    batches = mean_batches(samples, run.config, run.pad_id, process.device, of="sequences")
    assert len(batches) >= 2
    model = process.engine.module
    model.zero_grad()
    outputs = [model(batch, process._outcome_op(0.05, 1, batch)) for batch in batches]
    sum(out.loss for out in outputs).backward()
    assert float(sum(out.loss.detach() for out in outputs)) == pytest.approx(float(loss.detach()), rel=1e-5)
    check_gradients(model, {name: p.grad for name, p in phi.named_parameters()})


def test_scores_are_scaled_by_the_largest_return_of_the_batch(run: Run) -> None:
    """Baselines, returns and whitening follow: doubled scores change nothing."""
    process = run.learners["process"]
    recipe = ProcessRewardRecipe(run.config)
    recipe.process, recipe.pad_id = process, run.pad_id
    samples = batch_of_samples()
    for sample in samples:
        sample.external = False
    scores = by_sample(samples, process.score, run.config, run.pad_id, process.device)
    recipe.credit(Batch([], samples, 0.0))
    largest = max(float(score[t:].double().sum().abs()) for score in scores for t in range(len(score)))
    want: list[float] = []
    for group in range(4):
        members = [i for i, sample in enumerate(samples) if sample.group == group]
        rewards = [samples[i].reward for i in members]
        for advantage in process_advantages(rewards, [scores[i].double() / largest for i in members]):
            want += advantage.tolist()
    tokens = torch.tensor(want, dtype=torch.float64)
    got = torch.tensor([a for sample in samples for a in sample.advantage], dtype=torch.float64)
    torch.testing.assert_close(got, (tokens - tokens.mean()) / tokens.std(correction=0), rtol=1e-4, atol=1e-4)


def test_rewards_that_are_no_outcomes_are_refused(run: Run) -> None:
    samples = batch_of_samples()
    samples[3].reward = -0.5
    with pytest.raises(SharedFailure, match=r"want rewards in \[0, 1\]; got one 0.5 outside"):
        ProcessRewardRecipe(run.config).collect(lambda: Batch([], samples, 0.0))


@pytest.mark.parametrize("update", ["after", "before"])
def test_the_reward_model_scores_before_or_after_its_updates(tmp_path: Path, update: str) -> None:
    """Advantages against AdamW's steps and scores of single sequences in float64: two mini-batches of whole groups.

    After the reward model's update the step cannot be redone.
    """
    with open_run(prime(tmp_path, update=update)) as run:
        scratch = str(run.folder.path / "scratch")
        phi, ref = (AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64) for _ in range(2))
        step, samples = Step(run), batch_of_samples()
        for sample in samples:
            sample.external = False
        batch = run.recipe.collect(lambda: Batch([], samples, 0.0))
        step.credit(batch)
        got = torch.tensor([a for sample in samples for a in sample.advantage], dtype=torch.float64)
        assert run.start.can_redo == (update == "after")
        step.fit(batch)
        assert not run.start.can_redo
        count = run.recipe.metrics()["process/nonfinite"]
    assert count == (0.0, 2.0)

    def score(s: Sample) -> torch.Tensor:
        ids, first = torch.tensor([[*s.prompt, *s.response]]), len(s.prompt) - 1
        logps = (lm(ids).logits[0, first:-1].log_softmax(-1) for lm in (phi, ref))
        of_phi, of_ref = (logp.gather(1, torch.tensor(s.response)[:, None]).squeeze(1) for logp in logps)
        return of_phi - of_ref.detach()

    if update == "before":
        optimizer = torch.optim.AdamW(phi.parameters(), lr=3e-3, weight_decay=0.0)
        for part in ([s for s in samples if s.group < 3], [s for s in samples if s.group == 3]):
            logits = 0.5 * torch.stack([score(sample).sum() for sample in part])
            outcomes = torch.tensor([sample.reward for sample in part], dtype=torch.float64)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, outcomes).backward()
            assert float(torch.stack([p.grad.norm() for p in phi.parameters()]).norm()) < 10  # it is not clipped
            optimizer.step()
    scores = [score(sample).detach() for sample in samples]
    assert any(float(s.abs().max()) > 0 for s in scores) == (update == "before")
    largest = max(float(s[t:].sum().abs()) for s in scores for t in range(len(s))) or 1.0
    want: list[float] = []
    for group in range(4):
        members = [i for i, sample in enumerate(samples) if sample.group == group]
        for worth in process_advantages([samples[i].reward for i in members], [scores[i] / largest for i in members]):
            want += worth.tolist()
    tokens = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, (tokens - tokens.mean()) / tokens.std(correction=0), rtol=2e-3, atol=2e-3)


def check_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, update: str = "after", **train: Any
) -> list[Any]:
    """With a kill before the reward model's first update in a step, and one after it."""
    grade(monkeypatch, lambda sample: float(sample.response[0] % 2))
    methods = (ProcessRewardRecipe, "credit" if update == "after" else "collect"), (ProcessModel, "learn")
    return killed_and_resumed(
        lambda output: prime(folder, output, {"steps": steps} | train, update), monkeypatch, *methods
    )


@pytest.mark.parametrize("update", [pytest.param("after", marks=pytest.mark.slow), "before"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    rows = check_resume(tmp_path, monkeypatch, 4, update)
    names = ("process/score", "process/accuracy", "process/loss", "process/nonfinite", "process/lr")
    names += ("process/grad_norm", "mismatch/mean")
    assert all(name in row for row in rows for name in names)
    at_first = [row["process/score"] == 0 for row in rows]  # the model begins as its reference
    assert at_first == [update == "after", False, False, False]
    assert rows[0]["process/loss"] == pytest.approx(0.693, abs=0.1)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def test_a_reward_model_learns_the_outcomes(tmp_path: Path) -> None:
    """Repeated training on one batch."""
    with open_run(prime(tmp_path)) as run:
        recipe, losses, applied = run.recipe, list[float](), list[bool]()
        samples = batch_of_samples()
        for sample in samples:
            sample.external = False
        for _ in range(10):
            batch = recipe.collect(lambda: Batch([], samples, 0.0))
            recipe.credit(batch)
            recipe.fit(batch, applied.append)
            total, count = recipe.metrics()["process/loss"]
            losses.append(total / count)
    assert applied == [True] * 20
    assert losses[0] == pytest.approx(0.693, abs=0.1)
    assert losses[-1] < 0.35
    right, count = recipe.metrics()["process/accuracy"]
    assert right / count > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_reward_model_in_shards_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    check_resume(tmp_path, monkeypatch, 5, zero_stage=stage)
