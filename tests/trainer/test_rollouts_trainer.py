"""A run and its engine: the probe after a push, engines that fail in mid-run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from engine_runs import fail, in_the_middle_of_vllms, same, torchrun
from trainer_runs import by_torchrun, environment, metrics, run_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlplus.train.rollout.process_engine
import rlplus.train.trainer.engine
import rlplus.train.trainer.rollouts
import rlplus.train.trainer.run_parts
from rlplus.train.config import MAX_LOGPROB_GAPS
from rlplus.train.evaluation.sample import evaluate_model
from rlplus.train.learner.policy import Policy, _buckets
from rlplus.train.reward import Scorer
from rlplus.train.rollout import RunFailed
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import evaluator, open_run, train
from rlplus.train.trainer.engine import PROBE_TOKENS


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From version `first` on, one parameter of each push arrives incomplete: some of its values are off."""

    def from_version(first: int, off: float = 0.05) -> None:
        push = TransformersEngine.push_weights

        def push_stale(engine: Any, weights: Any, version: int) -> None:
            push(engine, weights, version)
            if version >= first:
                with torch.no_grad():
                    dict(engine._model.named_parameters())["model.norm.weight"][:8] += off

        monkeypatch.setattr(TransformersEngine, "push_weights", push_stale)

    return from_version


