"""Runs of a mixture with `rollout.routing_replay`: the mismatch, resuming, who takes whose choice."""

from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from engine_runs import changed, engine_in_this_process, leave_out, same
from mixtures import write_mixture
from recipe_cases import demonstrations_of_steps, draw_rewards
from torch import Tensor
from trainer_runs import metrics, run_config

from rlplus.common.chosen_experts import fault
from rlplus.tools.verify import verify_run
from rlplus.train.config import Config
from rlplus.train.data import MicroBatch, Sample, pack
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.rollout import RunFailed
from rlplus.train.trainer import open_run, train
from rlplus.train.trainer.loop import train_step


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rewards such that every algorithm has a gradient, and an engine in this process, of the dtype in the fixture."""
    monkeypatch.setattr("rlplus.train.trainer.loop.score", draw_rewards)
    return engine_in_this_process(monkeypatch)


def config(folder: Path, output: str = "run", *, dtype: str = "float32", **sections: Any) -> Config:
    start = folder / "start"
    if not start.exists():
        write_mixture(start)
    model = {"path": str(start), "scratch": None, "dtype": dtype} | sections.pop("model", {})
    rollout = {"routing_replay": True} | sections.pop("rollout", {})
    return run_config(folder, output, model=model, rollout=rollout, **sections)


REPLAYED = {"preset": "exgrpo", "recipe": {"start": 0.0}}
KL = {"preset": "grpo", "objective": {"kl_coef": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "demonstrations": {},
    "replay": {"algorithm": REPLAYED},
    "segments": {"rollout": {"segment": 3}},
    "overlap": {"rollout": {"mode": "process"}, "train": {"overlap": 2}},
    "kl, ZeRO-3": {
        "algorithm": KL, "model": {"gradient_checkpointing": True}, "train": {"zero_stage": 3}
    },
    "shared weights, adapters": {
        "algorithm": KL, "rollout": {"share_weights": True}, "model": {"lora": {"rank": 2, "alpha": 4.0}}
    },
}  # fmt: skip
WAITING = ("replay", "segments", "overlap")


@pytest.mark.parametrize("name", quick.only(["segments"], CASES))
def test_a_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    case = {section: dict(values) for section, values in CASES[name].items()}
    steps = case.pop("train", {}) | {"prompts_per_update": 2, "steps": 4}
    whole = train(config(tmp_path, "whole", train=steps, **case))
    parts = config(tmp_path, "parts", train=steps | {"steps": 2}, **case)
    saved = train(parts) / "checkpoints/step-000002/rank-0.pt"
    text = str(torch.load(saved, weights_only=False)) if saved.exists() else ""
    assert ("dtype=uint8" in text) == (name in WAITING), "want what waits to have its experts"
    train(changed(parts, "train", steps=4), resume="newest")
    assert same(whole, Path(parts.output_dir))
    rows = metrics(whole)
    assert metrics(Path(parts.output_dir)) == rows
    stale = name in ("overlap", "segments")
    gaps = [row[key] for row in rows if (key := "mismatch/probe" if stale else "mismatch/max") in row]
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("dtype", quick.only(["bfloat16"], ["float32", "bfloat16"]))
def test_the_mismatch_is_rounding(tmp_path: Path, engines: dict[str, str], dtype: str) -> None:
    """An engine in bf16: without replay some tokens have other experts, and logprobs off by more than rounding."""
    engines["dtype"] = "bfloat16"
    sections: dict[str, Any] = {"algorithm": {"preset": "grpo"}, "train": {"steps": 2, "lr": 1e-5}}
    rollout = {"max_logprob_gap": 5.0, "group_size": 8, "max_response_length": 32}
    found = {}
    for replay in (True, False):
        run = config(tmp_path, f"{replay}", dtype=dtype, rollout=rollout | {"routing_replay": replay}, **sections)
        found[replay] = metrics(train(run))
    for row, without in zip(found[True], found[False], strict=True):
        assert row["mismatch/max"] < 0.2 < 0.6 < without["mismatch/max"]
        assert row["mismatch/mean"] < without["mismatch/mean"]
        assert row["mismatch/outside_10pct"] < without["mismatch/outside_10pct"]


def test_every_pass_of_the_policy_takes_the_engines_choice(
    tmp_path: Path, engines: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old logprobs, and forward and backward pass of the updates; demonstrated tokens go where their router says."""
    engines["dtype"] = "bfloat16"
    taken: list[tuple[int, Tensor, Tensor | None]] = []  # layer, the experts of a pass, those that came with its batch
    batch_of: list[Tensor | None] = [None]
    forward = PackedModel.forward

    def noted(model: PackedModel, batch: MicroBatch, op: Any) -> Any:
        batch_of[0] = batch.experts
        return forward(model, batch, op)

    monkeypatch.setattr(PackedModel, "forward", noted)
    run_it = config(
        tmp_path,
        rollout={"max_logprob_gap": 5.0},
        model={"gradient_checkpointing": True},
        train={"prompts_per_update": 2},
    )
    with open_run(run_it) as run:
        lm = run.policy.engine.module.lm
        experts = [module for module in lm.modules() if type(module).__name__ == "Qwen3MoeExperts"]
        for layer, module in enumerate(experts):
            module.register_forward_hook(lambda _, args, __, layer=layer: taken.append((layer, args[1], batch_of[0])))
        train_step(run)
        with torch.no_grad():
            lm.model(torch.tensor([[5, 9, 12]]))  # would replay other tokens' experts, if any were left
        del taken[-len(experts) :]
    assert len(taken) > 3 * 6, "old logprobs, and each update's passes twice"
    unknown = other = 0
    for layer, got, given in taken:
        assert given is not None
        want = given.flatten(0, 1)[:, layer].long()
        known = want[:, 0] != 255
        assert torch.equal(got[known], want[known])
        unknown += int((~known).sum())
        assert (got < 6).all()
        other += int(known.sum())
    assert unknown
    assert other > 100


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_the_reference_routes_for_itself(tmp_path: Path, lora: Any) -> None:
    """With its own copy of the weights or without: a reference is a function of the tokens alone."""
    with open_run(config(tmp_path, algorithm=KL, model={"lora": lora})) as run:
        weights = [torch.ones(6)]
        sample = Sample([5, 9, 12], [30, 31, 22, 8, 2, 40], 0, False, False, None)
        (batch,) = pack([sample], weights, row_length=16, tokens_per_micro_batch=16, pad_id=0)
        own, reference = run.policy.logprob(batch), run.policy.logprob(batch, reference=True)
        batch.experts = torch.zeros(1, 9, 3, 2, dtype=torch.uint8)
        batch.experts[..., 1] = 5
        assert not torch.allclose(run.policy.logprob(batch), own, atol=1e-3)
        assert torch.equal(run.policy.logprob(batch, reference=True), reference)
        batch.experts = None
        assert torch.equal(run.policy.logprob(batch), own), "nothing is left of them"


