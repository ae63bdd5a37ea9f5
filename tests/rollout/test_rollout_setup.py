"""The choice of the engine, checks of requests and answers, and engines inside the trainer's process group."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollout_models import (
    EOS,
    ODD_LOGPROBS,
    ODD_TOKENS,
    PROMPTS,
    gap,
    global_state,
    requests,
    save,
    start,
    tiny_model,
)
from trainer_runs import on_ranks

import rlplus.train.rollout
from rlplus.common.kept_sets import KeptSets
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import Completion, Request, RunFailed, Sampling, check_responses, checked_weights, make_engine


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


def checked(*, tokens: Any = (3, EOS), logprob: Any = (-1.0, -2.0), truncated: bool = False, **more: Any) -> Any:
    """Responses to two requests, of which the second has this one: at most 4 tokens of 8; 1 and 6 end it."""
    groups = [[], [Completion([*tokens], [*logprob], truncated, **more)]]
    asked = [Request([2], 0, 4), Request([2, 3], 1, 4)]
    return check_responses(groups, asked, Sampling(1.0, 0, (6,)), vocabulary=8, ends=[EOS], engine="my engine")


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"tokens": (3, 6), "logprob": (-1, 5e-7)},
        {"tokens": (EOS,), "logprob": (0.0,)},
        {"tokens": (7, 0, 2, 3), "logprob": (-1.0,) * 4, "truncated": True},
        {"kept": KeptSets.of([[3, 0], [EOS, 7]])},
    ],
)
def test_a_response_that_the_model_may_have_sampled_passes(good: dict[str, Any]) -> None:
    assert len(checked(**good)) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *(({"tokens": (token, EOS)}, "token 1: want an id from 0 to 7; got") for token in ODD_TOKENS),
        ({"tokens": (), "logprob": ()}, "want 1 to 4 tokens; got 0"),
        ({"tokens": (3, 3, 3, 3, EOS), "logprob": (-1.0,) * 5}, "want 1 to 4 tokens; got 5"),
        ({"tokens": (EOS, 3), "truncated": True}, "token 1: want nothing behind the end token 1; got 1 more"),
        ({"tokens": (6, EOS)}, "token 1: want nothing behind the end token 6"),
        ({"tokens": (3, 2)}, r"stop: want one of the end tokens \[1, 6\] as the last; got 2"),
        ({"tokens": (3, 2), "truncated": True}, "length: want 4 tokens without an end token .*; got 2, of which"),
        ({"tokens": (3, 2, 3, 6), "truncated": True}, "length: want 4 tokens .* the last is 6"),
        ({"logprob": (-1.0,)}, "want 2 finite logprobs, one a token; got 1"),
        *(({"logprob": (-1.0, value)}, "logprob 2: want 2 finite logprobs") for value in ODD_LOGPROBS),
        ({"kept": KeptSets.of([[3, 8], [EOS]])}, "kept tokens: want ids from 0 to 7; got 1 to 8"),
        ({"kept": KeptSets.of([[3, -1], [EOS]])}, "kept tokens: want ids from 0 to 7; got -1 to 3"),
    ],
)
def test_a_response_that_it_cannot_have_sampled_is_an_error(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFailed, match=f"^my engine, request 1, response 0: .*{message}") as error:
        checked(**fault)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_an_engine_answers_each_request_with_as_many_responses() -> None:
    with pytest.raises(RunFailed, match="my engine, request 0: want 2 responses; got 1"):
        check_responses(
            [[Completion([EOS], [-1.0], False)]],
            [Request([2], 2, 4)],
            Sampling(1.0, 0),
            vocabulary=8,
            ends=[EOS],
            engine="my engine",
        )


def test_choice_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = rlplus.train.rollout._choose
    monkeypatch.setattr(rlplus.train.rollout, "installed_vllm", lambda: None)
    assert choose("auto") == "transformers"
    assert choose("transformers") == "transformers"
    # Installed and broken, as with CUDA builds on a machine without CUDA: neither choice passes over it.
    monkeypatch.setattr(rlplus.train.rollout, "installed_vllm", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for engine in ("auto", "vllm"):
        with pytest.raises(ValueError, match=r"does not import .*LLM.*install it again by pip install"):
            choose(engine)


@pytest.mark.parametrize(("given", "key"), [({"sleep": True}, "sleep"), ({"engine": "vllm"}, "engine vllm")])
def test_nothing_is_ignored_where_there_is_no_vllm(
    given: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlplus.train.config.rollout_section.find_spec", lambda name: None)
    config = RolloutConfig(max_response_length=8, **given)
    install = r'vLLM is not installed: pip install -e "\.\[vllm\]" .* or pip install -e "\.\[cpu\]"'
    with pytest.raises(ValueError, match=rf"rollout\.{key}.*: {install}"):
        make_engine(config, "-", dtype="float32", max_model_len=8, end_ids=[0], pad_token_id=0, seed=0)


@pytest.mark.vllm
def test_auto_takes_vllm_where_it_is_installed() -> None:
    assert rlplus.train.rollout._choose("auto") == "vllm"


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiny_model(tied=False), tmp_path)
    with caplog.at_level("INFO", logger="rlplus.train.rollout"):
        start("transformers", tmp_path).close()
    assert "rollout engine: transformers" in caplog.text


def run_ranks(path: Path, kind: str, ranks: int) -> None:
    for tied in (False, True):
        save(tiny_model(tied), path / str(tied))
    said = on_ranks(__file__, kind, path, ranks=ranks)
    reports = [json.loads(line.split("REPORT ")[1]) for line in said.splitlines() if "REPORT" in line]
    assert len(reports) == ranks
    for report in reports:
        assert report["gaps"] == pytest.approx([0] * len(report["gaps"]), abs=1e-5)
        assert report["sum_over_ranks"] == ranks
        assert report["undisturbed"]
    assert len({report["tokens"] for report in reports}) == ranks, "ranks with different seeds sample different tokens"


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_the_trainers_process_group(tmp_path: Path) -> None:
    run_ranks(tmp_path, "vllm", 1)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path, "vllm", 2)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_shared_by_two_ranks(tmp_path: Path) -> None:
    """Half of every layer on each; each rank's answers are to its own prompts, with its own seed."""
    run_ranks(tmp_path, "vllm tensor-parallel", 2)


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
        with rlplus.train.rollout.whole_model():
            models[tied] = (tiny_model(tied), tiny_model(tied, seed=1))
    before = global_state()
    gaps, tokens = [], []
    for tied, (old, new) in models.items():
        engine = start(kind.split()[0], path / str(tied), tensor_parallel_size=2 if "parallel" in kind else 1)
        prompts = PROMPTS[rank:]  # ranks have different work
        for model in (old, new):
            engine.push_weights(model.named_parameters(), 1)
            groups = engine.generate(requests(prompts, [2] * len(prompts), 16), Sampling(1.0, rank))
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
