"""Parts of an update and of a run's state that change a number only where they are switched on."""

import os
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import quick
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples, check_gradients, naive_gradients, packed

from rlplus.train.algorithm import ALGORITHMS, Algorithm
from rlplus.train.checkpoint import random_state, set_random_state
from rlplus.train.data import MicroBatch, PromptSampler, Sample
from rlplus.train.recipe import set_advantages
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import Run, open_run, train
from rlplus.train.trainer.rollouts import Rollouts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Not trained; at a temperature of 0.7, and with gradients clipped at a norm that they have by far."""
    changes = {"rollout": {"temperature": 0.7}, "train": {"grad_clip": 1e-3}}
    with open_run(run_config(tmp_path_factory.mktemp("run"), **changes)) as run:
        yield run


def micro_batches(run: Run, samples: list[Sample], algorithm: Algorithm | None = None) -> list[MicroBatch]:
    algorithm = algorithm or run.recipe.algorithm
    set_advantages(samples, algorithm)
    return packed(run, samples, algorithm=algorithm)


def test_the_temperature_of_a_run_reaches_its_gradient(run: Run) -> None:
    samples = batch_of_samples()
    batches = micro_batches(run, samples)
    lm = run.policy.engine.module
    for batch in batches:
        lm(batch, run.policy._loss_op(run.recipe.algorithm.objective, batch)).loss.backward()
    want, plain = naive_gradients(run, samples, temperature=0.7), naive_gradients(run, samples)
    check_gradients(lm, want)
    for name, gradient in want.items():
        assert not torch.allclose(plain[name], gradient, rtol=1e-2)


def test_the_temperature_of_a_run_reaches_old_logprob(run: Run) -> None:
    logits: list[torch.Tensor] = []
    (batch, *_) = micro_batches(run, batch_of_samples())
    with torch.no_grad():
        head = run.policy.engine.module.lm.get_output_embeddings().weight
        run.policy.engine(batch, lambda hidden, *_, **__: logits.append(hidden.double() @ head.double().T))
    want = (logits[0] / 0.7).log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
    plain = (logits[0].float() / 0.7).log_softmax(-1).gather(1, batch.target[:, None])[:, 0]
    bound = 2 * (plain - want).abs().max() + 8 * torch.finfo(torch.float32).eps * logits[0].abs().max() / 0.7
    assert (run.policy.logprob(batch) - want).abs().max() <= bound


def test_the_gradient_is_clipped_to_its_norm(run: Run) -> None:
    """Seen in the optimizer's first moment, a tenth of the gradient: AdamW's first step does not depend on its size."""
    before = {name: p.detach().clone() for name, p in run.policy.engine.module.named_parameters()}
    run.policy.backward(micro_batches(run, batch_of_samples()), run.policy.loss_of(run.recipe.algorithm.objective))
    assert run.policy.step()
    norm = run.policy.grad_norm
    assert norm is not None
    assert norm > 1e-2
    moments = [safe_get_full_optimizer_state(p, "exp_avg") for p in run.policy.engine.module.parameters()]
    whole = torch.stack([moment.double().norm() for moment in moments]).norm()
    # DeepSpeed divides by the norm + 1e-6.
    assert float(whole) == pytest.approx(0.1 * 1e-3, rel=1e-6 / norm + 1e-5)
    with torch.no_grad():
        for name, p in run.policy.engine.module.named_parameters():
            p.copy_(before[name])


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_are_for_updates_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that what the run sets is taken back
        monkeypatch.delenv(name)
    with open_run(run_config(tmp_path, train={"deterministic": deterministic})) as run:
        batches = micro_batches(run, batch_of_samples())

        def op(batch: MicroBatch) -> Any:
            real = run.policy._loss_op(run.recipe.algorithm.objective, batch)

            def loss(*inputs: Any, **options: Any) -> Any:
                assert torch.utils.deterministic.fill_uninitialized_memory is not deterministic
                torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))  # one of torch's that has no such form
                return real(*inputs, **options)

            return loss

        with pytest.raises(RuntimeError, match=r"put_.* deterministic") if deterministic else nullcontext():
            run.policy.backward(batches, op)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert (os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1") is deterministic
        assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8") is deterministic


def test_the_official_bonus_is_a_mean_over_all_response_tokens(run: Run) -> None:
    """Tokens of samples without an advantage count; the loss itself is normalised by length."""
    samples = batch_of_samples()
    batches = micro_batches(run, samples, ALGORITHMS["rlplus-official"])
    weights = torch.cat([batch.entropy_weight for batch in batches if batch.entropy_weight is not None])
    tokens = sum(len(sample.response) for sample in samples)
    assert torch.equal(weights, torch.full((tokens,), 1 / tokens))
    assert not torch.allclose(torch.cat([batch.token_weight for batch in batches]), weights)


@pytest.mark.parametrize("coefficient", ["kl_coef", "entropy_coef"])
def test_kl_and_entropy_take_samples_of_zero_advantage(run: Run, coefficient: str) -> None:
    samples = batch_of_samples()
    for sample in samples:
        sample.reward = 1.0
    algorithm = ALGORITHMS["grpo"]
    for value, forward_only in ((0.0, True), (0.1, False)):
        algorithm = replace(algorithm, objective=replace(algorithm.objective, **{coefficient: value}))
        batches = micro_batches(run, samples, algorithm)
        assert {batch.forward_only for batch in batches} == {forward_only}
        assert sum(int((batch.token_weight != 0).sum()) for batch in batches) == sum(len(s.response) for s in samples)


def test_demonstrations_of_solved_groups_are_learnt(run: Run) -> None:
    """A cross-entropy on demonstrations beside the group does not ask for an advantage."""
    samples = batch_of_samples()
    for sample in samples:
        sample.reward = 1.0
    batches = micro_batches(run, samples, replace(ALGORITHMS["sft"], demonstrations="apart"))
    batches = [batch for batch in batches if not batch.forward_only]
    learnt = torch.cat([batch.target[batch.token_weight != 0] for batch in batches])
    assert torch.cat([batch.external[batch.token_weight != 0] for batch in batches]).all()
    wanted = [token for sample in samples if sample.external for token in sample.response]
    assert sorted(learnt.tolist()) == sorted(wanted)


def test_an_applied_update_begins_the_count_of_nonfinite_ones_anew(run: Run) -> None:
    for applied in (False, False, True, False, False):
        run.count_nonfinite(applied)
    for applied in (True, False):  # another model's
        run.count_nonfinite(applied, "critic")
    with pytest.raises(RunFailed, match="3 updates of the policy in a row"):
        run.count_nonfinite(False)
    run.count_nonfinite(True)


@pytest.mark.parametrize(("stage", "dtype"), quick.first(1, [(3, "bfloat16"), (1, "float32")]))
def test_an_update_that_is_skipped_for_its_norm_leaves_no_trace(tmp_path: Path, stage: int, dtype: str) -> None:
    """A thousand times the gradient between two updates: weights, moments and the learning rate are as without it."""

    def updates(name: str, factors: list[float], limit: float) -> tuple[list[tuple[bool, float]], list[torch.Tensor]]:
        options = {"zero_stage": stage, "warmup_steps": 4}
        config = run_config(tmp_path, name, model={"dtype": dtype}, train=options)
        with open_run(config) as run:
            made = []
            for factor in factors:
                samples = batch_of_samples()
                set_advantages(samples, run.recipe.algorithm)
                for sample in samples:
                    sample.advantage *= factor
                run.policy.backward(packed(run, samples), run.policy.loss_of(run.recipe.algorithm.objective))
                applied = run.policy.step(limit)
                made.append((applied, run.policy.grad_norm))
            return made, [weight.clone() for _, weight in run.policy.weights()]

    plain, weights = updates("plain", [1.0, 1.0], 0.0)
    assert [applied for applied, _ in plain] == [True, True]
    made, same = updates("skipping", [1.0, 1000.0, 1.0], 10 * max(norm for _, norm in plain))
    assert made[::2] == plain
    assert made[1] == (False, pytest.approx(1000 * plain[1][1], rel=1e-4 if dtype == "float32" else 0.02))
    assert all(map(torch.equal, same, weights))


def test_updates_that_are_skipped_for_their_norm_are_counted_and_do_not_stop_a_run(tmp_path: Path, capsys: Any) -> None:
    """Any number of them, unlike updates with a non-finite gradient."""
    config = run_config(tmp_path, algorithm={"preset": "rlplus", "skip_grad_norm": 1e-6}, train={"steps": 4})
    folder = train(config)
    for row in metrics(folder):
        assert (row["actor/skipped"], row["actor/nonfinite"]) == (1, 0)
        assert row["actor/grad_norm"] > 1e-6
    told = " ".join(capsys.readouterr().err.split())
    assert told.count(" above algorithm.skip_grad_norm 1e-06") == 4
    before, after = (AutoModelForCausalLM.from_pretrained(str(folder / name)) for name in ("scratch", "model"))
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    taken = run_config(tmp_path, "taken", algorithm={"preset": "rlplus", "skip_grad_norm": 80.0})
    assert [row["actor/skipped"] for row in metrics(train(taken))] == [0, 0]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws(*_: object) -> dict[str, float]:
    return {"draw": random.random() + float(np.random.rand()) + float(torch.rand(()))}


def test_a_checkpoint_holds_the_random_state_of_python_numpy_and_torch(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"evaluation": {"data": {"path": "-", "max_prompt_length": 8}, "every": 1}}
    seed(0)
    whole = metrics(train(run_config(tmp_path, "whole", **sections), evaluate=draws))
    seed(0)
    train(run_config(tmp_path, "parts", train={"steps": 1}, **sections), evaluate=draws)
    seed(1)  # another process would be elsewhere
    parts = metrics(train(run_config(tmp_path, "parts", **sections), resume="newest", evaluate=draws))
    assert parts == whole
    assert len({value for row in parts for name, value in row.items() if "draw" in name}) == 2
    state = random_state()
    first = draws()
    assert draws() != first
    set_random_state(state)
    assert draws() == first


def test_no_two_ranks_and_no_two_draws_sample_with_the_same_seed() -> None:
    """With the same seed equal prompts would get equal responses."""
    seeds: list[int] = []
    for seed in (0, 1):
        for rank in range(2):
            config = SimpleNamespace(train=SimpleNamespace(seed=seed), rollout=SimpleNamespace(waiting=0))
            sampler = PromptSampler(3, 2, seed)
            here: Any = SimpleNamespace(config=config, world=2, rank=rank, sampler=sampler, _ahead=[], _waiting=[])
            here._begun = sampler.next
            here._continued = lambda engine, batches, seed, version: seeds.append(seed)
            for _ in range(50):
                Rollouts._question(here, 0)(here)
    assert len(set(seeds)) == len(seeds) == 200
