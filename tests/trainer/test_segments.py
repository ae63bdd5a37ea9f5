"""Responses in segments: mixed versions and their logprobs, the same responses, resuming, and what waits."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from engine_runs import fail, same, torchrun
from teachers import make_teacher
from trainer_runs import metrics, run_config
from transformers import AutoModelForCausalLM

from rlplus.tools.verify import verify_run
from rlplus.train.config import Config
from rlplus.train.data import Sample
from rlplus.train.recipe import Batch
from rlplus.train.rollout import RolloutEngine, make_engine
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import Interrupted, evaluator, open_run, train, validator
from rlplus.train.trainer.loop import Step, train_step

LENGTH, SEGMENT, WAITING = 8, 3, 2  # three segments: 3 + 3 + 2 tokens


class Often:
    """An end token that stands for a fifth of the vocabulary, so that responses have all lengths."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other % 5 == 0

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def lottery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers engine in this process, whose responses end often, and rewards that an untrained model gets."""

    def make(config: Any, *rest: Any, **settings: Any) -> RolloutEngine:
        if config.engine == "vllm":
            return make_engine(config, *rest, **settings)
        settings.pop("seed")
        return TransformersEngine(config, *rest, **settings)

    def draw_rewards(samples: Any, examples: Any, scorer: Any, decode: Any) -> None:
        for sample in samples:
            if not sample.scored:
                sample.reward = float(sample.demonstration or sum(sample.response) % 2)

    def begin(engine: TransformersEngine, config: Any, model: Any, length: int, end: Any, pad: int) -> None:
        begun(engine, config, model, length, [Often()], pad)

    begun = TransformersEngine._begin  # also a `SharedEngine`'s
    monkeypatch.setattr(TransformersEngine, "_begin", begin)
    monkeypatch.setattr("rlplus.train.trainer.run_parts.make_engine", make)
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)


def segmented(folder: Path, output: str, steps: int, **sections: Any) -> Config:
    train_section = {"steps": steps, "prompts_per_update": 2, "lr": 3e-3} | sections.pop("train", {})
    rollout = {"segment": SEGMENT} | sections.pop("rollout", {})
    return run_config(folder, output, train=train_section, rollout=rollout, **sections)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Sample]]:
    """The samples of each step that was taken."""
    found: list[list[Sample]] = []
    collect = Step.collect

    def recorded(step: Step) -> Batch:
        batch = collect(step)
        found.append(batch.samples)
        return batch

    monkeypatch.setattr(Step, "collect", recorded)
    return found


def parts(batch: int, length: int, version: Callable[[int], int] = lambda draw: draw) -> list[tuple[int, int]]:
    """By which versions so many tokens of batch `batch` were sampled: a segment a draw, and the rest in its own."""
    found = []
    for draw in range(max(0, batch - WAITING), batch + 1):
        tokens = length if draw == batch else min(SEGMENT, length)
        if tokens:
            found.append((version(draw), tokens))
        length -= tokens
    return found


@torch.no_grad()
def check_logprobs(folder: Path, samples: list[Sample], history: list[dict[str, torch.Tensor]]) -> None:
    """Each token's logprob is by the weights of its version, in float64, within fp32's rounding."""
    exact = AutoModelForCausalLM.from_pretrained(str(folder / "scratch"), dtype=torch.float64)
    for sample in samples:
        start, ids = len(sample.prompt) - 1, torch.tensor([[*sample.prompt, *sample.response]])
        for version, tokens in sample.segments:
            exact.load_state_dict({k: w.double() for k, w in history[version].items()}, strict=False)  # a tied head
            first = start - len(sample.prompt) + 1
            given = torch.tensor(sample.engine_logprob[first : first + tokens], dtype=torch.float64)
            logits = exact(ids).logits[0, start : start + tokens]
            want = logits.log_softmax(-1).gather(1, ids[0, start + 1 : start + 1 + tokens, None])[:, 0]
            assert (given - want).abs().max() <= 64 * torch.finfo(torch.float32).eps * (1 + logits.abs().max())
            start += tokens


@pytest.mark.parametrize("overlap", quick.first(1, [0, 2]))
def test_each_token_has_the_version_and_the_logprob_of_the_policy_that_sampled_it(tmp_path, batches, overlap):
    """Over 6 steps, and the metrics follow from the responses' final lengths alone."""
    mode = {"mode": "process"} if overlap else {}
    config = segmented(tmp_path, "run", 6, train={"overlap": overlap}, rollout=mode)
    history = []
    with open_run(config) as run:
        for _ in range(6):
            history.append({name: p.clone() for name, p in run.policy.weights()})
            train_step(run)

    def version(draw: int) -> int:
        return max(0, draw - 1) // overlap * overlap if overlap else draw

    lengths = [[len(s.response) for s in samples if not s.demonstration] for samples in batches]
    assert {1, SEGMENT, SEGMENT + 1, LENGTH} <= {length for batch in lengths for length in batch}
    for number, samples in enumerate(batches):
        for sample in samples:
            if not sample.demonstration:
                assert list(sample.segments) == parts(number, len(sample.response), version)
                assert sample.truncated == (sample.response[-1] != Often())
                assert not sample.truncated or len(sample.response) == LENGTH
        check_logprobs(run.folder.path, samples, history)
    for step, row in enumerate(metrics(run.folder.path)):
        ages = [step - v for n in lengths[step] for v, tokens in parts(step, n, version) for _ in range(tokens)]
        assert row["batch/staleness"] == pytest.approx(sum(ages) / len(ages))
        assert row["batch/staleness_max"] == max(ages)
        behind = range(step + 1, min(step + 1 + WAITING, 6))
        if len(behind) == WAITING:
            sampled = {b: SEGMENT * (step - max(0, b - WAITING) + 1) for b in behind}
            assert row["batch/waiting"] == sum(n > sampled[b] for b in behind for n in lengths[b])
        assert "mismatch/mean" not in row
    assert max(row.get("mismatch/probe", 0.0) for row in metrics(run.folder.path)) < 1e-5