def test_a_replayed_rollout_has_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the step in which it was sampled, as its logprobs are."""
    seen = demonstrations_of_steps(monkeypatch)
    train(config(tmp_path, algorithm=REPLAYED, train={"steps": 6}))
    assert seen
    assert all(fault(sample.experts, len(sample.prompt), len(sample.response)) is None for sample in seen)


def test_an_engine_without_experts_ends_the_run_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "experts")
    with pytest.raises(RunFailed, match=r"want the experts of each layer .*; the transformers engine gave none"):
        train(config(tmp_path))
    assert not metrics(tmp_path / "run")


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.routing_replay: want a mixture of experts .*; got Qwen2ForCausalLM"
    ):
        train(run_config(tmp_path, rollout={"routing_replay": True}))


def test_verify_refuses_it(tmp_path: Path) -> None:
    folder = train(config(tmp_path, train={"steps": 1}))
    with pytest.raises(ValueError, match=r"want a run without rollout\.routing_replay, whose experts"):
        verify_run(folder)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"engine": "auto", "mode": "server", "server_url": "http://localhost:1"}},
            "routing_replay: a server's experts are not read: want mode colocated or process; got server",
        ),
        ({"train": {"compile": True}}, "routing_replay: .* want train.compile false"),
        ({"algorithm": {"preset": "sft"}}, "routing_replay .*no effect, .*: the preset generates nothing"),
    ],
)
def test_settings_that_contradict(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(tmp_path, **sections)
