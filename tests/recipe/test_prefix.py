"""The prefix recipe: how long prefixes are, what is sampled behind them, the loss, and that a run resumes."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import whole_groups
from recipe_cases import check_gradient, drawn_batch, recipe_of, resumed, tokens_of
from torch import Tensor
from trainer_runs import run_config
from update_cases import packed

from rlplus.train.data import Example, per_token
from rlplus.train.learner.batch import set_statistics
from rlplus.train.recipe import Ask, Recipe
from rlplus.train.recipe.prefix import PrefixRecipe
from rlplus.train.rollout import Completion, respond
from rlplus.train.trainer import Run


def prefix_recipe(folder: Path, **options: Any) -> Recipe:
    rollout = {"engine": "transformers", "group_size": 4, "max_response_length": 48}
    return recipe_of(folder, algorithm={"preset": "uft", "recipe": options}, rollout=rollout)


def step(recipe: PrefixRecipe, examples: list[Example]) -> list[Ask]:
    """The requests of a step."""
    asked: list[list[Ask]] = []
    recipe.collect(lambda: asked.append(recipe.ask(examples)))  # type: ignore[arg-type,return-value,func-returns-value]
    return asked[0]


LONG = Example(3, (1, 2), "", tuple(range(10, 51)))  # 40 tokens and the end


def lengths(recipe: Recipe, example: Example = LONG) -> list[int]:
    (ask,) = step(recipe, [example])
    assert (ask.rollouts, ask.demonstrated) == (4, False)
    assert example.demonstration is not None
    assert all(tuple(prefix) == example.demonstration[: len(prefix)] for prefix in ask.prefixes)
    return [len(prefix) for prefix in ask.prefixes]


def test_shares_of_a_demonstration_follow_their_schedule(run: Run, tmp_path: Path) -> None:
    cosine = prefix_recipe(tmp_path, schedule="cosine", low=0.05, high=0.95, steps=4, members=2)
    want = [round(40 * (0.05 + 0.45 * (1 + math.cos(math.pi * t / 4)))) for t in range(1, 5)]
    assert [lengths(cosine) for _ in range(6)] == [[n, n] for n in want] + [[0, 0]] * 2
    assert want == [33, 20, 7, 2]
    linear = prefix_recipe(tmp_path, schedule="linear", low=0.0, high=0.8, steps=4, members=1)
    assert [lengths(linear) for _ in range(6)] == [[24], [16], [8], [0], [0], [0]]
    fixed = prefix_recipe(tmp_path, schedule="fixed", low=0.1, high=0.7, members=3)
    assert [lengths(fixed) for _ in range(3)] == [[28, 16, 4]] * 3
    assert lengths(prefix_recipe(tmp_path, schedule="fixed", low=0.1, high=0.7, members=1)) == [28]
    assert lengths(prefix_recipe(tmp_path, schedule="fixed", low=1.0, high=1.0)) == [40] * 4  # all but the end
    uniform = prefix_recipe(tmp_path, schedule="random", low=0.2, high=0.6)
    drawn = [lengths(uniform) for _ in range(200)]
    assert all(len(set(members)) == 1 for members in drawn)
    assert (min(drawn)[0], max(drawn)[0]) == (8, 24)
    assert sum(members[0] for members in drawn) / 200 == pytest.approx(16, abs=1)


def test_a_window_of_shares_opens_downwards_and_stays_open(run: Run, tmp_path: Path) -> None:
    """Uniform between low(t), by cosine from high to low, and high, one draw for a prompt's members."""
    recipe = prefix_recipe(tmp_path, schedule="window", low=0.1, high=0.9, steps=4, members=2)
    examples = [replace(LONG, index=i) for i in range(400)]
    for t in (1, 2, 3, 4, 5, 50):
        recipe.restore(t - 1)
        asks = step(recipe, examples)
        assert all(len(ask.prefixes) == 2 and len(ask.prefixes[0]) == len(ask.prefixes[1]) for ask in asks)
        drawn = [len(ask.prefixes[0]) / 40 for ask in asks]
        low = 0.1 + 0.4 * (1 + math.cos(math.pi * min(t, 4) / 4))
        assert (min(drawn), max(drawn)) == pytest.approx((low, 0.9), abs=0.025)
        assert sum(drawn) / 400 == pytest.approx((low + 0.9) / 2, abs=4 * (0.9 - low) / math.sqrt(12 * 400) + 0.01)


