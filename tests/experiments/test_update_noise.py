"""The distances of `experiments.real.update_noise` against plain float64, and the files that hold measured noise."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from experiments.real import sft_noise, update_noise
from experiments.real.update_noise import batch_of, distance, drawn, ended, gradient, measured, run
from rlplus.train.data import Example

TOKENS = 400


def small_model(**options: Any) -> LlamaForCausalLM:
    """A model whose weights are bf16's."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, num_attention_heads=4, **sizes, **options))
    model.get_output_embeddings().weight.data *= 12  # a policy with likely and unlikely tokens
    return model.bfloat16().float()


BATCH = batch_of([[1, 2, 3], [4, 5]], [[6, 7, 8, 9], [10, 11, 12]], [1.0, -1.0])
OTHER = batch_of([[3, 2, 3], [9, 5]], [[16, 7, 18, 9], [10, 11, 1]], [1.0, -1.0])


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_that_of_the_mean_of_advantage_times_logprob_by_all_weights(tied: bool) -> None:
    model = small_model(tie_word_embeddings=tied)
    found, out = gradient(run(model, BATCH))
    wide = small_model(tie_word_embeddings=tied).double()
    sums = torch.zeros((), dtype=torch.float64)
    for prompt, response, sign in (([1, 2, 3], [6, 7, 8, 9], 1), ([4, 5], [10, 11, 12], -1)):
        logprob = wide(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
        sums = sums - sign * sum((logprob[i, token] for i, token in zip(places, response, strict=True)), sums * 0) / 7
    sums.backward()
    wanted = [p.grad for p in wide.parameters() if p.grad is not None]
    assert len(out.logprob) == 7
    assert distance([each.double() for each in found], wanted) < 1e-5
    assert distance([2 * each for each in wanted], wanted) == pytest.approx(1)


def test_sampled_gradients_are_off_by_their_noise_and_the_mean_of_many_by_less() -> None:
    graph = run(small_model(), BATCH)
    exact, _ = gradient(graph)
    coarse, fine = (drawn(graph, exact, threshold, 16) for threshold in (2.0**-4, 2.0**-6))
    assert fine["update"] < 0.8 * coarse["update"]
    assert fine["elements"] > coarse["elements"]
    assert coarse["update"] == pytest.approx(sum(coarse["distances"]) / 16)
    assert len(set(coarse["distances"])) == 16
    assert 0.1 < coarse["of_mean"] / coarse["update"] < 0.5  # 1/4 in the mean
    assert 0.3 < coarse["logits"] / coarse["update"] < 3
    assert drawn(graph, exact, 1e-9, 1)["update"] < 1e-5


def test_rounding_and_other_sequences_are_distances_of_the_same_gradient() -> None:
    model = small_model()
    found = measured(model, BATCH, OTHER, 1)
    exact, out = gradient(run(model, BATCH))  # the weights are what they were
    rounded, _ = gradient(run(small_model().bfloat16(), BATCH))
    assert found["bf16"] == pytest.approx(distance(rounded, exact))
    assert 1e-3 < found["bf16"] < 0.1
    assert found["other_sequences"] == pytest.approx(distance(gradient(run(model, OTHER))[0], exact))
    assert found["entropy"] == pytest.approx(float(out.entropy.mean()))
    assert list(found["sampled"]) == ["2^-8", "2^-10", "2^-12"]


def test_a_response_ends_behind_its_first_end_token() -> None:
    assert ended([5, 2, 7, 2, 0], 2) == [5, 2]
    assert ended([5, 3, 7, 2], [2, 7]) == [5, 3, 7]
    assert ended([5, 3], 2) == [5, 3]


def test_finished_runs_are_kept_and_their_curves_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for `rlplus train`, which writes what a run writes."""
    calls: list[dict[str, str]] = []

    def finish(command: list[str]) -> Any:
        given = dict(each.split("=", 1) for each in command[6:])
        calls.append(given)
        folder, noise = Path(given["output_dir"]), {}
        if given["train.backward"] == '"sampled"':
            noise = {"actor/backward_noise": 0.002}
        (folder / "model").mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
        rows = [{"step": step, "generated_tokens": 0, "actor/loss": 2.0 / step, **noise} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        start = {"versions": {"torch": "2"}, "commits": {"rlplus": "abc"}}
        (folder / "run.json").write_text(json.dumps({"starts": [start]}))
        return type("Ended", (), {"returncode": 0})

    monkeypatch.setattr(subprocess, "run", finish)
    monkeypatch.setattr(sys, "argv", ["sft_noise", "some/model", "data", str(tmp_path), "train.steps=2"])
    for _ in range(2):
        sft_noise.main()
    assert [(one["train.seed"], one["train.backward"]) for one in calls] == [
        (seed, backward) for seed in "01" for backward in ('"exact"', '"sampled"')
    ]
    assert {one["train.steps"] for one in calls} == {"2"}
    found = json.loads((tmp_path / "sampled-sft.json").read_text())
    assert [run["loss"] for run in found["runs"]] == [[2.0, 1.0]] * 4
    assert [run.get("noise") for run in found["runs"]] == [None, [0.002] * 2] * 2
    assert found["model"] == "model"
    assert found["settings"]["train.steps"] == 2


def test_the_command_writes_both_kinds_of_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(eos_token_id=2)
    shown = [Example(i, (5 + i, 6, 7), "", (8, 9 + i, 2)) for i in range(4)]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, dtype: model)
    monkeypatch.setattr(update_noise, "read", lambda path, data, number: shown[:number])
    options = ["--sequences", "2", "--seeds", "2", "--length", "5"]
    monkeypatch.setattr(sys, "argv", ["update_noise", "some/model", "rows", str(tmp_path / "out.json"), *options])
    update_noise.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["demonstrations"]["tokens"] == 6
    assert 2 <= found["responses"]["tokens"] <= 10
    for kind in ("demonstrations", "responses"):
        assert len(found[kind]["sampled"]["2^-8"]["distances"]) == 2
