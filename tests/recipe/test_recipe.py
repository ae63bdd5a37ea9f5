"""Everything a recipe may do in a step: values per token, several draws, further updates, state, further learners."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
import torch.distributed as dist
from engine_runs import same
from recipe_cases import draw_rewards
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples, check_gradients, naive_loss, packed

from rlplus.common import agree
from rlplus.common.lazy import import_function
from rlplus.loss import PolicyLoss
from rlplus.loss.objective.objective import AdvantageEstimator
from rlplus.train import checkpoint
from rlplus.train.algorithm import ALGORITHMS, Algorithm
from rlplus.train.config import Config, load_config
from rlplus.train.data import Example, Sample
from rlplus.train.learner import Policy
from rlplus.train.learner.resharding import load_resharded
from rlplus.train.recipe import Ask, Batch, Recipe, Update, make_recipe, set_advantages
from rlplus.train.trainer import Interrupted, Run, train


def spelt_out(sample: Sample) -> Sample:
    """The same values, one per token."""
    tokens = len(sample.response)
    assert isinstance(sample.external, bool)
    return replace(sample, external=[sample.external] * tokens, advantage=[sample.advantage] * tokens)


@pytest.mark.parametrize("preset", ["rlplus", "rlplus-official", "grpo-sft", "dr-grpo", "gspo"])
def test_equal_values_of_all_tokens_are_those_of_the_response_bit_for_bit(run: Run, preset: str) -> None:
    algorithm = ALGORITHMS[preset]
    samples = batch_of_samples()
    set_advantages(samples, algorithm)
    want = packed(run, samples, algorithm=algorithm)
    got = packed(run, [spelt_out(sample) for sample in samples], algorithm=algorithm)
    assert len(got) == len(want) >= 2
    for one, other in zip(got, want, strict=True):
        for name, value in vars(other).items():
            same_value = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            unknown = name in ("engine_logprob", "behavior_logprob")  # NaN
            assert unknown or same_value(getattr(one, name), value), name


@pytest.mark.parametrize("estimator", get_args(AdvantageEstimator))
def test_a_rank_gets_the_advantages_of_its_own_samples(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that one rank alone would get for the samples of both, who name their groups alike."""
    algorithm = replace(ALGORITHMS["grpo"], advantage=estimator, advantage_k=2)
    ranks = [batch_of_samples(), batch_of_samples(1)[:12]]
    for i, sample in enumerate(sample for own in ranks for sample in own):
        sample.reward = float(i % 3 == 0 or i % 5 == 2)
    alone = [replace(s, group=s.group + 10 * rank) for rank, own in enumerate(ranks) for s in own]
    sent: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agree, "gathered", lambda rows: (sent.append(rows), [rows])[1])
    for own in (*ranks, alone):
        set_advantages(own, algorithm)
    monkeypatch.setattr(agree, "gathered", lambda rows: sent[:2])
    for rank, own in enumerate(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        set_advantages(own, algorithm)
    got = [s.advantage for own in ranks for s in own]
    assert got == pytest.approx([s.advantage for s in alone], rel=1e-12)
    assert got[: len(ranks[1])] != pytest.approx(got[len(ranks[0]) :])


def test_values_of_single_tokens_reach_the_gradient(run: Run) -> None:
    """Responses that begin with a demonstrated prefix, an advantage for each token: the gradient in float64."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for i, sample in enumerate(batch_of_samples()):
        tokens = len(sample.response)
        advantage = torch.randn(tokens, generator=generator).tolist()
        samples.append(replace(sample, external=[j < i % 3 for j in range(tokens)], advantage=advantage))
    assert len({sample.demonstration for sample in samples}) == 2, "some prefixes are whole responses"
    lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
    tokens = sum(len(sample.response) for sample in samples)
    for s in samples:
        (naive_loss(lm, s, torch.tensor(s.advantage).double(), torch.tensor(s.external)) / tokens).backward()
    model = run.policy.engine.module
    model.zero_grad()
    for batch in packed(run, samples):
        model(batch, run.policy._loss_op(ALGORITHMS["rlplus"].objective, batch)).loss.backward()
    check_gradients(model, {name: p.grad for name, p in lm.named_parameters()})


def test_denominators_count_the_tokens_of_either_kind(run: Run) -> None:
    """With demonstrations apart: a response with tokens of both kinds is a sequence of each."""
    samples = [
        Sample([1], [2, 3, 4, 5], 0, [True, False, False, False], False, None, advantage=1.0),
        Sample([1], [6, 7], 0, False, False, None, advantage=-1.0),
    ]
    for reduction, want in (("token", ([1.0], [1 / 5] * 5)), ("sequence", ([1.0], [1 / 6] * 3 + [1 / 4] * 2))):
        algorithm = replace(ALGORITHMS["grpo-sft"], reduction=reduction, external_reduction=None)
        (batch,) = packed(run, samples, algorithm=algorithm)
        for external, weights in zip((True, False), want, strict=True):
            got = batch.token_weight[batch.external == external]
            torch.testing.assert_close(got, torch.tensor(weights), rtol=0, atol=1e-7)


def test_members_of_a_group_may_have_denominators_of_their_own(run: Run) -> None:
    """RL-PLUS eq. 7 as a sum of two means: over the sampled tokens, and over the demonstrated ones."""
    samples = [
        Sample([1], [2, 3, 4], 0, True, False, None, advantage=1.0),
        Sample([1], [5, 6, 7, 8, 9], 0, False, False, None, advantage=-1.0),
    ]
    own = {None: [1 / 8] * 8, "token": [1 / 3] * 3 + [1 / 5] * 5, "constant": [1 / 8] * 3 + [1 / 5] * 5}
    for external_reduction, want in own.items():
        algorithm = replace(ALGORITHMS["rlplus"], external_reduction=external_reduction)
        (batch,) = packed(run, samples, algorithm=algorithm)
        got = torch.cat([batch.token_weight[batch.external], batch.token_weight[~batch.external]])
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-7)


def test_a_response_is_kept_for_one_token_with_a_gradient(run: Run) -> None:
    algorithm = replace(ALGORITHMS["sft"], demonstrations="apart")
    silent = Sample([1], [2, 3, 4], 0, False, False, None, advantage=[0.0, 0.0, 0.0])
    assert all(batch.forward_only for batch in packed(run, [silent], algorithm=algorithm))
    for changes in ({"advantage": [0.0, 0.0, 1.0]}, {"external": [True, False, False]}):
        (batch,) = packed(run, [replace(silent, **changes)], algorithm=algorithm)
        assert not batch.forward_only
        assert len(batch.target) == 3


# ---- recipes in a run


@pytest.fixture(autouse=True)
def some_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


class Interleaved(Recipe):
    """After the rollouts' update one on demonstrations of unsolved prompts, two at a time; the others wait."""

    kill_in_step = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.waiting: list[Sample] = []
        self.steps = 0
        self.seen: list[tuple[Algorithm, float | None]] = []

    def ask(self, examples: Sequence[Example]) -> list[Ask]:
        return [Ask(self.config.rollout.group_size, False) for _ in examples]

    def updates(self, batch: Batch) -> list[Update]:
        self.steps += 1
        if self.steps == self.kill_in_step:
            os.kill(os.getpid(), signal.SIGTERM)
        solved = {sample.group for sample in batch.samples if sample.reward}
        for group, example in enumerate(batch.examples):
            if group not in solved and example.demonstration is not None:
                self.waiting.append(Sample(example.prompt, example.demonstration, 0, True, False, None))
        hard, self.waiting = self.waiting[:2], self.waiting[2:]
        return [*super().updates(batch), Update(hard, ALGORITHMS["sft"])]

    def saw(self, update: Update, outputs: Sequence[PolicyLoss], grad_norm: float | None) -> None:
        assert sum(float(out.stats["tokens"]) for out in outputs) > 0
        self.seen.append((update.algorithm, grad_norm))

    def state(self) -> Any:
        return self.steps, list(self.waiting)

    def restore(self, state: Any) -> None:
        self.steps, waiting = state
        self.waiting = list(waiting)


def test_a_recipe_with_updates_and_a_state_of_its_own_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the third step is given up after the recipe has changed its state."""
    made: list[Interleaved] = []
    monkeypatch.setattr(
        "rlplus.train.trainer.run_parts.make_recipe", lambda config: made.append(Interleaved(config)) or made[-1]
    )
    steps = {"steps": 4, "prompts_per_step": 6, "seed": 1}
    sections: dict[str, Any] = {"algorithm": {"preset": "grpo"}, "train": steps}
    whole = train(run_config(tmp_path, "whole", **sections))
    algorithms = [algorithm for algorithm, _ in made[0].seen]
    assert algorithms.count(ALGORITHMS["sft"]) == 4
    assert ALGORITHMS["grpo"] in algorithms
    assert all(norm is not None and norm > 0 for _, norm in made[0].seen)
    assert len(made[0].waiting) > 2
    rows = metrics(whole)
    assert all(row["actor/loss_external"] > 0 and "reward/external" not in row for row in rows)
    config = run_config(tmp_path, "parts", **sections)
    with monkeypatch.context() as patch:
        patch.setattr(Interleaved, "kill_in_step", 3)
        with pytest.raises(Interrupted):
            train(config)
    assert (Path(config.output_dir) / "checkpoints/latest").read_text() == "step-000002"
    train(config, resume="newest")
    assert same(whole, Path(config.output_dir))
    assert metrics(Path(config.output_dir)) == rows


class Twice(Recipe):
    """Two draws per step, and the second one's groups behind the first one's."""

    drawn: ClassVar[list[list[int]]] = []
    kill = False

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        first, second = draw(), draw()
        self.drawn.append([example.index for batch in (first, second) for example in batch.examples])
        responses = [tuple(sample.response) for batch in (first, second) for sample in batch.samples]
        assert len(set(responses)) > len(responses) / 2, "the draws have seeds of their own"
        if self.kill and len(self.drawn) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return Batch(second.examples, second.samples, first.seconds + second.seconds)


def test_a_step_of_several_draws_is_given_up_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_recipe", Twice)
    config = run_config(tmp_path, "parts", train={"prompts_per_step": 2, "steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(Twice, "kill", True)
        with pytest.raises(Interrupted):
            train(config)
    train(config, resume="newest")
    parts, Twice.drawn[:] = list(Twice.drawn), []
    whole = train(run_config(tmp_path, "whole", train={"prompts_per_step": 2, "steps": 3}))
    assert parts == [*Twice.drawn[:2], *Twice.drawn[1:]], "the second step's prompts are drawn again"
    assert [sorted(four) for four in Twice.drawn] != [sorted(Twice.drawn[0])] * 3
    assert same(whole, Path(config.output_dir))
    assert metrics(whole) == metrics(Path(config.output_dir))
    assert metrics(whole)[-1]["generated_tokens"] > 3 * 2 * 3  # both draws' are counted


def test_every_learner_is_saved_and_restored(run: Run, tmp_path: Path) -> None:
    """Weights and optimizer: the next step of each is the one that it would have taken."""
    model = str(run.folder.path / "scratch")
    learners = {name: Policy(run.config, model, run.policy.model_config) for name in ("policy", "critic")}
    engines = {name: learner.engine for name, learner in learners.items()}
    objective = ALGORITHMS["rlplus"].objective

    def update(name: str, seed: int) -> dict[str, torch.Tensor]:
        samples = batch_of_samples(seed)
        set_advantages(samples, ALGORITHMS["rlplus"])
        learners[name].backward(packed(run, samples), learners[name].loss_of(objective))
        assert learners[name].step()
        return {key: weight.clone() for key, weight in learners[name].weights()}

    update("policy", 0), update("critic", 1)
    saved = checkpoint.save(engines, tmp_path / "checkpoints", 1, {}, keep=1)
    checkpoint.verify(saved)
    want = {name: update(name, 2) for name in learners}
    assert not all(torch.equal(want["policy"][key], want["critic"][key]) for key in want["policy"])
    checkpoint.load(engines, saved, load_resharded)
    for name, weights in want.items():
        again = update(name, 2)
        assert all(torch.equal(again[key], weight) for key, weight in weights.items())
    (saved / "critic/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"critic/mp_rank_00_model_states.pt is damaged: .*No such file"):
        checkpoint.verify(saved)


def test_a_recipe_of_a_users_file_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manual's, with options of its own: one pair of each group of four."""
    page = Path(__file__).parents[2] / "docs/extending.md"
    code = page.read_text().split("```python\n# pods.py\n")[1].split("```")[0]
    counted = 'print(len(batch.samples), file=open("kept.txt", "a"))'
    (tmp_path / "pods_of_users.py").write_text(code.replace("return batch", f"{counted}\n        return batch"))
    (tmp_path / "no_recipe.py").write_text(
        "from rlplus.train.algorithm import RecipeOptions\nclass Mine:\n    Options = RecipeOptions\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = {"name": "pods_of_users.py:Extremes", "pairs": 1}
    config = run_config(tmp_path, algorithm={"preset": "grpo", "recipe": recipe}, train={"steps": 1})
    folder = train(config)
    assert (tmp_path / "kept.txt").read_text() == "8\n"
    assert load_config(folder / "config.yaml") == config
    state = checkpoint.read_state(folder / "checkpoints/step-000001")
    assert "the code of algorithm.recipe.name" in state["surroundings"]
    for wrong, message in (
        ({"name": "pods_of_users.py:Extremes", "pair": 1}, "unknown key; nearest: algorithm.recipe.pairs"),
        ({"name": "pods_of_users.py:Extremes", "pairs": 0}, "greater than or equal to 1"),
        ({"name": "pods_of_users.py:Extreme"}, "has no attribute 'Extreme'"),
        ({"name": "pods.py:Extremes"}, "there is no file"),
    ):
        with pytest.raises(ValueError, match=message):
            run_config(tmp_path, algorithm={"preset": "grpo", "recipe": wrong})
    config = run_config(tmp_path, algorithm={"preset": "grpo", "recipe": {"name": "no_recipe.py:Mine"}})
    with pytest.raises(ValueError, match=r"want a subclass of rlplus.train.recipe.Recipe; no_recipe.py:Mine is"):
        make_recipe(config)


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("class Mine: ...\n")
    with pytest.raises(ImportError, match=r"json.py has the name of another module"):
        import_function(f"{tmp_path}/json.py:Mine")