def test_hints_are_as_many_segments_as_a_binomial_variable(run: Run, tmp_path: Path) -> None:
    """1,000 prompts in step 100 of 300: the frequencies of 0 to 5 segments, and of fewer in a short demonstration."""
    recipe = prefix_recipe(tmp_path)
    recipe.restore(99)
    examples = [replace(LONG, index=i) for i in range(1000)]
    asks = step(recipe, examples)
    assert all(len(ask.prefixes) == 4 and len(set(map(len, ask.prefixes))) == 1 for ask in asks)
    counts = Counter(len(ask.prefixes[0]) for ask in asks)
    p = 0.05 + 0.45 * (1 + math.cos(math.pi / 3))
    assert p == pytest.approx(0.725)
    want = {8 * k: 1000 * math.comb(5, k) * p**k * (1 - p) ** (5 - k) for k in range(6)}
    assert counts.keys() <= want.keys()
    for length, expected in want.items():
        assert abs(counts[length] - expected) <= 4 * math.sqrt(expected) + 1
    share = recipe.metrics()["prefix/share"]
    assert share == (4 * sum(length * count for length, count in counts.items()), 4 * 40_000)
    short = [replace(example, demonstration=(7, 8, 9, 5)) for example in examples]
    recipe.restore(99)
    counts = Counter(len(ask.prefixes[0]) for ask in step(recipe, short))
    assert abs(counts[3] - 1000 * p**3) <= 4 * math.sqrt(1000 * p**3)
    recipe.restore(300)
    assert lengths(recipe) == [0] * 4


