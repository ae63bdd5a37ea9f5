"""PPO with a critic: the formulas in float64, the value model, a run with it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_runs import grade, killed_and_resumed
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from update_cases import batch_of_samples, check_gradients

from rlplus.common.agree import initialize_distributed
from rlplus.train.algorithm import generalized_advantages, value_loss
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.learner import ValueModel, by_sample, mean_batches
from rlplus.train.learner.pretrained import add_value_head
from rlplus.train.learner.recipe_models import _value_op, _values
from rlplus.train.recipe import Batch, Update
from rlplus.train.recipe.critic import CriticRecipe
from rlplus.train.recipe.fit import whitened
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import Run, open_run, train

# ---- formulas


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 1.0), (1.0, 0.5)])
def test_advantages_are_their_definition(gamma: float, gae_lambda: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (1, 7, 4)]
    rewards = [1.0, 0.0, -2.5]
    got = generalized_advantages(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    for reward, value, advantage in zip(rewards, values, got, strict=True):
        n, V = len(value), [*value.tolist(), 0.0]
        delta = [(reward if t == n - 1 else 0.0) + gamma * V[t + 1] - V[t] for t in range(n)]
        want = [sum((gamma * gae_lambda) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        torch.testing.assert_close(advantage, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)
    assert generalized_advantages([], [], gamma=gamma, gae_lambda=gae_lambda) == []


def test_without_discounts_an_advantage_is_the_reward_less_the_value() -> None:
    values = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([3.0])]
    first, second = generalized_advantages([1.0, 0.0], values, gamma=1.0, gae_lambda=1.0)
    assert first.tolist() == [0.5, 2.0, -1.0]
    assert second.tolist() == [-3.0]


def test_the_loss_of_values_and_its_gradient() -> None:
    """Old value 0, return 1, clip 0.2: near; past the clip to the return; away from it; beyond it, near and far."""
    value = torch.tensor([0.1, 0.5, -0.5, 1.5, 2.5], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    errors = torch.tensor([0.81, 0.64, 2.25, 0.64, 2.25], dtype=torch.float64)
    loss = value_loss(value, torch.zeros_like(value), torch.ones_like(value), weight, 0.2)
    loss.backward()
    torch.testing.assert_close(loss.detach(), (weight * errors).sum() / 2, rtol=1e-15, atol=0)
    slope = torch.tensor([-0.9, 0.0, -1.5, 0.0, 1.5], dtype=torch.float64)
    torch.testing.assert_close(value.grad, weight * slope, rtol=1e-15, atol=1e-15)


def test_whitened_advantages_keep_their_order_and_have_mean_0_and_variance_1() -> None:
    """Over two ranks: test_ranks.py."""
    initialize_distributed()
    before = [torch.tensor([5.0, 7.0]).double(), torch.tensor([6.0, 10.0, 2.0]).double()]
    after = whitened(before)
    tokens = torch.cat(after)
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-15)
    assert float(tokens.var(correction=0)) == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(after[1] * 6.8**0.5 + 6, before[1], rtol=1e-12, atol=0)
    assert [float(a) for (a,) in whitened([torch.ones(1), torch.ones(1)])] == [0.0, 0.0]


# ---- the value model


def test_the_head_of_a_value_model() -> None:
    """Normal with std 1 / (H + 1), without bias, the same on every rank; the embeddings stay, also where tied."""
    H = 2048
    shape = {"hidden_size": H, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    lm = Qwen2ForCausalLM(
        Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True)
    ).bfloat16()
    embeddings = lm.get_input_embeddings().weight
    before = torch.get_rng_state()
    add_value_head(lm, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    head = lm.get_output_embeddings()
    assert (head.weight.shape, head.weight.dtype, head.bias) == ((1, H), torch.bfloat16, None)
    assert lm.get_input_embeddings().weight is embeddings
    scaled = head.weight.detach().float() * (H + 1)
    assert float(scaled.std()) == pytest.approx(1, abs=4 / (2 * H) ** 0.5)  # four standard errors
    assert float(scaled.mean()) == pytest.approx(0, abs=4 / H**0.5)
    drawn = head.weight.clone()
    torch.manual_seed(123)
    add_value_head(lm, seed=1)
    assert torch.equal(lm.get_output_embeddings().weight, drawn)
    add_value_head(lm, seed=2)
    assert not torch.equal(lm.get_output_embeddings().weight, drawn)


def test_values_of_a_bf16_model_are_summed_and_kept_in_fp32() -> None:
    """Within fp32's rounding of the product of the bf16 states and weights; bf16 has 8 bits of values near 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 96, generator=generator).bfloat16()
    weight = torch.randn(1, 96, generator=generator).bfloat16()
    terms = hidden.double() * weight.double()
    got = _values(hidden, weight)
    assert got.dtype == torch.float32
    assert ((got.double() - terms.sum(1)).abs() <= 8 * torch.finfo(torch.float32).eps * terms.abs().sum(1)).all()