@pytest.mark.parametrize(
    "algorithm",
    quick.first(
        1,
        [
            *({"preset": preset} for preset in ("rlplus", "grpo", "superrl")),
            {"preset": "sdpo", "recipe": {"template": "{prompt}{demonstration}", "loss": "sampled"}},
        ],
    ),
    ids=str,
)
def test_a_step_on_mixed_versions_is_exact(tmp_path, algorithm):
    """Loss and gradients of every parameter against float64, with old logprobs of up to three policies."""
    config = segmented(tmp_path, "run", 3, algorithm=algorithm)
    verified = verify_run(train(config), sequences=99)
    assert verified.rows
    assert not verified.wrong


GREEDY = {"top_k": 2, "top_p": 1e-6}  # one token is kept


# Shares of prefixes may depend on the step in which a batch begins; these do not.
PREFIXES = {"algorithm": {"preset": "uft", "recipe": {"name": "prefix", "schedule": "fixed"}}}


@pytest.mark.parametrize("sections", quick.first(1, [{}, PREFIXES]))
def test_with_the_same_weights_the_responses_are_the_same(tmp_path, batches, sections):
    """Also the batches: their prompts, their order, and the demonstrations, whole or as prefixes."""
    frozen = {"train": {"lr": 1e-30}} | sections
    responses = []
    for segment in (None, 1, SEGMENT):
        batches.clear()
        train(segmented(tmp_path, f"run-{segment}", 4, rollout=GREEDY | {"segment": segment}, **frozen))
        responses.append(
            [[(s.prompt, list(s.response), s.truncated, s.external, s.group) for s in batch] for batch in batches]
        )
    assert responses[0] == responses[1] == responses[2]
    assert len({len(response) for batch in responses[0] for _, response, *_ in batch}) > 1


class Killed(BaseException):
    """The run does not catch it, as if its process were gone."""


def killed_at_each_step(config: Config, monkeypatch: pytest.MonkeyPatch, **evaluations: Any) -> Path:
    """The run, killed in each step after its updates and evaluations, before its checkpoint, and resumed."""
    end, steps = Step.end, config.train.steps
    for last in range(1, steps + 1):

        def killed(step: Step, batch: Batch, last: int = last) -> None:
            if step.run.progress.step == last:
                raise Killed
            end(step, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Step, "end", killed)
            with pytest.raises(Killed) if last < steps else nullcontext():
                train(config, resume="auto", **evaluations)
    return Path(config.output_dir)