def test_draws_of_prefixes_are_those_of_seed_step_and_prompt(run: Run, tmp_path: Path) -> None:
    examples = [replace(LONG, index=i) for i in range(20)]
    whole = [ask.prefixes[0] for ask in step(prefix_recipe(tmp_path), examples)]
    halves = [step(prefix_recipe(tmp_path), examples[part::2]) for part in range(2)]  # two ranks draw so
    assert [halves[i % 2][i // 2].prefixes[0] for i in range(20)] == whole
    recipe = prefix_recipe(tmp_path)
    state = recipe.state()
    first, second = step(recipe, examples), step(recipe, examples)
    assert first != second
    recipe.restore(state)
    assert step(recipe, examples) == first
    assert step(recipe, examples) == second


def test_a_prompt_without_a_demonstration_has_no_prefix(run: Run, tmp_path: Path) -> None:
    recipe = prefix_recipe(tmp_path, schedule="fixed")
    (ask, other) = step(recipe, [replace(LONG, demonstration=None), replace(LONG, demonstration=(5,))])
    assert [len(prefix) for prefix in (*ask.prefixes, *other.prefixes)] == [0] * 8
    assert recipe.metrics() == {"prefix/share": (0, 0)}


class Echo:
    """An engine whose responses are as long as they may be; it notes what it is asked."""

    name = "echo"

    def generate(self, requests: Any, sampling: Any) -> Any:
        self.asked = [(request.prompt, request.n, request.max_tokens) for request in requests]
        return [
            [Completion([100 + i + j] * limit, [-0.5] * limit, True) for j in range(count)]
            for i, (_, count, limit) in enumerate(self.asked)
        ]


def test_prefixes_are_prompts_of_the_engine_and_parts_of_responses(run: Run, tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"engine": "transformers", "group_size": 4, "max_response_length": 8})
    examples = [Example(i, (i + 1,), "", (20, 21, 22, 5), demonstration_reward=1.0) for i in range(3)]
    asks = [Ask(3, False, [(20, 21), (20, 21)]), Ask(2, True), Ask(3, False, [(20,), (), (20, 21, 22)])]
    engine: Any = Echo()
    samples = whole_groups(engine, examples, asks, config, respond, seed=0)
    requests = [((1, 20, 21), 2, 6), ((1,), 1, 8), ((2,), 2, 8), ((3, 20), 1, 7), ((3,), 1, 8), ((3, 20, 21, 22), 1, 5)]
    assert engine.asked == requests
    assert [(s.group, list(s.prompt)) for s in samples] == [(g, [g + 1]) for g in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    prefixes = [(20, 21), (20, 21), (), (), (), None, (20,), (), (20, 21, 22)]
    for sample, prefix in zip(samples, prefixes, strict=True):
        if prefix is None:
            assert sample.demonstration
            assert sample.reward == 1.0
            continue
        k = len(prefix)
        assert len(sample.response) == 8
        assert tuple(sample.response[:k]) == prefix
        assert min(sample.response[k:]) >= 100
        assert sample.loss_tokens == (8 - k, k)
        assert sample.engine_logprob is not None
        assert [math.isnan(value) for value in sample.engine_logprob] == [True] * k + [False] * (8 - k)
        assert not sample.demonstration
        assert sample.truncated


def test_uft_is_grpo_with_the_likelihood_of_the_hint(run: Run, tmp_path: Path) -> None:
    """PPO's clip, KL and .001 of the hint's mean likelihood, at a policy that has moved by a half of the range."""
    recipe = recipe_of(tmp_path, algorithm={"preset": "uft"})
    drawn = drawn_batch([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
    for i, sample in enumerate(drawn.samples):
        prefix = [7, 8, 9][: i % 3]
        sample.response = [*prefix, *sample.response]
        sample.external = [True] * len(prefix) + [False] * 2
    recipe.credit(drawn)
    high, low, std = 2 / 3, 1 / 3, math.sqrt(1 / 3) + 1e-6  # one against two
    advantage = {(0, 1): low / std, (0, 0): -high / std, (1, 0): 0.0, (2, 1): high / std, (2, 0): -low / std}
    micros = packed(run, drawn.samples, algorithm=recipe.algorithm)
    generator = torch.Generator().manual_seed(0)
    old, ref = [], []
    for micro in micros:
        own = run.policy.logprob(micro)
        micro.old_logprob = own + 0.6 * (torch.rand(own.shape, generator=generator) - 0.5)
        micro.ref_logprob = own + 0.6 * (torch.rand(own.shape, generator=generator) - 0.5)
        old.append(micro.old_logprob.double())
        ref.append(micro.ref_logprob.double())
    chosen = [drawn.samples[i] for micro in micros for i in dict.fromkeys(micro.sequence.tolist())]

    def loss(lm: Any) -> Tensor:
        logp = torch.cat([tokens_of(lm, sample)[0] for sample in chosen])
        hint = torch.tensor([kind for sample in chosen for kind in sample.external])
        A = torch.cat(
            [torch.full((len(sample.response),), advantage[sample.group, sample.reward]) for sample in chosen]
        )
        r, d = (logp - torch.cat(old)).exp(), torch.cat(ref) - logp
        surrogate = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
        assert ((r * A != surrogate) & ~hint).any()
        kl = d.exp() - d - 1
        return (1e-3 * kl - surrogate)[~hint].mean() + 1e-3 * (kl - logp)[hint].mean()

    check_gradient(run, [(micros, recipe.algorithm)], loss)


@pytest.mark.parametrize("moved", [False, True])
def test_prefix_rft_is_dr_grpo_with_the_likeliest_forks_of_a_prefix(run: Run, tmp_path: Path, moved: bool) -> None:
    """arXiv 2507.01679, appendix A.2: a response has one advantage, in its prefix the fifth with the highest entropy.

    Sampled tokens have PPO's clip, with the code's lower bound of 3 A, a prefix has none.
    """
    recipe = recipe_of(tmp_path, algorithm={"preset": "prefix-rft"})
    drawn = drawn_batch([[0, 1, 0], [0, 0, 0], [1, 1, 0]])
    for group in range(3):
        sample = drawn.samples[3 * group]
        sample.response = [7, 8, 9, 10, 11, *sample.response]
        sample.external = [True] * 5 + [False] * 2
    recipe.credit(drawn)
    micros = packed(run, drawn.samples, algorithm=recipe.algorithm)
    statistics = [run.policy.statistics(micro) for micro in micros]
    for micro, (logprob, _) in zip(micros, statistics, strict=True):
        if moved:
            micro.old_logprob = logprob + drift(micro.target)
    set_statistics(micros, statistics, recipe.algorithm, 1)

    def loss(lm: Any) -> Tensor:
        terms, entropies, total = [], [], torch.zeros((), dtype=torch.float64)
        for sample in drawn.samples:
            logp, entropy = tokens_of(lm, sample)
            A = sample.reward - sum(s.reward for s in drawn.samples if s.group == sample.group) / 3
            r = (logp - logp.detach() - moved * drift(torch.tensor(sample.response))).exp()
            shown = 5 if sample.external else 0
            gain = torch.minimum(r[shown:] * A, r[shown:].clamp(0.8, 1.2) * A)
            total = total - (gain if A >= 0 else gain.clamp(min=3 * A)).sum()
            terms.append(-A * r[:shown])
            entropies.append(entropy[:shown].detach())
        chosen = torch.cat(entropies).topk(3).indices
        assert len(torch.cat(entropies)) == 15
        responses, longest = 9, 8
        return (total + torch.cat(terms)[chosen].sum()) / (responses * longest)

    check_gradient(run, [(micros, recipe.algorithm)], loss)


def drift(tokens: Tensor) -> Tensor:
    """How far the policy's logprobs of these tokens have fallen."""
    return 1.5 * tokens.sin()


def test_tokens_without_an_advantage_cannot_lose_it(tmp_path: Path) -> None:
    for external in ("nll", "none"):
        algorithm = {"preset": "prefix-rft", "objective": {"external": external}}
        with pytest.raises(ValueError, match=f"want an algorithm.objective.external that has one; got {external}"):
            run_config(tmp_path, algorithm=algorithm)


@pytest.mark.parametrize("preset", ["uft", "prefix-rft"])
def test_prefixes_are_refused_beside_an_environment(preset: str, tmp_path: Path) -> None:
    rollout = {"environment": {"library": "verifiers", "name": "games"}}
    with pytest.raises(ValueError, match=r"recipe prefix: it does not support rollout\.environment"):
        run_config(tmp_path, algorithm={"preset": preset}, rollout=rollout, data={"columns": ["row"]})


def test_a_prefix_that_is_not_trained_is_as_a_prompt(run: Run, tmp_path: Path) -> None:
    """The same update as if it stood in the prompt; what the rollout itself leaves out stays out."""
    found = []
    for prompted in (False, True):
        recipe = {"name": "prefix", "trained": False}
        algorithm = {"preset": "rlplus", "objective": {"entropy_coef": 0.01}, "recipe": recipe}
        own = recipe_of(tmp_path, algorithm=algorithm)
        drawn = drawn_batch([[0, 1, 0], [1, 0, 0]])
        drawn.samples[1].trained = [True, False]
        for i, sample in enumerate(drawn.samples):
            prefix, rest = [7, 8, 9][: i % 4], sample.response
            if prompted:
                sample.prompt = (*sample.prompt, *prefix)
            elif prefix:
                sample.response = [*prefix, *rest]
                sample.external = [True] * len(prefix) + [False, False]
                sample.trained = [True] * len(prefix) + list(per_token(sample.trained, 2))
        own.credit(drawn)
        found.append([packed(run, [sample], algorithm=own.algorithm)[0] for sample in drawn.samples])
    for i, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one.input_ids, other.input_ids)
        tokens = one.token_weight != 0
        assert tokens.sum() == (1 if i == 1 else 2)
        assert torch.equal(one.rows[tokens], other.rows[other.token_weight != 0])
        assert torch.equal(one.token_weight[tokens], other.token_weight[other.token_weight != 0])
        assert not one.external[tokens].any()


@pytest.mark.slow
def test_a_run_of_prefix_rft_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = {"preset": "prefix-rft", "recipe": {"steps": 12}}
    rows = resumed(tmp_path, monkeypatch, algorithm, PrefixRecipe)
    shares = [row["prefix/share"] for row in rows]
    assert sum(shares[:4]) / 4 > 0.8 > sum(shares[8:]) / 12 > 0.2
    assert all(row["actor/prob_external"] > 0 for row in rows)


def test_a_run_samples_behind_prefixes_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much of a demonstration at first, then less, and nothing after step 12."""
    rows = resumed(tmp_path, monkeypatch, {"preset": "uft", "recipe": {"steps": 12}}, PrefixRecipe)
    shares = [row["prefix/share"] for row in rows]
    assert sum(shares[:4]) / 4 > 0.7 > sum(shares[4:8]) / 4 > 0.3 > sum(shares[8:12]) / 4
    for row, share in zip(rows, shares, strict=True):
        assert (row.get("actor/prob_external", 0.0) > 0) == (share > 0)
        assert row["mismatch/mean"] < 1e-5
        assert row["response_length/max"] <= 8
    assert shares[12:] == [0.0] * 8
