"""Sampling from the tokens that top_k, top_p and min_p keep: which they are, and the logprobs among them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from rollout_models import PROMPTS, VOCABULARY, requests, save, start, start_process, tiny_model
from torch import Tensor

from rlplus.common.kept_sets import KeptSets
from rlplus.train.data import Example, byte_tokenizer
from rlplus.train.rollout import Completion, RolloutEngine, RunFailed, Sampling, check_kept, make_respond
from rlplus.train.rollout.transformers_engine import draw_kept

OPTIONS = [
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.1},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 1000, "top_p": 0.999},
]


def kept_by_the_definition(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The kept tokens and their logprobs, in Python's floats, a token at a time: min_p, top_k, top_p, in this order."""
    weight = [math.exp(z / sampling.temperature - max(logits) / sampling.temperature) for z in logits]
    likeliest = sorted(range(len(weight)), key=lambda token: -weight[token])
    likeliest = [token for token in likeliest if weight[token] >= sampling.min_p][: sampling.top_k]
    total, reached, kept = sum(weight[token] for token in likeliest), 0.0, []
    for token in likeliest:
        if reached < sampling.top_p:
            kept.append(token)
        reached += weight[token] / total
    whole = sum(weight[token] for token in kept)
    return {token: math.log(weight[token] / whole) for token in kept}


def sets(kept: KeptSets) -> list[list[int]]:
    start, found = 0, []
    for count in kept.counts:
        found.append(kept.tokens[start : start + count].tolist())
        start += count
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_the_kept_tokens_and_the_logprobs_among_them(options: dict[str, Any]) -> None:
    sampling = Sampling(0.7, 0, **options)
    logits = 3 * torch.randn(200, 60, generator=torch.Generator().manual_seed(0))
    token, logprob, order, counts = draw_kept(logits, sampling)
    sizes = set()
    for row, drawn, value, tokens, count in zip(
        logits.tolist(), token.tolist(), logprob.tolist(), order.tolist(), counts.tolist(), strict=True
    ):
        want = kept_by_the_definition(row, sampling)
        assert tokens[:count] == list(want)
        assert value == pytest.approx(want[drawn], rel=1e-5, abs=1e-6)
        sizes.add(count)
    assert len(sizes) > 1 or options == {"top_k": 5}


def only(probabilities: list[float], temperature: float = 1.0, **options: Any) -> list[int]:
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float()[None]
    *_, order, counts = draw_kept(logits, Sampling(temperature, 0, **options))
    return order[0, : int(counts)].tolist()


def test_the_order_is_that_of_vllm() -> None:
    """Each of these differs from what another order of the same options keeps."""
    assert only([0.1, 0.4, 0.3, 0.2], top_k=3, top_p=0.75) == [1, 2], "top_p shares what top_k has left"
    assert only([0.1, 0.4, 0.3, 0.2], top_k=4, top_p=0.75) == [1, 2, 3]
    assert only([0.1, 0.4, 0.3, 0.2], top_k=4, top_p=0.75, min_p=0.6) == [1, 2], "top_p shares what min_p has left"
    assert only([0.6, 0.3, 0.1], 1.0, top_k=3, top_p=0.55) == [0]
    assert only([0.6, 0.3, 0.1], 2.0, top_k=3, top_p=0.55) == [0, 1], "the temperature comes first"
    assert only([0.6, 0.3, 0.1], 2.0, top_k=3, min_p=0.45) == [0, 1]
    assert only([0.6, 0.3, 0.1], 1.0, top_k=3, min_p=0.45) == [0, 1]
    assert only([0.6, 0.26, 0.14], 2.0, top_k=3, min_p=0.45) == [0, 1, 2]


def test_equal_logits_are_kept_to_the_number_and_forbidden_ones_never() -> None:
    assert len(only([0.25] * 4, top_k=2)) == 2
    assert sorted(only([0.5, 0.0, 0.5, 0.0], top_k=3)) == [0, 2]
    assert only([1.0, 1e-30, 1e-35], top_k=3) == [0, 1, 2], "top_p 1 drops none, however small"