def ppo(folder: Path, output: str = "run", train: Any = None, **options: Any) -> Config:
    recipe = {"critic_updates": 3, "lr": 1e-2, "warmup_steps": 2} | options
    algorithm = {"preset": "ppo", "recipe": recipe}
    return run_config(folder, output, algorithm=algorithm, train={"prompts_per_step": 6} | (train or {}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that is built and never trained."""
    with open_run(ppo(tmp_path_factory.mktemp("run"))) as run:
        yield run


def valued_samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    return [
        replace(
            sample,
            external=False,
            value=torch.randn(len(sample.response), generator=generator).tolist(),
            returns=torch.randn(len(sample.response), generator=generator).tolist(),
        )
        for sample in batch_of_samples()
    ]


def test_values_and_their_gradient_are_those_of_single_sequences_in_float64(run: Run) -> None:
    """V of the state before each token, through packed rows; the mean over tokens of the clipped loss."""
    critic, samples = run.learners["critic"], valued_samples()
    assert isinstance(critic, ValueModel)
    lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
    add_value_head(lm, run.config.train.seed)
    critic_head = critic.engine.module.lm.get_output_embeddings().weight
    lm.get_output_embeddings().weight.data.copy_(critic_head)  # the draw in float32, not rounded anew
    values, loss = [], torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        value = lm(ids).logits[0, len(sample.prompt) - 1 : -1, 0]
        old, returns = (torch.tensor(x, dtype=torch.float64) for x in (sample.value, sample.returns))
        near = torch.minimum(torch.maximum(value, old - 0.2), old + 0.2)
        loss += torch.maximum((value - returns) ** 2, (near - returns) ** 2).sum() / 2
        values.append(value.detach())
    loss /= sum(len(sample.response) for sample in samples)
    loss.backward()
    got = by_sample(samples, critic.value, run.config, run.pad_id, critic.device)
    for mine, exact in zip(got, values, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-6)
    batches = mean_batches(samples, run.config, run.pad_id, critic.device)
    assert len(batches) >= 2
    model = critic.engine.module
    model.zero_grad()
    outputs = [model(batch, _value_op(0.2, 1, batch)) for batch in batches]
    sum(out.loss for out in outputs).backward()
    assert float(sum(out.loss.detach() for out in outputs)) == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    assert "lm_head.weight" in gradients
    check_gradients(model, gradients)


def test_a_cut_response_has_no_reward_and_advantages_are_whitened_where_told(run: Run) -> None:
    """With a critic that knows nothing, an advantage without discounts is the reward."""
    for whiten, stopped_only in ((False, True), (False, False), (True, True)):
        recipe = CriticRecipe(ppo(run.folder.path, whiten=whiten, stopped_only=stopped_only))
        recipe.critic = SimpleNamespace(value=lambda batch: torch.zeros(len(batch.target)), device=torch.device("cpu"))
        recipe.pad_id = 0
        samples = [Sample([1], [2, 3], 0, False, cut, None, reward=1.0) for cut in (False, True)]
        samples += [Sample([1], [2, 3, 4], 1, False, False, None, reward=0.0)]
        recipe.credit(recipe.collect(lambda samples=samples: Batch([], samples, 0.0)))
        assert [sample.reward for sample in samples] == [1.0, 0.0 if stopped_only else 1.0, 0.0]
        rewards = [[sample.reward] * len(sample.response) for sample in samples]
        assert [sample.returns for sample in samples] == rewards
        if not whiten:
            assert [sample.advantage for sample in samples] == rewards
        else:
            mean, std = 2 / 7, (2 / 7 * 5 / 7) ** 0.5
            got = [advantage for sample in samples for advantage in sample.advantage]
            assert got == pytest.approx([(r - mean) / std for part in rewards for r in part], rel=1e-12)


# ---- runs


@pytest.fixture(autouse=True)
def by_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that a critic can know from the prompt."""
    grade(monkeypatch, lambda sample: float(sample.prompt[0] % 2))


def check_resume(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **train_options: Any) -> list[Any]:
    def config(output: str) -> Config:
        return ppo(folder, output, train={"steps": steps} | train_options, stopped_only=False)

    return killed_and_resumed(config, monkeypatch, (CriticRecipe, "credit"), (ValueModel, "accumulate"))


def test_a_critic_learns_the_values_of_prompts_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = check_resume(tmp_path, monkeypatch, 16)
    names = ("value", "explained_variance", "loss", "nonfinite", "lr", "grad_norm")
    assert all(f"critic/{name}" in row for row in rows for name in names)
    assert rows[0]["critic/lr"] == pytest.approx(1e-2 * (0.5 + 1 + 1) / 3)
    assert rows[1]["critic/lr"] == pytest.approx(1e-2)
    assert rows[0]["critic/explained_variance"] < 0.1
    assert rows[-1]["critic/explained_variance"] > 0.5
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"] / 4
    assert rows[-1]["critic/value"] == pytest.approx(0.5, abs=0.2)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_critic_in_shards_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    check_resume(tmp_path, monkeypatch, 5, zero_stage=stage)


@pytest.mark.parametrize(("place", "saved"), [("credit", True), ("fit", False)])
def test_an_update_of_the_critic_ends_the_right_to_redo_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, saved: bool
) -> None:
    """Even if the policy has none: a failure after it, in the second step, leaves no checkpoint of the first."""
    original, calls = getattr(CriticRecipe, place), list[int]()

    def second_fails(*args: Any) -> None:
        original(*args)
        calls.append(1)
        if len(calls) == 2:
            raise RunFailed("broken")

    monkeypatch.setattr(CriticRecipe, place, second_fails)
    monkeypatch.setattr(CriticRecipe, "updates", lambda recipe, batch: [Update([], recipe.algorithm)])
    config = ppo(tmp_path, train={"steps": 2})
    with pytest.raises(RunFailed, match="broken"):
        train(config)
    assert (Path(config.output_dir) / "checkpoints/step-000001").is_dir() == saved


def test_nonfinite_gradients_of_the_critic_are_counted_and_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.train.learner.recipe_models.value_loss", lambda value, *_: (value * torch.nan).sum())
    with pytest.raises(RunFailed, match="3 updates of the critic in a row had a non-finite gradient"):
        train(ppo(tmp_path))
    one = ppo(tmp_path, "one", train={"steps": 1}, critic_updates=2)
    (row,) = metrics(train(one))
    assert (row["critic/nonfinite"], row["actor/nonfinite"]) == (1, 0)


def test_a_ruined_critic_is_named(tmp_path: Path) -> None:
    config = ppo(tmp_path, train={"steps": 2})
    with open_run(config) as run:
        head = run.learners["critic"].engine.module.lm.get_output_embeddings()
        head.weight.data[0, -1] = torch.inf
        with pytest.raises(RunFailed, match=r"infinity in parameter lm_head\.weight of the critic"):
            run.check_weights()
