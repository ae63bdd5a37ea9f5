"""Responses that a function of the user makes: what is sampled, what is trained on, what is refused."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import same
from said_texts import Kept
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from update_cases import batch_of_samples, naive_loss, packed

from examples import calculator, thought_templates
from experiments.toy.task import draw_splits, make_tokenizer, write_jsonl
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import Config
from rlplus.train.data import Example
from rlplus.train.evaluation.sample import evaluate
from rlplus.train.recipe import Batch
from rlplus.train.reward import Score
from rlplus.train.rollout import Completion, Request, Response, RunFailed, Sampler, Sampling, make_respond
from rlplus.train.trainer import Interrupted, Run, open_run, train

END, CALL = 9, 7
TOKENIZER: Any = make_tokenizer()


@dataclass
class Script:
    """An engine whose every call gives the next of `answers`, cut at the limits."""

    answers: list[list[list[int]]]
    name: str = "script"
    asked: list[Sequence[Request]] = field(default_factory=list)
    sampled: list[Sampling] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        assert all(request.n == 1 for request in requests)
        self.asked.append(requests)
        self.sampled.append(sampling)
        ends = {END, *sampling.stop}
        groups = []
        for tokens, request in zip(self.answers.pop(0), requests, strict=True):
            cut = tokens[: request.max_tokens]
            groups.append([Completion(cut, [-0.5] * len(cut), truncated=cut[-1] not in ends)])
        return groups


def sampler_of(*answers: list[list[int]]) -> tuple[Sampler, Script]:
    script = Script(list(answers))
    return Sampler(script, TOKENIZER, Sampling(0.7, 3)), script  # type: ignore[arg-type]


def tasks(*prompts: tuple[int, ...]) -> list[Example]:
    return [Example(i, prompt, "x", None) for i, prompt in enumerate(prompts)]


def test_responses_go_on_until_they_end() -> None:
    sampler, script = sampler_of([[1, CALL], [2, END], [3, 3, 3, 3]], [[4, END], [3, 3, 3, 3]], [])
    first, second, third = responses = [Response(task, 6) for task in tasks((1,), (2, 2), (3,))]
    going = sampler(responses, stop=[CALL], max_tokens=4)
    assert going == [first, third]
    assert (second.ended, second.truncated) == (True, False)
    first.insert([5, 5])
    assert sampler(responses, stop=[CALL]) == []
    assert (first.tokens, first.trained) == ([1, CALL, 5, 5, 4, END], [True, True, False, False, True, True])
    assert (first.ended, first.truncated) == (True, False), "the end token took the last place"
    assert (third.tokens, third.ended, third.truncated) == ([3] * 6, True, True)
    assert [p for p, on in zip(first.logprob, first.trained, strict=True) if on] == [-0.5] * 4
    assert sampler(responses) == []
    assert [request.max_tokens for request in script.asked[0]] == [4, 4, 4]
    assert script.asked[1] == [Request([1, 1, CALL, 5, 5], 1, 2), Request([3, 3, 3, 3, 3], 1, 2)]
    assert {sampling.temperature for sampling in script.sampled} == {0.7}
    assert len({sampling.seed for sampling in script.sampled}) == 3


def test_an_insertion_without_room_ends_the_response() -> None:
    sampler, _ = sampler_of([[1, CALL]], [])
    (response,) = responses = [Response(task, 4) for task in tasks((1,))]
    sampler(responses, stop=[CALL])
    response.insert([5, 5])  # fits, but nothing could follow it
    assert (response.tokens, response.ended, response.truncated, response.room) == ([1, CALL], True, True, 2)
    assert sampler(responses) == []


def test_a_stop_token_in_the_last_place_is_a_truncation() -> None:
    sampler, _ = sampler_of([[1, CALL]])
    (response,) = responses = [Response(task, 2) for task in tasks((1,))]
    assert sampler(responses, stop=[CALL]) == []
    assert response.truncated


def test_thought_templates_are_inserted_one_after_the_other() -> None:
    texts = {action: [20 + i] for i, (_, actions) in enumerate(thought_templates.TEMPLATES) for action in actions}

    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return texts[text]

    sampler, script = sampler_of([[1], [2, END]], [[3]], [[4, END]])
    sampler.tokenizer = Words()  # type: ignore[assignment]
    short, long = responses = [Response(task, 300) for task in tasks((1,), (2,) * 100)]
    script.answers = [[[1, END], [2]], [[3]], [[4, END]]]
    thought_templates.rollout(sampler, responses)
    one, (two, three) = (thought_templates.template(n) for n in (1, 100))
    assert short.tokens == [*texts[one[0]], 1, END]
    assert long.tokens == [*texts[two], 2, *texts[three], 3, 4, END]
    assert long.trained == [False, True, False, True, True, True]
    assert [[request.max_tokens for request in call] for call in script.asked[:2]] == [[256, 256], [256]]


# ---- in a run


def demo_config(folder: Path, output: str = "run", **train_changes: Any) -> Config:
    """A run of a random model on the demo's task, with the calculator."""
    write_jsonl(folder / "demo.jsonl", draw_splits(0)[0][:16])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen2Config(
        vocab_size=len(TOKENIZER), max_position_embeddings=96, **sizes, num_key_value_heads=1, tie_word_embeddings=True
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    return run_config(
        folder,
        output,
        model={"path": str(folder / "model"), "scratch": None},
        data={"path": str(folder / "demo.jsonl"), "max_prompt_length": 32},
        reward={"pattern": ":([0-3]*)"},
        rollout={"max_response_length": 40, "function": "examples.calculator:rollout"},
        train={"tokens_per_micro_batch": 256, "steps": 2} | train_changes,
    )


def test_the_policy_learns_from_what_it_wrote_and_reads_what_the_tool_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_recipe", Kept)
    Kept.kept.clear()
    rows = metrics(train(demo_config(tmp_path)))
    called = 0
    for sample in Kept.kept:
        if sample.demonstration:
            continue
        assert isinstance(sample.trained, list)
        sums = calculator.calculate(TOKENIZER.decode(sample.prompt))
        text, spans = TOKENIZER.convert_ids_to_tokens(sample.response), []
        for place, on in enumerate(sample.trained):
            if not on:
                if sample.trained[place - 1]:
                    assert text[place - 1] == ";"
                    spans.append("")
                spans[-1] += text[place]
        assert spans == [sums] * len(spans)
        called += len(spans)
        assert sample.engine_logprob is not None
        assert [math.isnan(p) for p in sample.engine_logprob] == [not on for on in sample.trained]
    assert called > 5
    assert all(row["mismatch/mean"] < 1e-5 for row in rows), "engine and trainer agree about what follows a tool's text"
    sampled = sum(sum(sample.trained) for sample in Kept.kept if isinstance(sample.trained, list))
    assert rows[-1]["generated_tokens"] == sampled


class Killed(Kept):
    """Ends the run in its second step, before anything has changed."""

    def credit(self, batch: Batch) -> None:
        super().credit(batch)
        if len(self.kept) == 2 * 16:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_with_a_function_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {"engine": "transformers", "max_response_length": 8, "function": "rollout_functions:echo"}
    whole = train(run_config(tmp_path, "whole", rollout=rollout))
    config = run_config(tmp_path, "parts", rollout=rollout)
    Kept.kept.clear()
    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.trainer.run_parts.make_recipe", Killed)
        with pytest.raises(Interrupted):
            train(config)
    parts = train(config, resume="newest")
    assert same(whole, parts)
    assert metrics(whole) == metrics(parts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_run(run_config(tmp_path_factory.mktemp("run"))) as run:
        yield run


def test_tokens_that_are_not_trained_on_reach_neither_gradient_nor_denominator(run: Run) -> None:
    """Against float64, with single tokens, whole responses and none left out."""
    samples = [
        replace(
            s, trained=[(i + j) % 3 > 0 for j in range(len(s.response))] if i % 2 else i % 4 == 0, advantage=0.5 + i
        )
        for i, s in enumerate(batch_of_samples())
    ]
    masks = [torch.tensor([s.trained] * len(s.response) if isinstance(s.trained, bool) else s.trained) for s in samples]
    tokens = sum(int(mask.sum()) for mask in masks)
    lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
    for s, mask in zip(samples, masks, strict=True):
        (naive_loss(lm, s, s.advantage * mask.double(), torch.tensor(s.external)) / tokens).backward()
    want = {name: p.grad for name, p in lm.named_parameters()}
    model = run.policy.engine.module
    model.zero_grad()
    outputs = [
        model(batch, run.policy._loss_op(ALGORITHMS["rlplus"].objective, batch)) for batch in packed(run, samples)
    ]
    sum(out.loss for out in outputs).backward()  # type: ignore[union-attr]
    assert sum(int(out.stats["tokens"]) for out in outputs) == tokens
    for name, p in model.named_parameters():
        gradient = want[name.removeprefix("lm.")]
        bound = {"rtol": 1e-4, "atol": 1e-6 * float(gradient.abs().max())}  # as in test_trainer.py
        torch.testing.assert_close(p.grad.double(), gradient, msg=name, **bound)
    model.zero_grad()
    assert packed(run, [replace(samples[0], trained=False)]) == []


FAULTS = {
    "raises": "raised KeyError: 'no such tool'",
    "leaves_it_empty": r"response 0: want 1 to 8 tokens \(rollout.max_response_length\); got 0",
    "writes_too_much": "response 0: want 1 to 8 tokens .*; got 9",
    "forgets_logprobs": "response 0: want 2 values in logprob, one per token; got 0",
    "has_no_logprob": "response 0: want finite logprobs of all tokens that are trained on",
    "has_no_reward": "response 0: want a finite reward or None; got nan",
    "measures_nothing": "response 0: want finite metrics; got {'turns': inf}",
    "leaves_the_vocabulary": "response 0: want token ids from 0 to 13; got 1 to 100000",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_trained_on_is_refused(name: str) -> None:
    respond = make_respond(f"rollout_functions:{name}", TOKENIZER, 14)
    engine: Any = Script([[[1, 2, END]] * 2])
    with pytest.raises(RunFailed, match=f"^rollout.function rollout_functions:{name}.*{FAULTS[name]}"):
        respond(engine, tasks((1,), (2,)), [Request((1,), 1, 8), Request((2,), 1, 8)], Sampling(1.0, 0))


def test_the_engines_own_failures_are_passed_on() -> None:
    """So that a new engine is made."""
    respond = make_respond("rollout_functions:echo", TOKENIZER, 14)
    broken: Any = Script([])
    with pytest.raises(IndexError, match="pop from empty list"):
        respond(broken, tasks((1,)), [Request((1,), 1, 8)], Sampling(1.0, 0))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module:f", "No module named"),
        ("rollout_functions:f", "no attribute 'f'"),
        ("rollout_functions:number", "is 5"),
    ],
)
def test_a_function_that_is_none_is_refused(reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.function: want .*{message}"):
        make_respond(reference, TOKENIZER, 14)


def test_rewards_of_the_function_count_in_an_evaluation() -> None:
    engine: Any = Script([[[1, END]] * 8])
    result = evaluate(
        engine,
        lambda texts, *_, **__: [Score(0.0, "unparsed")] * len(texts),  # type: ignore[arg-type]
        tasks((1,), (2,)),
        str,  # type: ignore[arg-type]
        samples=4,
        k=[1],
        temperature=1.0,
        max_tokens=8,
        seed=0,
        respond=make_respond("rollout_functions:graded", TOKENIZER, 14),
    )
    assert (result.correct, result.statuses) == ((2, 2), {"ok": 8})


def test_a_rank_without_a_prompt_does_not_call_the_function(tmp_path: Path) -> None:
    """Which may read its first response, as this one does."""
    (tmp_path / "first.py").write_text("def respond(sampler, responses):\n    sampler(responses[:1])\n")
    answer = make_respond(f"{tmp_path / 'first.py'}:respond", TOKENIZER, 32)
    script: Any = Script([])
    assert answer(script, [], [], Sampling(0.7, 3)) == []
    assert script.asked == []
