"""Pretrained chat models before a run: text in their template, their end tokens, `rlplus init` and `rlplus plan`."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from real_models import QWEN, SMOLLM2, real_model
from real_runs import init, load, logprobs
from safetensors import safe_open
from school_problems import PROBLEMS

from rlplus.tools.cli import main
from rlplus.train.config import Config, load_config
from rlplus.train.data import Example, find_ends, load_examples, load_tokenizer, response_text, token_texts

pytestmark = pytest.mark.slow
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
TURN = "<|im_end|>"
ENDS = {SMOLLM2: 2, QWEN: 151645}  # the ids of the tokens that end a turn
NATS = 1.3  # a token of a solution, at most: 1.08 and 1.10 were found
SHAPES = {SMOLLM2: (30, 3, 64), QWEN: (24, 2, 64)}  # layers, heads of keys and values, and their size


@pytest.fixture(scope="module", params=[SMOLLM2, QWEN])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> str:
    return real_model(name)


@pytest.fixture(scope="module")
def file(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration that `rlplus init` writes."""
    return init(tmp_path_factory.mktemp("init"), model, len(PROBLEMS))


@pytest.fixture(scope="module")
def examples(file: Path) -> tuple[Config, Any, Sequence[Example]]:
    """The configuration, the tokenizer and the examples of a run of the file."""
    config = load_config(file)
    tokenizer = load_tokenizer(config.model)
    limit, ends = config.max_demonstration_length, find_ends(config.model, tokenizer)
    return config, tokenizer, load_examples(config.data, tokenizer, max_demonstration_length=limit, ends=ends)[0]


def test_prompts_and_demonstrations_are_turns_of_the_template(name: str, examples: Any) -> None:
    config, tokenizer, rows = examples
    assert find_ends(config.model, tokenizer) == (ENDS[name],)
    assert len(rows) == len(PROBLEMS)
    for example, (question, solution, answer) in zip(rows, PROBLEMS, strict=True):
        turns = [f"<|im_start|>{role}\n{text}{TURN}\n" for role, text in (("system", BOXED), ("user", question))]
        assert tokenizer.decode(example.prompt) == f"{''.join(turns)}<|im_start|>assistant\n"
        assert example.demonstration is not None
        text = f"{solution} The answer is \\boxed{{{answer}}}."
        assert tokenizer.decode(example.demonstration) == f"{text}{TURN}"
        assert example.demonstration[-1] == ENDS[name]
        assert response_text(tokenizer, example.demonstration, None, (ENDS[name],)) == text
        assert example.answer == str(answer)
        assert example.prompt.count(ENDS[name]) == 2


def test_texts_of_tokens_are_the_text(examples: Any) -> None:
    """Characters that several tokens spell included."""
    _, tokenizer, rows = examples
    text = "½ of 7 apples → 3,5 🍎🍏, naïve ∑ 東京"
    for ids in (tokenizer(text, add_special_tokens=False).input_ids, rows[0].prompt):
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids)


def test_the_model_expects_the_solutions_of_its_template(model: str, examples: Any) -> None:
    """Computed by transformers alone. Behind another problem it is far less sure of them."""
    _, _, rows = examples
    lm = load(model, "bfloat16")
    nats, tokens = [0.0, 0.0], 0
    for example, other in zip(rows[:4], [*rows[1:4], rows[0]], strict=True):
        assert example.demonstration is not None
        tokens += len(example.demonstration)
        for k, prompt in enumerate((example.prompt, other.prompt)):
            nats[k] -= float(logprobs(lm, [(prompt, example.demonstration)]).sum())
    assert nats[0] / tokens < NATS
    assert nats[1] > nats[0] + tokens / 4


def test_inits_file_asks_for_what_is_graded_and_its_plan_counts_the_weights(
    name: str, model: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(file)
    chosen = (config.reward.kind, config.data.system_prompt, config.algorithm.preset)
    assert chosen == ("math_verify_box", BOXED, "rlplus")
    assert (config.data.prompt, config.data.answer, config.data.demonstration) == ("question", "answer", "solution")
    assert config.rollout.engine == "vllm"
    assert config.model.lora is None
    capsys.readouterr()
    assert main(["plan", str(file), "--data", "--gpus", "1", "--gpu", "80g", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    with safe_open(Path(model) / "model.safetensors", framework="pt") as weights:
        count = sum(prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    assert plan["parameters"] == count
    assert plan["memory"]["generate"]["weights"] == plan["memory"]["generate"]["engine weights"] == 2 * count
    assert plan["memory"]["generate"]["optimizer states"] == 12 * count  # fp32 weights and AdamW's two moments
    layers, heads, size = SHAPES[name]
    whole = 2 * 2 * layers * heads * size * config.max_generation_length
    cached = plan["memory"]["generate"]["kv cache"] / whole
    assert plan["full_sequences_in_cache"] == pytest.approx(cached, abs=1, rel=0.01)
    assert (plan["data"]["prompts"], plan["data"]["refusals"]) == (len(PROBLEMS), [])
    assert plan["data"]["summaries"][-1].startswith("demonstrations: 12 of 12 pass the run's own reward")
