"""Environments of `verifiers`: tokens, masks, logprobs are the engine's, rewards the rubric's, and failures fail."""

import importlib
import json
import math
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import games
import pytest
import torch
from chat_templates import byte_turns
from rollout_models import save
from said_texts import Kept, Saying
from trainer_runs import metrics, run_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus.tools.cli import main
from rlplus.train.config import DataConfig, EnvironmentConfig, RolloutConfig, load_config
from rlplus.train.data import Example, load_examples
from rlplus.train.evaluation.sample import evaluate
from rlplus.train.rollout import Completion, Request, RolloutEngine, RunFailed, Sampling, make_engine, make_respond
from rlplus.train.trainer import train

ROOM, TOKENS = 160, 258


@dataclass
class Recording:
    """Passes requests on to an engine, and keeps what it sampled."""

    engine: RolloutEngine
    calls: list[list[tuple[Request, Completion]]] = field(default_factory=list)
    name: str = "recording"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        drawn = self.engine.generate(requests, sampling)
        self.calls.append([(request, one) for request, (one,) in zip(requests, drawn, strict=True)])
        return drawn


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    """A random model that ends its turns often."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = Qwen2Config(vocab_size=TOKENS, max_position_embeddings=512, **sizes, num_key_value_heads=1)
        lm = Qwen2ForCausalLM(config).float().eval()
        with torch.no_grad():
            lm.model.norm.weight.copy_(torch.ones(32))
            lm.lm_head.weight[257] += 1.5 * lm.model.embed_tokens.weight.mean(0).sign() * 0.05
            lm.lm_head.weight[97:107] *= 8
        return lm


@pytest.fixture(scope="module")
def engine(model: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    folder = tmp_path_factory.mktemp("model")
    save(model, folder)
    config = RolloutConfig(engine="transformers", max_response_length=ROOM, kv_cache_memory_mb=16)
    made = make_engine(config, str(folder), dtype="float32", max_model_len=512, end_ids=[257], pad_token_id=256, seed=0)
    yield made
    made.close()


def configured(kind: str, *, tokens: int | None = 6, timeout_s: float = 60.0, **arguments: Any) -> EnvironmentConfig:
    return EnvironmentConfig(
        library="verifiers",
        name="games",
        arguments={"kind": kind} | arguments,
        max_turn_tokens=tokens,
        timeout_s=timeout_s,
    )


def examples_of(config: EnvironmentConfig, folder: Path) -> list[Example]:
    """The environment's problems, through the file that `rlplus problems` writes."""
    run = {
        "output_dir": "x",
        "data": {"path": str(folder / f"{config.arguments['kind']}.jsonl"), "columns": ["row"]},
        "rollout": {"environment": config.model_dump(), "max_response_length": ROOM},
        "reward": {"kind": "exact_match"},
        "model": {"scratch": {"max_position_embeddings": 2048}},
        "algorithm": {"preset": "grpo"},
        "train": {"tokens_per_micro_batch": 4096, "steps": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    path = folder / f"{config.arguments['kind']}.jsonl"
    path.unlink(missing_ok=True)
    assert main(["problems", str(folder / "run.yaml")]) == 0
    tools = "tools" if "tools" in json.loads(path.read_text().splitlines()[0]) else None
    examples, _ = load_examples(
        DataConfig(path=str(path), columns=["row"], tools=tools), byte_turns(), max_demonstration_length=1
    )
    return examples


def rolled(config: EnvironmentConfig, engine: Any, examples: Sequence[Example], n: int = 2) -> list[list[Completion]]:
    respond = make_respond(None, byte_turns(), TOKENS, config)
    return respond(engine, examples, [Request(e.prompt, n, ROOM) for e in examples], Sampling(1.0, 5))


@pytest.mark.parametrize(("kind", "tokens"), [("single", None), ("echo", 6), ("echo", 30), ("tools", 6)])
def test_what_is_trained_on_is_what_the_engine_sampled(
    kind: str, tokens: int | None, engine: RolloutEngine, model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    """Tokens and logprobs bit for bit, in the context that they were sampled in; the model gives the same logprobs."""
    config, recording = configured(kind, tokens=tokens), Recording(engine)
    examples = examples_of(config, tmp_path)
    groups = rolled(config, recording, examples)
    several = 0
    for example, group in zip(examples, groups, strict=True):
        for completion in group:
            assert completion.trained is not None
            whole, place = [*example.prompt, *completion.tokens], len(example.prompt)
            stretches = _stretches(completion.trained)
            several += len(stretches) > 1
            for start, stop in stretches:
                sampled = [
                    drawn
                    for call in recording.calls
                    for request, drawn in call
                    if list(request.prompt) == whole[: place + start] and drawn.tokens == completion.tokens[start:stop]
                ]
                assert any(drawn.logprob == completion.logprob[start:stop] for drawn in sampled)
            with torch.no_grad():
                logprob = model(torch.tensor([whole])).logits[0, place - 1 : -1].log_softmax(-1)
            own = [float(logprob[i, token]) for i, token in enumerate(completion.tokens)]
            gaps = [abs(a - b) for a, b, on in zip(own, completion.logprob, completion.trained, strict=True) if on]
            assert max(gaps) < 1e-4
            assert all(math.isnan(p) != on for p, on in zip(completion.logprob, completion.trained, strict=True))
    sampled_all = sum(len(drawn.tokens) for call in recording.calls for _, drawn in call)
    assert sampled_all == sum(sum(c.trained or []) for group in groups for c in group), "nothing is left out"
    assert (several > 0) == (kind == "echo")


def _stretches(trained: Sequence[bool]) -> list[tuple[int, int]]:
    """Starts and stops of the runs of tokens that are trained on."""
    edges = [i for i, on in enumerate(trained) if on and not (i and trained[i - 1])]
    return [(i, next((j for j in range(i, len(trained)) if not trained[j]), len(trained))) for i in edges]


def dialogue(example: Example, completion: Completion) -> list[dict[str, str]]:
    """The messages behind the prompt, read from the text of the tokens: the template has marks between them."""
    text = byte_turns().decode([*example.prompt, *completion.tokens])
    parts = text.split("<|assistant|>\n", 1)[1].split("\n<|user|>\n")
    messages = [{"role": "assistant", "content": parts[0].removesuffix("<|endoftext|>")}]
    for part in parts[1:]:
        said, answered = part.split("\n<|assistant|>\n")
        messages += [{"role": "user", "content": said}]
        messages += [{"role": "assistant", "content": answered.removesuffix("<|endoftext|>")}]
    return messages


def _turns(messages: list[dict[str, str]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


@pytest.mark.parametrize("kind", ["single", "echo"])
def test_rewards_are_the_rubrics(kind: str, engine: RolloutEngine, tmp_path: Path) -> None:
    config = configured(kind)
    examples = examples_of(config, tmp_path)
    for i, (example, group) in enumerate(zip(examples, rolled(config, engine, examples), strict=True)):
        for completion in group:
            messages = dialogue(example, completion)
            want = games.digits(messages, str(i), {"level": i}) + 0.5 * len(messages)
            assert completion.reward == pytest.approx(want, rel=1e-12)
            measured = {"digits": want - 0.5 * len(messages), "length": len(messages), "num_turns": _turns(messages)}
            assert dict(completion.metrics) == pytest.approx(measured, rel=1e-12)


def test_tokens_do_not_depend_on_the_environments_times(engine: RolloutEngine, tmp_path: Path) -> None:
    config = configured("echo")
    examples = examples_of(config, tmp_path)
    drawn = []
    for seed in (0, 1):
        games.Echo.rng = random.Random(seed)
        drawn.append([(c.tokens, c.trained, c.reward) for group in rolled(config, engine, examples) for c in group])
    assert drawn[0] == drawn[1]
    assert len({str(tokens) for tokens, _, _ in drawn[0]}) == len(drawn[0])


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_a_tools_result_comes_back_and_a_text_without_a_call_ends_the_dialogue(tmp_path: Path) -> None:
    config = configured("tools", tokens=None)
    (example, *_) = examples_of(config, tmp_path)
    assert b'"name": "add"' in bytes(example.prompt), "the tools are in the prompt"
    texts = [["1", call(a=2, b=40), call(a=2, wrong=40), "<tool_call>{"], ["42!", "well"]]
    one, two, three, four = rolled(config, Saying(texts), [example], n=4)[0]
    assert bytes(one.tokens[:-1]) == b"1"
    assert one.trained == [True, True]
    text = byte_turns().decode(two.tokens)
    assert text == f"{call(a=2, b=40)}<|endoftext|>\n<|tool|>\n42\n<|assistant|>\n42!<|endoftext|>"
    assert sum(two.trained or []) == len(call(a=2, b=40)) + 1 + 4
    assert "unexpected keyword argument" in byte_turns().decode(three.tokens), "the tool's error, for the policy"
    assert bytes(four.tokens[:-1]) == b"<tool_call>{", "text, and no call"
    assert (two.reward or 0) > (one.reward or 0)


def test_the_end_of_the_room_ends_a_rollout_and_not_the_run(tmp_path: Path) -> None:
    config = configured("echo", tokens=None)
    (example, *_) = examples_of(config, tmp_path)
    long, short = "x" * (ROOM - 20), "x" * ROOM
    one, two = rolled(config, Saying([[long, short]]), [example])[0]
    assert one.truncated
    assert two.truncated
    assert (len(one.tokens), len(two.tokens)) == (len(long) + 1, ROOM)
    messages = [{"role": "assistant", "content": long}]
    assert one.reward == games.digits(messages, "0", {"level": 0}) + 0.5


def test_a_group_of_environments_routes_by_row(tmp_path: Path) -> None:
    config = configured("group")
    examples = examples_of(config, tmp_path)
    assert len(examples) == 8
    first, last = (rolled(config, Saying([["a"], ["b"]]), [e], n=1)[0][0] for e in (examples[0], examples[-1]))
    assert (len(_stretches(first.trained or [])), len(_stretches(last.trained or []))) == (2, 1)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "raises": ({"kind": "broken"}, "raised KeyError: 'no such room'"),
    "fails": ({"kind": "failing"}, "the environment failed: .*the sandbox is gone"),
    "hangs": ({"kind": "hanging", "timeout_s": 0.3}, r"took longer than 0.3 s \(timeout_s\)"),
    "gives up": ({"kind": "late"}, "took longer than the environment's own timeout_seconds"),
    "samples": ({"kind": "own"}, "responses are sampled as the section rollout says.*0.1"),
    "tool": ({"kind": "strict"}, "the environment failed: .*ToolCallError"),
    "reward": (
        {"kind": "echo", "rewards": ("broken_reward",)},
        "function broken_reward raised ZeroDivisionError: no tu",
    ),
    "nan": ({"kind": "echo", "rewards": ("late_reward",)}, "want a finite reward; got nan"),
    "a part's reward": ({"kind": "group", "rewards": ("broken_reward",)}, "broken_reward raised ZeroDivisionError"),
    "a group's part's": ({"kind": "toolbox", "rewards": ("broken_reward",)}, "broken_reward raised ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_failures_of_an_environment_fail_the_run(name: str, tmp_path: Path) -> None:
    """A reward of 0 would be a wrong answer's."""
    arguments, message = FAULTS[name]
    config = configured(**arguments)
    (example, *_) = examples_of(config, tmp_path)
    engine = Saying([[call(a=1, wrong=2) if name == "tool" else "a"]] * 4)
    config = config.model_copy(update={"max_turn_tokens": None})
    with pytest.raises(RunFailed, match=f"(?s)^rollout.environment games.*{message}"):
        rolled(config, engine, [example], n=1)


def test_the_engines_failure_is_the_engines(tmp_path: Path) -> None:
    config = configured("echo")
    examples = examples_of(config, tmp_path)
    with pytest.raises(IndexError, match="pop from empty list"):
        rolled(config, Saying([]), examples)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "no_such_game"}, "Could not import 'no_such_game'"),
        ({"arguments": {"size": 3}}, "unexpected keyword argument 'size'"),
        (
            {"arguments": {"kind": "echo", "rewards": ("group_reward",)}},
            "rewards of a group as a whole are not supported",
        ),
    ],
)
def test_environments_that_do_not_load_are_refused(config: dict[str, Any], message: str) -> None:
    made = EnvironmentConfig.model_validate({"library": "verifiers", "name": "games"} | config)
    with pytest.raises(ValueError, match=f"^rollout.environment .*{message}"):
        make_respond(None, byte_turns(), TOKENS, made)


@pytest.mark.parametrize(("found", "message"), [("0.4.0", "below 0.4.*got 0.4.0"), ("0.1.9.post3", "got 0.1.9.post3")])
def test_other_versions_are_refused(found: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    monkeypatch.delitem(sys.modules, "rlplus.train.rollout.environments.verifiers_environment", raising=False)
    with pytest.raises(ValueError, match=message):
        importlib.import_module("rlplus.train.rollout.environments.verifiers_environment")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.delitem(sys.modules, "rlplus.train.rollout.environments.verifiers_environment", raising=False)
    with pytest.raises(ValueError, match=r"verifiers is not installed: pip install .*environments"):
        importlib.import_module("rlplus.train.rollout.environments.verifiers_environment")


def test_a_run_keeps_its_signals() -> None:
    """An environment handles SIGTERM itself, which would end a run without a checkpoint."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make_respond(None, byte_turns(), TOKENS, configured("echo"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_rewards_of_the_environment_count_in_an_evaluation(tmp_path: Path) -> None:
    config = configured("single")
    examples = examples_of(config, tmp_path)
    result = evaluate(
        Saying([["a"] * 8]),  # type: ignore[arg-type]
        lambda texts, *_, **__: texts,  # type: ignore[arg-type]  # none is graded
        examples,
        str,  # type: ignore[arg-type]
        samples=2,
        k=[1],
        temperature=1.0,
        max_tokens=8,
        seed=0,
        respond=make_respond(None, byte_turns(), TOKENS, config),
    )
    assert result.correct == (0, 2, 2, 2), "1 or more counts as right"


# ---- in a run


def example(folder: Path, steps: int) -> list[dict[str, float]]:
    """The metrics of the example, shortened."""
    overrides = [f"data.path={folder / 'rows.jsonl'}", f"output_dir={folder / 'run'}", "rollout.engine=transformers"]
    assert main(["problems", "examples/higher_lower.yaml", *overrides]) == 0
    return metrics(train(load_config("examples/higher_lower.yaml", [*overrides, f"train.steps={steps}"])))


@pytest.mark.slow
def test_the_policy_of_the_example_learns(tmp_path: Path) -> None:
    rows = example(tmp_path, steps=30)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3


def test_a_run_trains_on_what_the_policy_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine and trainer agree on every trained token, and the environment's are masked."""
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_recipe", Kept)
    Kept.kept.clear()
    rows = example(tmp_path, steps=2)
    assert all(row["mismatch/mean"] < 1e-5 for row in rows)
    half = len(Kept.kept) // 2
    for row, samples in zip(rows, (Kept.kept[:half], Kept.kept[half:]), strict=True):
        turns = [sum(a and not b for a, b in zip(s.trained, [*s.trained[1:], 0], strict=True)) for s in samples]  # type: ignore[misc,arg-type]
        assert row["environment/num_turns"] == pytest.approx(sum(turns) / half)
    assert rows[-1]["generated_tokens"] == sum(sum(s.trained) for s in Kept.kept)  # type: ignore[arg-type]
    for sample in Kept.kept:
        assert isinstance(sample.trained, list)
        others = bytes(t for t, on in zip(sample.response, sample.trained, strict=True) if not on and t < 256).decode()
        turn = "\n<|user|>\nTEXT\n<|assistant|>\n"
        answers = others.replace("a digit?", "TEXT").replace("higher", "TEXT").replace("lower", "TEXT")
        assert answers == turn * (len(answers) // len(turn))
        assert sum(sample.trained) <= 3 * 4


def test_runs_that_could_not_work_are_refused(tmp_path: Path) -> None:
    environment = {"library": "verifiers", "name": "games"}
    for sections, message in (
        ({"rollout": {"environment": environment}}, "want row in data.columns"),
        ({"rollout": {"environment": environment, "function": "a:b"}}, "function and environment both make"),
        ({"rollout": {"environment": environment, "segment": 2}}, "segment leaves responses unfinished"),
        ({"rollout": {"environment": environment | {"action": "text"}}}, "action is not for library verifiers"),
        ({"rollout": {"environment": environment}, "data": {"columns": ["row"], "system_prompt": "x", "chat": True}},
         "data.system_prompt: prompts are the environment's own"),
        ({"rollout": {"environment": environment | {"library": "openenv"}}}, "want name as http://HOST:PORT"),
        ({"rollout": {"environment": {"library": "openenv", "name": "http://x"}}}, "want action and observation"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run_config(tmp_path, **sections)  # type: ignore[arg-type]