OVERLAP = {"train": {"overlap": 2}, "rollout": {"mode": "process"}}
RECIPES = ["dapo", "ppo", "prime", "exgrpo", "relift", "superrl", "uft"]
SHOWN = {"template": "{prompt}{demonstration}"}
TAUGHT = [
    {"preset": "sdpo", "recipe": SHOWN | {"loss": "sampled"}},
    {"preset": "opsd", "recipe": SHOWN},
    {"preset": "opd"},
    {"preset": "gkd"},
]


@pytest.mark.parametrize(
    "sections",
    quick.first(
        1,
        [
            {},
            OVERLAP,
            {"rollout": {"share_weights": True}},
            *({"algorithm": {"preset": preset}} for preset in RECIPES),
            *({"algorithm": algorithm} for algorithm in TAUGHT),
        ],
    ),
    ids=str,
)
def test_a_run_killed_in_every_step_ends_bit_for_bit_as_one_that_was_not(tmp_path, monkeypatch, sections):
    sections = {"checkpoint": {"every": 1}} | sections
    if sections.get("algorithm", {}).get("preset") in ("opd", "gkd"):
        sections["algorithm"] = sections["algorithm"] | {"recipe": {"teacher": str(make_teacher(tmp_path))}}
    whole = train(segmented(tmp_path, "whole", 5, **sections))
    broken = killed_at_each_step(segmented(tmp_path, "broken", 5, **sections), monkeypatch)
    assert same(whole, broken)
    assert metrics(whole) == metrics(broken)
    assert metrics(whole)[-1]["batch/waiting"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, OVERLAP])
def test_evaluations_between_the_segments_of_a_response_change_nothing(tmp_path, monkeypatch, sections):
    """Validation after each step, evaluation after each second one: bits and metrics as without, resumed ones too."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{i}-1=", "answer": f"{i - 1}"}) + "\n" for i in range(5)))
    (tmp_path / "parity.py").write_text("def reward(text, answer):\n    return float(len(text) % 2)\n")
    reward = {"kind": None, "pattern": None, "function": f"{tmp_path / 'parity.py'}:reward"}
    sections = {"checkpoint": {"every": 1}, "reward": reward} | sections
    problems = {"data": {"path": str(held_out), "max_prompt_length": 8}, "samples": 3, "k": [1]}
    evaluated = sections | {"validation": {"every": 1} | problems, "evaluation": {"every": 2} | problems}
    plain = train(segmented(tmp_path, "plain", 5, **sections))
    config = segmented(tmp_path, "whole", 5, **evaluated)
    evaluations = {"evaluate": evaluator(config), "validate": validator(config)}
    whole = train(config, **evaluations)
    broken = killed_at_each_step(segmented(tmp_path, "broken", 5, **evaluated), monkeypatch, **evaluations)
    rows = metrics(whole)
    evaluation = [{name for name in row if name.startswith(("validation/", "val/"))} for row in rows]
    assert ["validation/reward" in names for names in evaluation] == [True] * 5
    assert ["val/held_out/pass@1" in names for names in evaluation] == [False, True, False, True, False]
    assert len({row["validation/reward"] for row in rows}) > 1
    assert [{k: v for k, v in row.items() if k not in evaluation[0] | evaluation[1]} for row in rows] == metrics(plain)
    assert metrics(broken) == rows
    assert same(plain, whole)
    assert same(plain, broken)
    assert metrics(plain)[-1]["batch/waiting"] > 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("sections", [{}, OVERLAP])
def test_vllm_continues_responses(tmp_path, monkeypatch, batches, sections):
    """A token's logprob is by the weights of its version, in float64; a run that is killed resumes bit for bit."""
    engine = {"engine": "vllm", "kv_cache_memory_mb": 16} | sections.get("rollout", {})
    sections = sections | {"rollout": engine, "model": {"dtype": "float32"}, "checkpoint": {"every": 1}}
    config, history = segmented(tmp_path, "whole", 4, **sections), []
    with open_run(config) as run:
        for _ in range(4):
            history.append({name: p.clone() for name, p in run.policy.weights()})
            train_step(run)
    for number, samples in enumerate(batches):
        rollouts = [sample for sample in samples if not sample.demonstration]
        assert any(len(sample.segments) > 1 for sample in rollouts) == (number > 0)
        for sample in rollouts:
            assert sum(tokens for _, tokens in sample.segments) == len(sample.response) <= LENGTH
        check_logprobs(run.folder.path, samples, history)
    whole = run.folder.path
    broken = killed_at_each_step(segmented(tmp_path, "broken", 4, **sections), monkeypatch)
    assert metrics(whole) == metrics(broken)
    assert metrics(whole)[-1]["batch/waiting"] > 0


