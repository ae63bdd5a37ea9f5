"""Experts that the transformers engine returns: the same as in a plain pass over prompt and response."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick
from mixtures import FAMILIES, chosen_by, mixture
from rollout_models import PROMPTS, requests, save, start, start_process, tiny_model

from rlplus.common.chosen_experts import fault
from rlplus.train.config import RolloutConfig
from rlplus.train.data import Example, byte_tokenizer
from rlplus.train.rollout import Completion, RunFailed, Sampling, check_experts, make_respond
from rlplus.train.rollout.transformers_engine import TransformersEngine

SAMPLING = Sampling(1.0, 7, experts=True)
COUNTS, LONGEST = [3, 0, 2], 12


def engine_of(path: Path, **changes: Any) -> TransformersEngine:
    config = RolloutConfig(engine="transformers", max_response_length=16, routing_replay=True, **changes)
    return TransformersEngine(config, str(path), dtype="float32", max_model_len=64, end_ids=[1], pad_token_id=0)


def check(model: Any, groups: list[list[Completion]]) -> None:
    """All experts are the plain model's; where two are all but equal, the engine's rounding may decide."""
    lengths, clear = set(), 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            want, margin = chosen_by(model, [*prompt, *c.tokens[:-1]])
            assert c.experts is not None
            assert c.experts.dtype == np.uint8
            assert fault(c.experts, len(prompt), len(c.tokens)) is None
            sure = (margin > 1e-4).numpy()
            assert (np.sort(c.experts)[sure] == np.sort(want)[sure]).all()
            clear += int(sure.sum())
            lengths.add(len(c.tokens))
    assert clear > 100
    assert len(lengths) > 1, "want sequences that leave the batch early"


@pytest.mark.parametrize("family", quick.first(2, FAMILIES))
def test_the_experts_are_those_of_a_plain_pass(tmp_path: Path, family: str) -> None:
    """Prompts of several lengths in one batch, several copies, and responses that end at several lengths."""
    model = mixture(family)
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path)
    asked = [
        dataclasses.replace(r, max_tokens=n)
        for r, n in zip(requests(PROMPTS, COUNTS, LONGEST), (12, 1, 5), strict=True)
    ]
    groups = engine.generate(asked, SAMPLING)
    check(model, groups)
    again = engine.generate(asked, dataclasses.replace(SAMPLING, experts=False))
    assert [[c.tokens for c in group] for group in again] == [[c.tokens for c in group] for group in groups]
    assert all(c.experts is None for group in again for c in group)


def test_batches_that_the_cache_divides(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path)
    engine._cache_bytes = 2 * 21 * (engine._bytes_per_token + 100)
    check(model, engine.generate(requests(PROMPTS, [3, 2, 2], LONGEST), SAMPLING))


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    engine = start_process("transformers", tmp_path, routing_replay=True)
    try:
        check(model, engine.generate(requests(PROMPTS, COUNTS, LONGEST), SAMPLING))
    finally:
        engine.close()


def test_experts_of_a_response_with_inserted_tokens(tmp_path: Path) -> None:
    """A function's: the tokens before the last sampled one have theirs, inserted ones too."""
    model = mixture()
    model.save_pretrained(tmp_path)
    (tmp_path / "insert.py").write_text(
        "def insert(sampler, responses):\n"
        "    for response in sampler(responses, max_tokens=3):\n"
        "        response.insert([9, 9])\n"
        "    for response in sampler(responses, max_tokens=2):\n"
        "        response.insert([8, 8, 8])\n"
    )
    respond = make_respond(f"{tmp_path / 'insert.py'}:insert", byte_tokenizer(), 53)
    tasks = [Example(i, prompt, "", None) for i, prompt in enumerate(PROMPTS)]
    asked = requests(PROMPTS, [2, 2, 2], LONGEST)
    groups = check_experts(respond(engine_of(tmp_path), tasks, asked, SAMPLING), asked, SAMPLING, "engine")
    inserted = 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            assert c.experts is not None
            want, margin = chosen_by(model, [*prompt, *c.tokens])
            rows, sure = len(c.experts), (margin > 1e-4).numpy()
            assert (np.sort(c.experts)[sure[:rows]] == np.sort(want)[:rows][sure[:rows]]).all()
            inserted += rows == len(prompt) + len(c.tokens) - 4
    assert inserted > 2, "the last inserted tokens were never read"


def completion(experts: Any, trained: list[bool] | None = None) -> list[list[Completion]]:
    return [[Completion([4, 5, 6], [0.0] * 3, False, trained, experts=experts)]]


@pytest.mark.parametrize(
    ("experts", "trained", "what"),
    [
        (None, None, "none"),
        (np.zeros((3, 2), np.uint8), None, r"uint8 of shape \(3, 2\)"),
        (np.zeros((4, 3, 2), np.int64), None, r"int64 of shape \(4, 3, 2\)"),
        (np.zeros((3, 3, 2), np.uint8), None, "3 rows"),
        (np.zeros((5, 3, 2), np.uint8), None, "5 rows"),
        (np.zeros((2, 3, 2), np.uint8), [False, True, False], "2 rows"),
    ],
)
def test_an_engine_without_experts_is_refused(experts: Any, trained: Any, what: str) -> None:
    asked = requests([[2, 3]], [1], 3)
    message = (
        r"want the experts of each layer \(rollout.routing_replay\) for all tokens of a prompt of 2 tokens and its "
        f"response of 3 but the last; the x engine gave {what}"
    )
    with pytest.raises(RunFailed, match=message):
        check_experts(completion(experts, trained), asked, SAMPLING, "x")
    check_experts(completion(experts, trained), asked, Sampling(1.0, 0), "x")


@pytest.mark.parametrize(("rows", "trained"), [(4, None), (3, [True, True, False]), (4, [False] * 3), (0, [False] * 3)])
def test_experts_that_suffice(rows: int, trained: Any) -> None:
    """Nothing has to be known of tokens behind which no token is trained on."""
    groups = completion(np.zeros((rows, 3, 2), np.uint8), trained)
    assert check_experts(groups, requests([[2, 3]], [1], 3), SAMPLING, "x") is groups


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    save(tiny_model(tied=True), tmp_path)
    with pytest.raises(ValueError, match=r"want a mixture of experts of Mixtral, .*; got Qwen2ForCausalLM"):
        engine_of(tmp_path)
    with pytest.raises(ValueError, match=r"want an engine that was made with rollout\.routing_replay"):
        start("transformers", tmp_path).generate(requests(PROMPTS, COUNTS, LONGEST), SAMPLING)
