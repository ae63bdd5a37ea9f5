"""The rollout engines, real ones, against the Hugging Face model they are copies of."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from causal_lms import FAMILIES, make
from rollout_models import (
    EOS,
    MAX_MODEL_LEN,
    PAD,
    PROMPTS,
    VOCABULARY,
    gap,
    global_state,
    logprobs,
    requests,
    save,
    start,
    tiny_model,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlplus.common import activity
from rlplus.train.rollout import Completion, Request, RolloutEngine, Sampling


@dataclass
class Case:
    engine: RolloutEngine
    model: Qwen2ForCausalLM
    tied: bool
    undisturbed: bool  # starting the engine left the process's global state alone

    def sample(
        self, n: int = 4, seed: int = 3, temperature: float = 1.0, max_tokens: int = 16
    ) -> list[list[Completion]]:
        counts = [n] * len(PROMPTS)
        return self.engine.generate(requests(PROMPTS, counts, max_tokens), Sampling(temperature, seed))


@pytest.fixture(
    scope="module",
    params=[
        "transformers-untied",
        "transformers-tied",
        pytest.param("vllm-untied", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm-tied", marks=pytest.mark.vllm),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One engine after the other: that this works in one process is part of what is tested."""
    kind, tie = request.param.split("-")
    path = tmp_path_factory.mktemp(request.param)
    model = tiny_model(tie == "tied")
    save(model, path)
    before = global_state()
    engine = start(kind, path)
    yield Case(engine, model, tie == "tied", before == global_state())
    engine.close()
    engine.close()  # twice is harmless
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 1), Sampling(1.0, 0))
    assert not dist.is_initialized(), "the engine's own process group is gone with it"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_at_the_temperature(case: Case, temperature: float) -> None:
    groups = case.sample(temperature=temperature)
    assert gap(case.model, groups, PROMPTS, temperature) <= 1e-4
    assert all(len(c.logprob) == len(c.tokens) for group in groups for c in group)
    assert gap(case.model, groups, PROMPTS, 1.7 * temperature) > 0.1, "the comparison can fail"


def test_one_step_frequencies_match_the_softmax(case: Case) -> None:
    """Pearson's chi-square, at most 5 deviations up, over the children of one prompt and over equal prompts."""
    draws, prompt = 1500, PROMPTS[0]
    for prompts, n in (([prompt], [draws]), ([prompt] * draws, [1] * draws)):
        groups = case.engine.generate(requests(prompts, n, 1), Sampling(0.8, 11))
        counts = Counter(c.tokens[0] for group in groups for c in group)
        expected = logprobs(case.model, prompt, [0], 0.8)[0].exp().double() * draws
        frequent = expected >= 5
        observed = torch.tensor([float(counts[token]) for token in range(VOCABULARY)], dtype=torch.float64)
        cells = torch.stack([observed, expected])
        cells = torch.cat([cells[:, frequent], cells[:, ~frequent].sum(1, keepdim=True)], dim=1)
        chi_square = float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
        degrees = cells.shape[1] - 1
        assert degrees > 5
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_consecutive_tokens_are_independent_draws(case: Case) -> None:
    """logprob + entropy, summed over a response, has mean 0: noise that later tokens share with earlier ones shows."""
    groups = case.sample(n=100, seed=5)
    surprise = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            distribution = logprobs(case.model, prompt, c.tokens, 1.0)
            entropy = -(distribution.exp() * distribution).sum(1)
            surprise.append((torch.tensor(c.logprob) + entropy).sum().item())
    mean, error = np.mean(surprise), np.std(surprise) / math.sqrt(len(surprise))
    assert abs(mean) < 4.5 * error


def test_seed_decides_and_every_response_has_its_own_noise(case: Case) -> None:
    first = case.sample(seed=3)
    assert case.sample(seed=3) == first
    assert case.sample(seed=4) != first
    twins = case.engine.generate(requests([PROMPTS[0]] * 3, [4] * 3, 16), Sampling(1.0, 3))
    responses = [tuple(c.tokens) for group in twins for c in group]
    assert len(set(responses)) == len(responses)
    # The seeds of neighbouring steps share nothing either.
    later = case.engine.generate(requests([PROMPTS[0]] * 3, [4] * 3, 16), Sampling(1.0, 4))
    assert not set(responses) & {tuple(c.tokens) for group in later for c in group}