@pytest.mark.parametrize("updates", [1, 2])
def test_no_weight_learns_from_an_engine_with_other_weights(tmp_path, monkeypatch, stale, updates):
    """The batch's own logprobs show it before the first optimizer step on the batch, with one update or several."""
    stale(1)
    config = run_config(tmp_path, train={"prompts_per_update": 4 // updates})
    steps: list[tuple[Policy, list[torch.Tensor]]] = []  # each with the weights after it
    optimizer_step = Policy.step

    def step(policy: Policy, *limit: float) -> bool:
        applied = optimizer_step(policy, *limit)
        steps.append((policy, [p.clone() for p in policy.engine.module.parameters()]))
        return applied

    monkeypatch.setattr(Policy, "step", step)
    with pytest.raises(RunFailed, match=r"step 2: the mean gap between .*; want at most .*The policy was not"):
        train(config)
    assert len(steps) == updates
    policy, after = steps[-1]
    assert all(torch.equal(p, kept) for p, kept in zip(policy.engine.module.parameters(), after, strict=True))
    (row,) = metrics(Path(config.output_dir))
    assert 0 <= row["mismatch/mean"] < 1e-5


def test_the_probe_sees_a_wrong_first_push_before_anything_is_generated(tmp_path, monkeypatch, stale):
    stale(0)
    monkeypatch.setattr(rlplus.train.trainer.rollouts, "generate", lambda *_: pytest.fail("it was generated"))
    with pytest.raises(RunFailed, match=r"push of version 0: the mean gap between .* trainer is .*; want at most"):
        train(run_config(tmp_path))


def test_the_probe_reads_the_first_prompts_whole(tmp_path, monkeypatch):
    asked, generate = [], TransformersEngine.generate

    def recorded(engine: Any, requests: Any, sampling: Any) -> Any:
        asked.append(requests)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", recorded)
    folder = train(run_config(tmp_path, train={"steps": 1}))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [tokenizer.decode(request.prompt) for request in asked[0]]
    assert texts == [f"{i}+{i % 3}=" for i in range(6)]
    assert {(request.n, request.max_tokens) for request in asked[0]} == {(1, PROBE_TOKENS)}


def test_the_probe_sees_wrong_weights_before_an_evaluation(tmp_path, stale):
    stale(1)
    evaluation = {"data": {"path": "task.jsonl", "max_prompt_length": 8}, "every": 1}
    with pytest.raises(RunFailed, match=r"after the push of version 1: .*; want at most"):
        train(run_config(tmp_path, evaluation=evaluation), evaluate=lambda run: pytest.fail("it was evaluated"))


@pytest.fixture
def coarse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Sections of a bf16 run whose rounding is beyond the default limit; the engine has the same weights in fp32."""
    scratch = {"hidden_size": 64, "layers": 8, "heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}
    first = train(run_config(tmp_path, "first", model={"scratch": scratch, "dtype": "float32"}, train={"steps": 1}))
    lm = AutoModelForCausalLM.from_pretrained(first / "model")
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0 if "layers" in name else 25.0)
    lm.save_pretrained(first / "model")
    make = rlplus.train.trainer.run_parts.make_engine

    def in_fp32(*args: Any, dtype: str, **kwargs: Any) -> Any:
        return make(*args, **kwargs, dtype="float32")

    monkeypatch.setattr(rlplus.train.trainer.run_parts, "make_engine", in_fp32)
    return {"model": {"path": str(first / "model"), "scratch": None, "dtype": "bfloat16"}, "train": {"lr": 1e-6}}


def test_a_gap_that_rounding_explains_is_said_and_does_not_stop_the_run(tmp_path, coarse, caplog):
    """Once for the probe and the steps after it, unless they are further apart."""
    folder = train(run_config(tmp_path, **coarse))
    rows = metrics(folder)
    assert len(rows) == 2
    assert any(row["mismatch/mean"] > MAX_LOGPROB_GAPS["bfloat16"] for row in rows)
    said = [r.message for r in caplog.records if "or as much as rounding explains" in r.message]
    assert len(said) == 1
    assert "layers compute in float32, not bfloat16" in said[0]


def test_rounding_does_not_explain_other_weights(tmp_path, coarse, stale):
    stale(0, 3.0)
    with pytest.raises(RunFailed, match=r"version 0: the mean gap .* most 0.05\. Rounding does not explain it"):
        train(run_config(tmp_path, **coarse))


def test_a_limit_that_is_given_holds_and_the_message_says_that_it_is_rounding(tmp_path, coarse):
    given = coarse | {"rollout": {"max_logprob_gap": 0.01}}
    with pytest.raises(RunFailed, match=r"most rollout.max_logprob_gap=0.01\. Rounding explains it: .* change by"):
        train(run_config(tmp_path, **given))


def test_a_rounding_that_cannot_be_measured_stops_the_run_with_the_reason(tmp_path, coarse, monkeypatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr(Policy, "rounding", fails)
    with pytest.raises(RunFailed, match=r"not be measured \(expected m1 .*: set rollout.max_logprob_gap to allow"):
        train(run_config(tmp_path, **coarse))


def test_a_version_is_pushed_once(tmp_path, monkeypatch):
    """Also with an evaluation in between."""
    push, versions = TransformersEngine.push_weights, []

    def counted(engine: Any, weights: Any, version: int) -> None:
        versions.append(version)
        push(engine, weights, version)

    monkeypatch.setattr(TransformersEngine, "push_weights", counted)
    evaluation = {"data": {"path": "task.jsonl", "max_prompt_length": 8}, "every": 2}
    train(run_config(tmp_path, train={"steps": 4}, evaluation=evaluation), evaluate=lambda run: {})
    assert versions == [0, 1, 2, 3, 4]


def test_the_probe_changes_nothing(tmp_path, monkeypatch):
    """The same run without it, bit for bit."""
    with_probe = train(run_config(tmp_path, "with"))
    monkeypatch.setattr(rlplus.train.trainer.engine.SyncedEngine, "_probe", lambda self: (torch.zeros(1), []))
    without = train(run_config(tmp_path, "without"))
    assert same(with_probe, without)


def test_a_colocated_engine_that_breaks_is_made_again_and_the_step_is_not_lost(tmp_path, monkeypatch, caplog):
    whole = train(run_config(tmp_path, "whole", train={"steps": 3}))
    calls = fail(monkeypatch, 2)
    broken = train(run_config(tmp_path, "broken", train={"steps": 3}))
    assert calls == [4]
    assert "illegal memory access" in caplog.text
    assert same(whole, broken)
    assert metrics(whole) == metrics(broken)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_colocated_vllm_that_breaks_is_made_again(tmp_path, monkeypatch, caplog):
    """In the middle of the second step's generation, requests and all."""
    settings = {"engine": "vllm", "kv_cache_memory_mb": 16}
    whole = train(run_config(tmp_path, "whole", train={"steps": 3}, rollout=settings))

    def breaking() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    calls = in_the_middle_of_vllms(monkeypatch, breaking)
    broken = train(run_config(tmp_path, "broken", train={"steps": 3}, rollout=settings))
    assert len(calls) == 4
    assert "illegal memory access" in caplog.text
    assert same(whole, broken)
    assert metrics(whole) == metrics(broken)


def test_an_engine_that_breaks_twice_ends_the_run(tmp_path, monkeypatch):
    fail(monkeypatch, 2, 3)
    with pytest.raises(RunFailed, match=r"engine failed: rank 0: .*illegal.*; then a new one: .* rank 0: .*illegal"):
        train(run_config(tmp_path))


def test_gathered_pieces_keep_to_the_budget():
    class Shard:
        def __init__(self, numel: int) -> None:
            self.ds_numel = numel

        def element_size(self) -> int:
            return 2

    named = [(str(i), [Shard(n)], None) for i, n in enumerate([10, 40, 1, 200, 30, 20, 25, 25])]
    pieces = [[name for name, _, _ in piece] for piece in _buckets(named, 100)]
    assert pieces == [["0", "1"], ["2"], ["3"], ["4", "5"], ["6", "7"]]


def test_tensor_parallel_ranks_do_not_evaluate_in_training(tmp_path):
    evaluation = {"data": {"path": "-", "max_prompt_length": 8}, "every": 1}
    shared = {"engine": "vllm", "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=r"evaluation.every: .*tensor_parallel_size 2 needs several"):
        run_config(tmp_path, rollout=shared, evaluation=evaluation)
    run_config(tmp_path, rollout=shared | {"mode": "process"}, evaluation=evaluation)


def test_a_finished_model_is_evaluated_in_this_process(tmp_path, monkeypatch):
    """Whatever the run's engine was: no server is asked, which would have other weights."""
    folder = train(run_config(tmp_path, train={"steps": 1}))
    data = {"path": str(tmp_path / "task.jsonl"), "max_prompt_length": 8}
    server = {"mode": "server", "server_url": "http://127.0.0.1:9", "engine": "auto"}
    config = run_config(tmp_path, evaluation={"data": data, "samples": 1}, rollout=server)
    monkeypatch.setattr("rlplus.train.rollout._choose", lambda engine: "transformers")
    (result,) = evaluate_model(config, str(folder / "model")).values()
    assert result.problems == tuple(range(6))


def test_a_response_prefix_is_in_the_prompt_and_in_what_is_graded(tmp_path, monkeypatch):
    """And the chat template of the run goes with its model."""
    graded: list[str] = []
    grade = Scorer.__call__

    def spy(self, texts, *rest, **options):
        graded.extend(texts)
        return grade(self, texts, *rest, **options)

    monkeypatch.setattr(Scorer, "__call__", spy)
    data = {"path": str(tmp_path / "task.jsonl"), "max_prompt_length": 9, "response_prefix": "<", "chat": True}
    config = run_config(
        tmp_path,
        data=data,
        evaluation={"data": data, "samples": 1, "every": 1},
        model={"chat_template": "{{ messages[0].content }}{{ '!' }}"},
        train={"steps": 1},
    )
    with open_run(config) as run:
        assert bytes(run.examples[0].prompt) == b"0+0=!<"
        assert bytes(run.examples[0].demonstration[:-1]) == b"0>"
        assert [e.demonstration is None for e in run.examples] == [False] * 6  # graded as "<0>"
    folder = train(config, evaluate=evaluator(config))
    count = len(graded)
    evaluate_model(config)
    assert len(graded) == count + 6
    assert [text for text in graded if not text.startswith("<")] == []
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template == config.model.chat_template


@pytest.mark.slow
def test_two_ranks_with_engine_processes_do_what_they_do_without(tmp_path):
    """ZeRO-3, two ranks that share one copy of the weights; the same model, bit for bit."""
    folders = []
    for mode in ("colocated", "process"):
        config = run_config(
            tmp_path,
            mode,
            train={
                "steps": 3,
                "zero_stage": 3,
                "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            },
            rollout={"mode": mode, "push_bucket_mb": 1},
        )
        torchrun(config)
        folders.append(Path(config.output_dir))
    assert same(*folders)
    assert metrics(folders[0]) == metrics(folders[1])


ABSENT = """
import os, sys, time
from rlplus.train.config import load_config
from rlplus.train.rollout import push
from rlplus.train.trainer import open_run
push.GRACE_S = 1.0
with open_run(load_config(sys.argv[1])) as run:
    if run.rank == 1:
        time.sleep(600)  # hangs, and does not come to the gather
    run.rollouts.sync(0)
"""


@pytest.mark.slow
def test_a_gather_that_waits_for_an_absent_rank_is_named_and_ended(tmp_path):
    """It waits inside gloo, where no exception reaches it."""
    config = run_config(
        tmp_path,
        train={"zero_stage": 3, "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
        rollout={"push_timeout_s": 3.0},
    )
    path, script = tmp_path / "run.yaml", tmp_path / "absent.py"
    path.write_text(config.to_yaml())
    script.write_text(ABSENT)
    done = processes.run(by_torchrun(script, path), env=environment())
    assert done.returncode != 0
    wanted = "rank 0: the push of version 0 waited more than 3 s for the trainer to gather model.embed_tokens.weight"
    assert wanted in done.stderr, done.stderr[-4000:]


ONE_FAILS = """
import sys
from rlplus.train.config import load_config
from rlplus.train.rollout.transformers_engine import TransformersEngine
from rlplus.train.trainer import run_parts, train
from rlplus.train.trainer.engine import PROBE_TOKENS
original, calls = TransformersEngine.generate, []
def generate(engine, requests, sampling):
    if requests[0].max_tokens != PROBE_TOKENS:
        calls.append(1)
        if len(calls) == 2 and run_parts.dist.get_rank() == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return original(engine, requests, sampling)
TransformersEngine.generate = generate
def make(config, *rest, seed, **settings):
    return TransformersEngine(config, *rest, **settings)
run_parts.make_engine = make  # of mode process, too: what differs is only where it runs
train(load_config(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_fails_on_one_rank_is_everybodys(tmp_path, overlap):
    """Colocated: both make a new one and go on, to the same model. Ahead of the training: both end and say which."""
    train_section = {"steps": 3, "zero_stage": 3, "overlap": overlap}
    mode = {"mode": "process" if overlap else "colocated"}
    config = run_config(tmp_path, "broken", train=train_section, rollout=mode)
    path, script = tmp_path / "run.yaml", tmp_path / "one_fails.py"
    path.write_text(config.to_yaml())
    script.write_text(ONE_FAILS)
    done = processes.run(by_torchrun(script, path), env=environment())
    if overlap:
        assert done.returncode != 0
        said = "EngineFailed: the rollout engine failed: rank 1: RuntimeError('CUDA error: an illegal memory access was"
        assert done.stderr.count(said) == 2, done.stderr[-4000:]
        return
    assert done.returncode == 0, done.stderr[-4000:]
    whole = run_config(tmp_path, "whole", train=train_section)
    torchrun(whole)
    assert same(Path(config.output_dir), Path(whole.output_dir))
    assert metrics(Path(config.output_dir)) == metrics(Path(whole.output_dir))


def test_sft_starts_no_engine(tmp_path, monkeypatch, capsys):
    """Whatever the section rollout says; it trains as beside an engine that is never asked."""
    sft = {"algorithm": {"preset": "sft"}, "rollout": {"engine": "vllm", "mode": "process"}}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    beside = run_config(tmp_path, "beside", algorithm={"preset": "sft"})
    with monkeypatch.context() as patch:
        patch.setattr(type(beside), "needs_engine", True)
        train(beside)
    with monkeypatch.context() as patch:
        patch.setattr(rlplus.train.trainer.run_parts, "make_engine", refuse)
        folder = train(run_config(tmp_path, "alone", **sft))
    assert "no rollouts, and no engine" in capsys.readouterr().err
    assert same(folder, Path(beside.output_dir))
    assert metrics(folder) == metrics(Path(beside.output_dir))
    data = {"path": beside.data.path, "max_prompt_length": 8}
    evaluated = run_config(
        tmp_path,
        "evaluated",
        algorithm={"preset": "sft"},
        evaluation={"data": data, "every": 2, "samples": 2, "k": [1]},
    )
    rows = metrics(train(evaluated, evaluate=evaluator(evaluated)))
    assert [any(name.startswith("val/") for name in row) for row in rows] == [False, True]