def test_every_kept_token_has_its_share_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For evenly spaced numbers each token is drawn in proportion to its probability, to within one."""
    draws = 20_000
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: uniform.view(*shape))
    logits = torch.tensor([1.0, -2.0, 3.0, -math.inf, 2.9, -8.0, 0.5])
    sampling = Sampling(0.7, 0, top_k=5, top_p=0.99)
    counts = draw_kept(logits.expand(draws, -1), sampling)[0].bincount(minlength=len(logits))
    want = torch.zeros(len(logits), dtype=torch.float64)
    for token, logprob in kept_by_the_definition(logits.tolist(), sampling).items():
        want[token] = draws * math.exp(logprob)
    assert 2 <= int((want > 0).sum()) <= 4
    assert (counts - want).abs().max() <= 1.01
    assert not counts[want == 0].any()


@pytest.fixture(scope="module", params=quick.first(1, ["colocated", "process"]))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    path = tmp_path_factory.mktemp("engine")
    save(tiny_model(tied=False), path)
    engine = start("transformers", path) if request.param == "colocated" else start_process("transformers", path)
    engine.push_weights(tiny_model(tied=False).named_parameters(), 1)
    yield engine
    engine.close()


def dense_logits(prompt: list[int], response: list[int]) -> Tensor:
    with torch.no_grad():
        return tiny_model(tied=False)(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("options", quick.first(2, [OPTIONS[3], OPTIONS[1], OPTIONS[0], OPTIONS[2]]))
def test_an_engines_logprobs_are_of_the_tokens_it_kept(engine: RolloutEngine, options: dict[str, Any]) -> None:
    """Sequences of different lengths leave the batch at different times."""
    sampling = Sampling(0.8, 3, **options)
    groups = check_kept(engine.generate(requests(PROMPTS, [3, 4, 2], 16), sampling), sampling, engine.name)
    assert groups == engine.generate(requests(PROMPTS, [3, 4, 2], 16), sampling)
    sizes = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            assert c.kept is not None
            rows = dense_logits(prompt, c.tokens).tolist()
            for row, token, logprob, kept in zip(rows, c.tokens, c.logprob, sets(c.kept), strict=True):
                want = kept_by_the_definition(row, sampling)
                assert set(kept) == set(want)
                assert logprob == pytest.approx(want[token], abs=1e-4)
                sizes.add(len(kept))
    assert max(sizes) < VOCABULARY


def test_without_top_k_nothing_is_kept(engine: RolloutEngine) -> None:
    groups = engine.generate(requests(PROMPTS, [2, 2, 2], 4), Sampling(0.8, 3))
    assert all(c.kept is None for group in groups for c in group)
    with pytest.raises(ValueError, match="want a temperature above 0 with top_k 4; got 0, the likeliest token"):
        engine.generate(requests(PROMPTS, [2, 2, 2], 4), Sampling(0.0, 3, top_k=4))


def test_a_rollout_functions_tokens_have_the_engines_sets(
    engine: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"turns_of_{type(engine).__name__}"  # a module's name is one file's
    (tmp_path / f"{module}.py").write_text(
        "def turns(sampler, responses):\n"
        "    for response in sampler(responses, max_tokens=3):\n"
        "        response.insert([7, 9])\n"
        "    sampler(responses)\n"
    )
    monkeypatch.chdir(tmp_path)
    respond = make_respond(f"{module}.py:turns", byte_tokenizer(), VOCABULARY)
    sampling = Sampling(0.8, 3, top_k=6, top_p=0.9)
    tasks = [Example(0, tuple(prompt), "", None) for prompt in PROMPTS]
    groups = check_kept(respond(engine, tasks, requests(PROMPTS, [2, 2, 2], 12), sampling), sampling, engine.name)
    inserted = 0
    for c in (c for group in groups for c in group):
        assert c.kept is not None
        assert c.trained is not None
        assert [bool(kept) for kept in sets(c.kept)] == c.trained
        inserted += c.trained.count(False)
    assert inserted
    whole = respond(engine, tasks, requests(PROMPTS, [2, 2, 2], 12), Sampling(0.8, 3))
    assert all(c.kept is None for group in whole for c in group)


WRONG = [
    (None, "gave none"),
    (KeptSets.of([[5]]), "gave 1 sets of 1 tokens together in a list of 1"),
    (KeptSets.of([[5], [6, 8]]), r"gave \[6, 8\] for token 7, number 2"),
    (KeptSets.of([[], [7]]), r"gave \[\] for token 5, number 1"),
    (KeptSets.of([[5, 5], [7]]), r"gave \[5, 5\] for token 5, number 1"),
]


@pytest.mark.parametrize(("kept", "message"), WRONG, ids=[message for _, message in WRONG])
def test_an_engine_that_does_not_return_what_it_kept_is_refused(kept: KeptSets | None, message: str) -> None:
    sampling = Sampling(1.0, 0, top_k=4, top_p=0.5)
    group = [Completion([5, 7], [-0.1, -0.2], False, kept=KeptSets.of([[5, 6], [3, 7]]))]
    assert check_kept([group], sampling, "my") == [group]
    with pytest.raises(RunFailed, match=f"top_k 4, top_p 0.5, min_p 0 kept, .* the my engine {message}"):
        check_kept([group, [Completion([5, 7], [-0.1, -0.2], False, kept=kept)]], sampling, "my")


def test_inserted_tokens_have_no_set() -> None:
    sampling = Sampling(1.0, 0, top_k=4)
    kept = KeptSets.of([[5, 6], [], [7, 2]])
    check_kept([[Completion([5, 9, 7], [-0.1, math.nan, -0.2], False, [True, False, True], kept=kept)]], sampling, "my")
    with pytest.raises(RunFailed, match=r"gave \[\] for token 9, number 2"):
        check_kept([[Completion([5, 9, 7], [-0.1, -0.3, -0.2], False, kept=kept)]], sampling, "my")