def test_n_differs_by_prompt(case: Case) -> None:
    groups = case.engine.generate(requests(PROMPTS, [3, 0, 1], 8), Sampling(1.0, 0))
    assert [len(group) for group in groups] == [3, 0, 1]
    assert activity.rollouts.state()[:3] == (4, 4, sum(len(c.tokens) for group in groups for c in group))
    assert gap(case.model, groups, PROMPTS, 1.0) <= 1e-4  # each group belongs to its prompt
    assert case.engine.generate(requests(PROMPTS, [0, 0, 0], 8), Sampling(1.0, 0)) == [[], [], []]
    assert case.engine.generate(requests([], [], 8), Sampling(1.0, 0)) == []


def test_more_prompt_tokens_than_one_pass_takes(case: Case) -> None:
    """vLLM would split a prompt between two passes, and fails on the CPU when that one is seeded."""
    prompts = [[1 + (i + j) % 40 for j in range(30)] for i in range(150)]  # 4500 tokens; a pass takes 4096
    groups = case.engine.generate(requests(prompts, [1] * 150, 2), Sampling(1.0, 0))
    assert gap(case.model, groups, prompts, 1.0) < 1e-4


def test_stop_token_is_kept_and_truncation_is_told(case: Case) -> None:
    completions = [c for group in case.sample(n=60, max_tokens=16) for c in group]
    stopped = [c for c in completions if not c.truncated]
    cut = [c for c in completions if c.truncated]
    assert stopped
    assert cut
    assert all(c.tokens[-1] == EOS and EOS not in c.tokens[:-1] for c in stopped)
    assert all(len(c.tokens) == 16 and EOS not in c.tokens for c in cut)
    # Token 20 is an eos in the model's own generation settings, not in ours.
    assert any(20 in c.tokens[:-1] for c in completions)