def test_a_step_that_is_lost_takes_nothing_with_it_that_waits(tmp_path, monkeypatch):
    """An engine that fails once is asked again; one that fails twice ends the run, as does a signal after the draw:
    their checkpoints have all that waited."""
    whole = train(segmented(tmp_path, "whole", 4))
    with monkeypatch.context() as patch:
        fail(patch, 3)
        again = train(segmented(tmp_path, "again", 4))
    config = segmented(tmp_path, "lost", 4)
    with monkeypatch.context() as patch:
        fail(patch, 3, 4)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(config)
    lost = train(config, resume="newest")
    config, credit, batches = segmented(tmp_path, "given up", 4), Step.credit, []

    def credit_and_stop(step: Step, batch: Batch) -> None:
        batches.append(batch)
        if len(batches) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        credit(step, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "credit", credit_and_stop)
        with pytest.raises(Interrupted):
            train(config)
    given_up = train(config, resume="newest")
    for folder in (again, lost, given_up):
        assert same(whole, folder)
        assert metrics(whole) == metrics(folder)


@pytest.mark.slow
def test_prompts_and_order_outlive_batches_that_are_lost_ahead(tmp_path, monkeypatch, batches):
    """With overlap the first checkpoint holds the batches whose generation did not fail, and what waits behind them."""
    whole = train(segmented(tmp_path, "whole", 5, **OVERLAP))
    prompts = [[sample.prompt for sample in batch] for batch in batches]
    batches.clear()
    config = segmented(tmp_path, "broken", 5, **OVERLAP)
    with monkeypatch.context() as patch:
        fail(patch, 3)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(config)
    train(config, resume="newest")
    assert [[sample.prompt for sample in batch] for batch in batches] == prompts
    assert len(metrics(whole)) == len(metrics(Path(config.output_dir))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_two_ranks_resume_bitwise(tmp_path, parallel):
    """ZeRO-3, each rank with what waits of its own prompts; with parallel 2 both train on parts of all of them."""
    scratch = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    sections: dict[str, Any] = {
        "train": {"zero_stage": 3, "sequence_parallel": parallel, "tokens_per_micro_batch": 16},
        "model": {"scratch": scratch},
    }
    folders = []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for part in steps:
            changed = {key: dict(value) for key, value in sections.items()}
            config = segmented(tmp_path, name, part, **changed)
            torchrun(config, "--resume=auto")
        folders.append(Path(config.output_dir))
    assert same(*folders)
    assert metrics(folders[0]) == metrics(folders[1])
    assert metrics(folders[0])[-1]["batch/staleness_max"] == WAITING


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"segment": 8}}, "segment .* want it below max_response_length 8, or null; got 8"),
        ({"rollout": {"segment": 0}}, "(?s)rollout.segment.*greater than or equal to 1"),
        ({"rollout": {"segment": 2.5}}, "(?s)rollout.segment.*valid integer"),
        (
            {"rollout": {"function": "a:b"}},
            "segment leaves responses unfinished, .*: want one of the two; got 3 and a:b",
        ),
        (
            {"algorithm": {"preset": "grpo", "objective": {"mismatch_cap": 2.0}}},
            "mismatch_cap: no use with rollout.segment, whose old policy is the engine's",
        ),
        (
            {"rollout": {"segment": 1, "group_size": 2**16}},
            "rollout.segment 1 has 8 batches under way at a time: want at most 1048576 .*; got 2097152",
        ),
    ],
)
def test_a_segment_that_has_no_meaning_is_refused(tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        segmented(tmp_path, "run", 1, **sections)
