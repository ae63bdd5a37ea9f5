"""The rollout engines, real ones, against the Hugging Face model they are copies of."""

import json
import math
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

import rlplus.rollout
from rlplus.config import RolloutConfig
from rlplus.rollout import Completion, RolloutEngine, check_logprobs, checked_weights, make_engine

EOS, PAD, VOCABULARY, MAX_MODEL_LEN = 1, 0, 48, 320
PROMPTS = [[5, 9, 12], [7], [5, 9, 12, 30, 31, 22, 8, 2, 40]]


def tiny_model(tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    """Two layers, far from uniform; vLLM's attention on the CPU wants heads of 32."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=tied,
            initializer_range=0.12 if tied else 0.2,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        return Qwen2ForCausalLM(config).float().eval()


def save(model: Qwen2ForCausalLM, path: Path) -> None:
    model.save_pretrained(path)
    # What published models bring along, exaggerated: none of it may change the sampling.
    GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.2, repetition_penalty=5.0, eos_token_id=[EOS, 20]
    ).save_pretrained(path)


def start(kind: str, path: Path, **options: object) -> RolloutEngine:
    config = RolloutConfig(engine=kind, max_response_length=16, kv_cache_memory_mb=options.pop("cache_mb", 16))  # type: ignore[arg-type]
    return make_engine(
        config,
        str(path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        eos_token_id=EOS,
        pad_token_id=PAD,
        seed=0,
        **options,  # type: ignore[arg-type]
    )


def logprobs(model: Qwen2ForCausalLM, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """(len(response), V): the distributions that the tokens of response were drawn from, one sequence on its own."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)


def gap(model: Qwen2ForCausalLM, groups: list[list[Completion]], prompts: Sequence[Sequence[int]], t: float) -> float:
    """The largest difference between an engine's logprob and the model's."""
    gaps = [
        logprobs(model, prompt, c.tokens, t).gather(1, torch.tensor(c.tokens)[:, None])[:, 0] - torch.tensor(c.logprob)
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    return max(float(difference.abs().max()) for difference in gaps)


def global_state() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_default_dtype(),
        os.sched_getaffinity(0),
        os.environ.get("LD_PRELOAD"),
        os.environ.get("LOCAL_WORLD_SIZE"),
    ]


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
        return self.engine.generate(PROMPTS, counts, temperature=temperature, max_tokens=max_tokens, seed=seed)


@pytest.fixture(
    scope="module",
    params=[
        "transformers-untied",
        "transformers-tied",
        pytest.param("vllm-untied", marks=pytest.mark.vllm),
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
        engine.generate(PROMPTS, [1, 1, 1], temperature=1.0, max_tokens=1, seed=0)
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
        groups = case.engine.generate(prompts, n, temperature=0.8, max_tokens=1, seed=11)
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
    twins = case.engine.generate([PROMPTS[0]] * 3, [4] * 3, temperature=1.0, max_tokens=16, seed=3)
    responses = [tuple(c.tokens) for group in twins for c in group]
    assert len(set(responses)) == len(responses)
    # The seeds of neighbouring steps share nothing either.
    later = case.engine.generate([PROMPTS[0]] * 3, [4] * 3, temperature=1.0, max_tokens=16, seed=4)
    assert not set(responses) & {tuple(c.tokens) for group in later for c in group}


def test_n_differs_by_prompt(case: Case) -> None:
    groups = case.engine.generate(PROMPTS, [3, 0, 1], temperature=1.0, max_tokens=8, seed=0)
    assert [len(group) for group in groups] == [3, 0, 1]
    assert gap(case.model, groups, PROMPTS, 1.0) <= 1e-4  # each group belongs to its prompt
    assert case.engine.generate(PROMPTS, [0, 0, 0], temperature=1.0, max_tokens=8, seed=0) == [[], [], []]
    assert case.engine.generate([], [], temperature=1.0, max_tokens=8, seed=0) == []


def test_more_prompt_tokens_than_one_pass_takes(case: Case) -> None:
    """vLLM would split a prompt between two passes, and fails on the CPU when that one is seeded."""
    prompts = [[1 + (i + j) % 40 for j in range(30)] for i in range(150)]  # 4500 tokens; a pass takes 4096
    groups = case.engine.generate(prompts, [1] * 150, temperature=1.0, max_tokens=2, seed=0)
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
    def refused(message: str, prompts: list[list[int]], n: list[int], **options: float) -> None:
        settings = {"temperature": 1.0, "max_tokens": 8, "seed": 0} | options
        with pytest.raises(ValueError, match=message):
            case.engine.generate(prompts, n, **settings)  # type: ignore[arg-type]

    refused("prompt 1 has 313", [[5], [5] * 313], [1, 1])
    refused("prompt 0 has 0", [[]], [1])
    refused("token ids from 0 to 47; prompt 0 has 5 to 48", [[5, 48]], [1])
    refused("one count of at least 0 for each of 1 prompts", [[5]], [1, 1])
    refused("one count of at least 0", [[5]], [-1])
    refused("max_tokens of at least 1", [[5]], [1], max_tokens=0)
    for temperature in (-1.0, 0.005, math.nan, math.inf):
        refused("temperature of 0 .greedy. or at least 0.01", [[5]], [1], temperature=temperature)
    groups = case.engine.generate([[5] * 312], [1], temperature=1.0, max_tokens=8, seed=0)  # the longest that fits
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
        groups = case.engine.generate([prompt], [4], temperature=1.0, max_tokens=8, seed=0)
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
        groups = engine.generate(PROMPTS, [2, 2, 2], temperature=1.0, max_tokens=16, seed=0)
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

    def counted(prompts: Sequence[Sequence[int]], *rest: float) -> list[Completion]:
        sizes.append(len(prompts))
        return original(prompts, *rest)

    monkeypatch.setattr(engine, "_generate_batch", counted)
    groups = engine.generate(PROMPTS, [40, 41, 42], temperature=1.0, max_tokens=16, seed=0)
    # 2 (keys, values) * 2 layers * 1 head * 32 * 4 bytes a token, 25 tokens at most, and 4 rows of 48 logits.
    limit = 2**20 // (25 * 512 + 4 * 48 * 4)
    assert max(sizes) == limit
    assert sum(sizes) == 123
    assert [len(group) for group in groups] == [40, 41, 42]
    assert gap(model, groups, PROMPTS, 1.0) <= 1e-4


def test_checked_weights() -> None:
    shapes = {"a": torch.Size([2]), "b": torch.Size([3])}
    a, b = torch.zeros(2, requires_grad=True), torch.zeros(3)
    passed = dict(checked_weights([("b", b), ("a", a)], shapes))
    assert passed.keys() == shapes.keys()
    assert not passed["a"].requires_grad
    for weights, message in [
        ([("a", a), ("c", b)], "got 'c', which it does not have"),
        ([("a", a), ("a", a)], "'a' came twice"),
        ([("a", b)], r"want a of shape \(2,\); got \(3,\)"),
        ([("a", a)], "1 did not come: b"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(checked_weights(weights, shapes))


def test_a_logprob_that_is_not_finite_is_an_error() -> None:
    good = [[Completion([3, EOS], [-1.0, -2.0], False)]]
    assert check_logprobs(good) is good
    for logprob in ([-1.0, math.nan], [-1.0, -math.inf], [-1.0]):
        with pytest.raises(RuntimeError, match=r"want 2 finite logprobs, .* prompt 1; got"):
            check_logprobs([[], [Completion([3, EOS], logprob, False)]])


def test_choice_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = rlplus.rollout._choose
    monkeypatch.setattr(rlplus.rollout, "find_spec", lambda name: None)
    assert choose("auto") == "transformers"
    assert choose("transformers") == "transformers"
    with pytest.raises(ValueError, match=r"vLLM is not installed: pip install 'rlplus\[vllm\]' .* or 'rlplus\[cpu\]'"):
        choose("vllm")
    # Installed and broken, as with CUDA builds on a machine without CUDA: neither choice passes over it.
    monkeypatch.setattr(rlplus.rollout, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for engine in ("auto", "vllm"):
        with pytest.raises(ValueError, match=r"does not import .*LLM.*reinstall"):
            choose(engine)


@pytest.mark.vllm
def test_auto_takes_vllm_where_it_is_installed() -> None:
    assert rlplus.rollout._choose("auto") == "vllm"


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiny_model(tied=False), tmp_path)
    with caplog.at_level("INFO", logger="rlplus.rollout"):
        start("transformers", tmp_path).close()
    assert "rollout engine: transformers" in caplog.text


def run_ranks(path: Path, kind: str, ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    for tied in (False, True):
        save(tiny_model(tied), path / str(tied))
    done = subprocess.run(
        [*launch, __file__, kind, str(path)], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line.split("REPORT ")[1]) for line in done.stdout.splitlines() if "REPORT" in line]
    assert len(reports) == ranks
    for report in reports:
        assert report["gaps"] == pytest.approx([0] * len(report["gaps"]), abs=1e-5)
        assert report["sum_over_ranks"] == ranks
        assert report["undisturbed"]
    assert len({report["tokens"] for report in reports}) == ranks, "ranks with different seeds sample different tokens"


@pytest.mark.vllm
def test_vllm_in_the_trainers_process_group(tmp_path: Path) -> None:
    run_ranks(tmp_path, "vllm", 1)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path, "vllm", 2)


@pytest.mark.slow
def test_transformers_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path, "transformers", 2)


def _rank(kind: str, path: Path) -> None:
    """One rank of a run: the trainer's group and its ZeRO-3 config exist, two engines come and go, the group stays."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    models = {}
    for tied in (False, True):
        with rlplus.rollout.whole_model():
            models[tied] = (tiny_model(tied), tiny_model(tied, seed=1))
    before = global_state()
    gaps, tokens = [], []
    for tied, (old, new) in models.items():
        engine = start(kind, path / str(tied))
        prompts = PROMPTS[rank:]  # ranks have different work
        for model in (old, new):
            engine.push_weights(model.named_parameters(), 1)
            groups = engine.generate(prompts, [2] * len(prompts), temperature=1.0, max_tokens=16, seed=rank)
            gaps.append(gap(model, groups, prompts, 1.0))
            tokens.append([c.tokens for group in groups for c in group])
        engine.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    undisturbed = before == global_state() and is_deepspeed_zero3_enabled() and zero3.is_zero3()
    report = {"gaps": gaps, "tokens": str(tokens), "sum_over_ranks": total.item(), "undisturbed": undisturbed}
    sys.stdout.write("REPORT " + json.dumps(report) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], Path(sys.argv[2]))