def test_each_prompt_has_a_limit_and_every_stop_token_ends_a_response(case: Case) -> None:
    ends, limits = (EOS, 20), [3, 16, 9]
    asked = [Request(prompt, 20, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    groups = case.engine.generate(asked, Sampling(1.0, 3, [20]))
    for group, limit in zip(groups, limits, strict=True):
        for c in group:
            assert not set(ends) & set(c.tokens[:-1])
            assert len(c.tokens) == limit if c.truncated else len(c.tokens) <= limit
            assert c.truncated == (c.tokens[-1] not in ends)
    last = {c.tokens[-1] for group in groups for c in group if not c.truncated}
    assert last == set(ends)
    assert max(len(c.tokens) for c in groups[1]) > 8, "some outlive the transformers engine's first stretch"
    assert gap(case.model, groups, PROMPTS, 1.0) <= 1e-4


def test_temperature_zero_is_greedy(case: Case) -> None:
    groups = case.sample(n=2, temperature=0.0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert group[0] == group[1]
        assert logprobs(case.model, prompt, group[0].tokens, 1.0).argmax(1).tolist() == group[0].tokens
    assert gap(case.model, groups, PROMPTS, 1.0) <= 1e-4


def test_global_state_is_undisturbed(case: Case) -> None:
    assert case.undisturbed
    before = global_state()
    case.sample()
    assert global_state() == before
    case.engine.push_weights(case.model.named_parameters(), 0)
    assert global_state() == before


def test_refuses_bad_requests_before_generating(case: Case) -> None:
    def refused(message: str, *asked: Request, temperature: float = 1.0, stop: Sequence[int] = ()) -> None:
        with pytest.raises(ValueError, match=message):
            case.engine.generate(asked, Sampling(temperature, 0, stop))

    sound = Request([5], 1, 8)
    refused("prompt 1 has 313", sound, Request([5] * 313, 1, 8))
    refused("prompt 0 has 0", Request([], 1, 8))
    refused("token ids from 0 to 47; prompt 0 has 5 to 48", Request([5, 48], 1, 8))
    refused("want n of at least 0 and max_tokens of at least 1; request 1 has -1 and 8", sound, Request([5], -1, 8))
    refused("want n of at least 0 and max_tokens of at least 1; request 0 has 1 and 0", Request([5], 1, 0))
    refused("prompt 1 has 312", sound, Request([5] * 312, 1, 9))
    refused("stop token ids from 0 to 47; got .48.", sound, stop=[48])
    for temperature in (-1.0, 0.005, math.nan, math.inf):
        refused("temperature of 0 .greedy. or at least 0.01", sound, temperature=temperature)
    groups = case.engine.generate(requests([[5] * 312], [1], 8), Sampling(1.0, 0))  # the longest that fits
    assert gap(case.model, groups, [[5] * 312], 1.0) <= 1e-4


def test_pushed_weights_are_what_generates(case: Case) -> None:
    changed = tiny_model(case.tied, seed=1)
    before = case.sample()
    for version, (new, old) in enumerate([(changed, case.model), (case.model, changed)], start=1):
        case.engine.push_weights(((name, p) for name, p in new.named_parameters()), version)
        groups = case.sample()
        assert gap(new, groups, PROMPTS, 1.0) <= 1e-5
        assert gap(old, groups, PROMPTS, 1.0) > 0.1
    assert groups == before, "back at the first weights, everything is as it was"


def test_keys_and_values_of_old_weights_are_not_used(case: Case) -> None:
    """A prompt of more than two of vLLM's blocks, so that the second generation could find its prefix in the cache."""
    changed = tiny_model(case.tied, seed=1)
    prompt = [2 + i * i % 46 for i in range(300)]
    for version, model in enumerate([case.model, changed, case.model], start=1):
        case.engine.push_weights(model.named_parameters(), version)
        groups = case.engine.generate(requests([prompt], [4], 8), Sampling(1.0, 0))
        assert gap(model, groups, [prompt], 1.0) <= 1e-4


def test_engine_keeps_a_copy_of_the_pushed_weights(case: Case) -> None:
    trained = tiny_model(case.tied)
    case.engine.push_weights(trained.named_parameters(), 5)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert gap(case.model, case.sample(), PROMPTS, 1.0) <= 1e-5


def test_an_exception_leaves_no_requests_behind(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the second forward pass: the next call answers as if nothing had been."""
    first = case.sample()
    module = case.engine._model if case.engine.name == "transformers" else case.engine._llm.llm_engine  # type: ignore[attr-defined]
    method = "forward" if case.engine.name == "transformers" else "step"
    original, calls = getattr(module, method), []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            case.sample()
    assert case.sample() == first


def test_an_incomplete_push_is_refused_and_poisons_the_engine(case: Case) -> None:
    """The last test of an engine: vLLM's is of no use afterwards."""
    parameters = dict(case.model.named_parameters())
    misshaped = parameters | {"model.norm.weight": torch.ones(65)}
    missing = {name: p for name, p in parameters.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight of shape \(64,\); got \(65,\)"):
        case.engine.push_weights(misshaped.items(), 7)
    with pytest.raises(RuntimeError, match="push of version 7 failed half-way"):
        case.sample()
    if case.engine.name == "vllm":
        with pytest.raises(RuntimeError, match="make a new one"):
            case.engine.push_weights(parameters.items(), 8)
        return
    with pytest.raises(ValueError, match=r"1 did not come: model\.layers\.1\.mlp\.up_proj\.weight"):
        case.engine.push_weights(missing.items(), 8)
    case.engine.push_weights(parameters.items(), 9)
    assert gap(case.model, case.sample(), PROMPTS, 1.0) <= 1e-5


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_takes_tied_weights_in_a_class_without_lm_head(tmp_path: Path) -> None:
    """Gemma 2, whose softcap is in the logprobs."""

    def model(seed: int) -> Any:
        torch.manual_seed(seed)
        config = Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, initializer_range=0.2, final_logit_softcapping=2.0,
            max_position_embeddings=2 * MAX_MODEL_LEN,  # vLLM's engines in a process share equal rotary embeddings
            eos_token_id=EOS, pad_token_id=PAD, attn_implementation="eager",
        )  # fmt: skip
        return Gemma2ForCausalLM(config).float().eval()

    old, new = model(0), model(1)
    save(old, tmp_path)
    engine = start("vllm", tmp_path)
    try:
        for version, current in enumerate((old, new)):
            if version:
                engine.push_weights(current.named_parameters(), version)
            groups = engine.generate(requests(PROMPTS, [2] * len(PROMPTS), 8), Sampling(1.0, 3))
            assert gap(current, groups, PROMPTS, 1.0) < 1e-4
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_names_a_missing_weight(tmp_path: Path) -> None:
    """And the engine after that one, in the same process, with the run's own config.json, is sound."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = start("vllm", tmp_path)
    with pytest.raises(ValueError, match=r"1 did not come: lm_head\.weight"):
        engine.push_weights([(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"], 1)
    engine.close()
    check_config_path("vllm", tmp_path, model)


def check_config_path(kind: str, path: Path, model: Qwen2ForCausalLM) -> None:
    config = Qwen2Config.from_pretrained(path)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 50.0}
    config.save_pretrained(path / "changed")
    changed = Qwen2ForCausalLM(config).eval()
    changed.load_state_dict(model.state_dict())
    engine = start(kind, path, config_path=str(path / "changed"))
    try:
        groups = engine.generate(requests(PROMPTS, [2, 2, 2], 16), Sampling(1.0, 0))
    finally:
        engine.close()
    assert gap(changed, groups, PROMPTS, 1.0) <= 1e-4
    assert gap(model, groups, PROMPTS, 1.0) > 1e-3


def test_transformers_takes_another_config(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    check_config_path("transformers", tmp_path, model)


def test_transformers_batches_are_bounded_by_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = start("transformers", tmp_path, cache_mb=1)
    sizes: list[int] = []
    original = engine._generate_batch  # type: ignore[attr-defined]

    def counted(batch: Sequence[Request], sampling: Sampling) -> list[Completion]:
        sizes.append(len(batch))
        return original(batch, sampling)

    monkeypatch.setattr(engine, "_generate_batch", counted)
    groups = engine.generate(requests(PROMPTS, [40, 41, 42], 16), Sampling(1.0, 0))
    # 2 (keys, values) * 2 layers * 1 head * 32 * 4 bytes per token, 25 tokens at most; 16 bytes for each of 48 logits
    limit = 2**20 // (25 * 512 + 16 * 48)
    assert max(sizes) == limit
    assert sum(sizes) == 123
    assert [len(group) for group in groups] == [40, 41, 42]
    assert gap(model, groups, PROMPTS, 1.0) <= 1e-4


def test_transformers_processes_a_prompt_once_and_ended_responses_no_more(tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = start("transformers", tmp_path)
    shapes: list[tuple[int, ...]] = []
    layer = engine._model.model.embed_tokens  # type: ignore[attr-defined]
    layer.register_forward_pre_hook(lambda module, arguments: shapes.append(tuple(arguments[0].shape)))
    groups = engine.generate(requests([*PROMPTS, PROMPTS[0]], [3, 1, 2, 2], 12), Sampling(1.0, 0))
    lengths = [len(completion.tokens) for group in groups for completion in group]
    assert min(lengths) < 12, "a seed with a response that ends early"
    going = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert shapes == [(len(PROMPTS), max(map(len, PROMPTS)))] + [(n, 1) for n in going]


@pytest.mark.parametrize(
    ("family", "prompts"),
    [("GPT2LMHeadModel", PROMPTS), ("Gemma2", PROMPTS), ("Bloom", PROMPTS), ("FalconH1", [PROMPTS[0], [7, 3, 2]])],
)
def test_transformers_generates_with_other_models(family: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """Learned positions, sliding windows, no positions; a state, whose rows can neither be copied nor leave."""
    changes = next(changes for name, changes, _ in FAMILIES if name == family)
    model = make(family, changes | ({"sliding_window": 8} if family == "Gemma2" else {})).float()
    model.save_pretrained(tmp_path)
    engine = start("transformers", tmp_path)
    n = [3, 4, 2][: len(prompts)]
    stop = tuple(range(10, 20))
    groups = engine.generate(requests(prompts, n, 20), Sampling(0.8, 0, stop))
    assert [len(group) for group in groups] == n
    assert len({len(completion.tokens) for group in groups for completion in group}) > 1, "responses that end early"
    assert gap(model, groups, prompts, 0.8) <= 1e-4
