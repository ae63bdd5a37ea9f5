"""`rlplus plan --data`: what a run would read, as the model will see it, and what it would refuse."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from trainer_runs import metrics, run_config, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplus.tools.cli import main
from rlplus.tools.plan.data_report import Lengths, plan_data
from rlplus.tools.plan.likelihood import MOST_SCORED
from rlplus.train.config import Config
from rlplus.train.trainer import open_run, train


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plan(config: Config, folder: Path, *options: str) -> int:
    path = folder / "run.yaml"
    path.write_text(config.to_yaml())
    return main(["plan", str(path), "--gpus", "1", "--gpu", "a100-80g", "--data", *options])


def test_the_plan_is_what_the_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, counts and prompts; the steps of its epochs are known then."""
    config = run_config(tmp_path, train={"steps": None, "epochs": 2})
    found = plan_data(config)
    with open_run(config) as run:
        said = capsys.readouterr().err
        assert run.sampler.n == found.prompts == 6
        for row, rendered in enumerate(found.rendered):
            example = run.examples[row]
            assert (rendered.row, rendered.answer, rendered.verdict) == (row, example.answer, 1.0)
            assert run.tokenizer.decode(example.prompt) == rendered.prompt
            assert run.tokenizer.decode(example.demonstration) == rendered.demonstration
    assert len(found.rendered) == 3
    assert [summary.removeprefix("data: ") for summary in found.summaries] == [
        "6 rows, 6 kept, 6 demonstrations",
        "demonstrations: 6 of 6 pass the run's own reward",
    ]
    for summary in found.summaries:
        assert summary.removeprefix("data: ") in said
    assert found.lengths["prompts"] == Lengths(6, 4, 4, 4, 4, 8)  # bytes
    assert plan(config, tmp_path) == 0
    out = capsys.readouterr().out
    assert "Row 1, prompt of 4 tokens, answer '0':\n  0+0=\n" in out
    assert "Its demonstration of 4 tokens, reward 1:\n  <0><|endoftext|>\n" in out
    assert "A run would draw from 6 prompts.\n" in out
    assert out.index("A run would draw from") < out.index("memory of a GPU") < out.index("3 steps, hours")
    assert plan(config, tmp_path, "--json") == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["lengths"]["demonstrations"] == dict(zip(Lengths.__annotations__, (6, 4, 4, 4, 4, 8), strict=True))
    assert data["rendered"][2]["demonstration"] == "<4><|endoftext|>"
    assert data["refusals"] == []


def test_prompts_are_rendered_with_template_system_prompt_and_prefix(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "hi", "answer": "7", "demonstration": "<t>so <7>"}])
    data = {"path": path, "chat": True, "system_prompt": "Be brief.", "response_prefix": "<t>", "max_prompt_length": 60}
    rollout = {"max_response_length": 12}
    train = {"prompts_per_step": 1, "tokens_per_micro_batch": 128}
    model = {"max_position_embeddings": 128, "hidden_size": 32, "heads": 1, "layers": 1, "intermediate_size": 64}
    config = run_config(tmp_path, data=data, rollout=rollout, train=train, model={"scratch": model})
    (rendered,) = plan_data(config).rendered
    assert rendered.prompt == "<|system|>\nBe brief.\n<|user|>\nhi\n<|assistant|>\n<t>"
    assert rendered.demonstration == "so <7><|endoftext|>"
    assert rendered.verdict == 1.0
    assert rendered.prompt_tokens == len(rendered.prompt)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_likelihood_of_demonstrations_is_the_models_and_the_first_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    """By full logits, and by a run on all demonstrations with one update."""
    train(run_config(tmp_path, "made", train={"steps": 1, "lr": 1e-2}))
    model = {"path": str(tmp_path / "made" / "model"), "scratch": None}
    config = run_config(
        tmp_path,
        model=model,
        rollout={"temperature": temperature},
        train={"steps": 1, "prompts_per_step": 6, "prompts_per_update": 6},
    )
    lm = AutoModelForCausalLM.from_pretrained(model["path"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model["path"])
    wanted = []
    for row in map(json.loads, Path(config.data.path).read_text().splitlines()):
        before = tokenizer.encode(row["prompt"])
        after = [*tokenizer.encode(row["demonstration"]), tokenizer.eos_token_id]
        logits = lm(torch.tensor([[*before, *after]])).logits[0].detach().double() / temperature
        places = range(len(before) - 1, len(before) + len(after) - 1)
        wanted += [float(logits[at].log_softmax(-1)[token]) for at, token in zip(places, after, strict=True)]
    found = plan_data(config, logprob=True).likelihood
    assert found is not None
    assert (found.demonstrations, found.of, found.tokens) == (6, 6, len(wanted))
    assert found.logprob == pytest.approx(fmean(wanted), rel=1e-5)
    assert found.p == pytest.approx(fmean(map(math.exp, wanted)), rel=1e-5)
    (row,) = metrics(train(config))
    assert row["actor/logprob_external"] == pytest.approx(found.logprob, rel=1e-4)
    assert row["actor/prob_external"] == pytest.approx(found.p, rel=1e-4)
    capsys.readouterr()
    plan(config, tmp_path, "--logprob")
    out = " ".join(capsys.readouterr().out.split())
    assert f"mean logprob {found.logprob:.2f} nats a token, mean probability {found.p:.2f} (6 of 6 demonstr" in out
    assert "nowhere clearly above GRPO" in out
    assert plan_data(config).likelihood is None, "without being asked no weights are loaded"


def test_the_likelihood_is_of_demonstrations_from_all_over_the_data(tmp_path: Path) -> None:
    train(run_config(tmp_path, "made", train={"steps": 1}))
    (many := tmp_path / "many").mkdir()
    config = run_config(
        tmp_path,
        model={"path": str(tmp_path / "made" / "model"), "scratch": None},
        data={"path": str(write_task(many, 5 * MOST_SCORED))},
    )
    found = plan_data(config, logprob=True).likelihood
    assert found is not None
    assert (found.demonstrations, found.of) == (MOST_SCORED, 5 * MOST_SCORED)
    bare = write_rows(tmp_path, [{"prompt": f"{i}=", "answer": str(i)} for i in range(6)])
    plain = run_config(
        tmp_path,
        model=config.model.model_dump(),
        data={"path": bare, "demonstration": None},
        algorithm={"preset": "grpo"},
    )
    assert plan_data(plain, logprob=True).likelihood is None


def test_a_likelihood_wants_weights_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(tmp_path)
    assert plan(config, tmp_path, "--logprob") == 2
    assert "want model.path with --logprob; got model.scratch" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "run.yaml"), "--logprob"]) == 2
    assert "--logprob measures what --data reads" in capsys.readouterr().err


def rows_of_lengths(demonstrations: list[int]) -> list[dict[str, Any]]:
    """Demonstrations of so many tokens, the end token counted; the prompt of row i has i + 2 tokens."""
    return [
        {"prompt": "p" * (i + 2), "answer": "7", "demonstration": f"<7>{'x' * (length - 4)}"}
        for i, length in enumerate(demonstrations)
    ]


def test_lengths_are_those_of_all_also_of_the_dropped(tmp_path: Path) -> None:
    """Prompts of 2 to 21 tokens; the smallest length that at least half, and 95 %, do not exceed."""
    path = write_rows(tmp_path, rows_of_lengths([4, 5, 6, 7, 8, 9] * 3 + [4, 40]))
    config = run_config(tmp_path, data={"path": path, "max_prompt_length": 20, "max_dropped_share": 0.5})
    found = plan_data(config)
    assert found.lengths["prompts"] == Lengths(20, 2, 11, 20, 21, 20)
    # The row with the longest prompt is dropped, and with it the demonstration of 40.
    assert found.lengths["demonstrations"] == Lengths(19, 4, 6, 9, 9, 8)
    assert found.summaries[0] == (
        f"data: 20 rows, 19 kept, 16 demonstrations; 1 prompts longer than 20 tokens (first: {path}:20); "
        f"3 demonstrations longer than 8 tokens (first: {path}:6)"
    )
    assert found.refusals == ()


def test_what_a_run_would_refuse_is_shown_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A demonstration that the reward refuses is among those shown; the run itself says the same."""
    rows = [{"prompt": f"{i}=", "answer": str(i), "demonstration": f"<{i if i < 4 else 9}>"} for i in range(6)]
    config = run_config(tmp_path, data={"path": write_rows(tmp_path, rows)}, train={"prompts_per_step": 8})
    assert plan(config, tmp_path) == 1
    out = capsys.readouterr().out
    assert "Row 5, prompt of 2 tokens, answer '4':\n  4=\n" in out
    assert "Its demonstration of 4 tokens, dropped by the run's own reward: wrong:\n  <9><|endoftext|>\n" in out
    dropped = (
        "demonstrations: 4 of 6 pass the run's own reward; dropped: 2 wrong; "
        "want at most data.max_dropped_share=0.1 dropped"
    )
    few = "want a batch (prompts_per_step) between 1 and the number of prompts, 6; got 8"
    assert f"A run would refuse these data:\n  {dropped}\n  {few}\n" in out
    assert "It fits." not in out
    assert out.rstrip().endswith("It would fit, but a run would refuse its data: see above.")
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        train(config)
    assert str(refused.value) == f"{dropped}; {few}"


def test_rows_that_would_be_dropped_are_refused_as_in_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, data={"max_prompt_length": 3, "path": str(write_task(tmp_path))})
    found = plan_data(config)
    with pytest.raises(ValueError, match=r"100.0% of the rows would be dropped") as refused:
        train(config)
    assert found.refusals[0] == str(refused.value)
    assert (found.prompts, found.rendered) == (0, ())


def test_evaluation_data_count_where_the_run_reads_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "p" * 9, "answer": "7"}])
    evaluation = {"data": {"path": path, "max_prompt_length": 8}, "samples": 1}
    assert plan_data(run_config(tmp_path, evaluation=evaluation)).refusals == ()
    found = plan_data(run_config(tmp_path, evaluation=evaluation | {"every": 1}))
    assert found.lengths["evaluation prompts"] == Lengths(1, 9, 9, 9, 9, 8)
    assert "100.0% of the rows would be dropped" in found.refusals[0]


def test_benchmarks_count_as_the_run_reads_them(tmp_path: Path) -> None:
    """In their layout on the hub; not one row may be dropped, and none may choose the best checkpoint."""
    path = write_rows(tmp_path, [{"problem": "1+1?", "answer": ["2"]}, {"problem": "1+2=?", "answer": ["3"]}])
    amc = {"every": 1, "samples": 1, "benchmarks": ["amc"], "data": {"path": path, "max_prompt_length": 5}}
    found = plan_data(run_config(tmp_path, evaluation=amc))
    assert found.summaries[1] == "evaluation.data: 2 rows, 2 kept, 0 demonstrations"
    assert found.lengths["evaluation prompts"] == Lengths(2, 4, 4, 5, 5, 5)
    assert found.refusals == ()
    shorter = amc | {"data": {"path": path, "max_prompt_length": 4, "max_dropped_share": 0.9}}
    (refused,) = plan_data(run_config(tmp_path, evaluation=shorter)).refusals
    assert "50.0% of the rows would be dropped" in refused
    (refused,) = plan_data(run_config(tmp_path, validation=amc)).refusals
    assert "got amc, by which" in refused


def test_a_run_without_demonstrations_grades_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}=", "answer": str(i), "demonstration": "wrong"} for i in range(4)]
    config = run_config(tmp_path, data={"path": write_rows(tmp_path, rows)}, algorithm={"preset": "grpo"})
    assert plan(config, tmp_path) == 0
    assert "which this preset does not use:\n  wrong<|endoftext|>" in capsys.readouterr().out


def test_texts_are_escaped_and_long_ones_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[2Ja" + "b" * 5000
    rows = [{"prompt": text, "answer": "7", "demonstration": "[red]<7>"}]
    data = {"path": write_rows(tmp_path, rows), "max_prompt_length": 6000}
    scratch = {"hidden_size": 32, "layers": 1, "heads": 1, "max_position_embeddings": 8192}
    config = run_config(
        tmp_path, data=data, model={"scratch": scratch}, rollout={"max_response_length": 16},
        train={"prompts_per_step": 1, "tokens_per_micro_batch": 8192},
    )  # fmt: skip
    assert plan(config, tmp_path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "  \\x1b[2Jab" in out
    assert "[2,005 characters are left out here; --json has them]" in out
    assert "  [red]<7><|endoftext|>" in out
    assert plan(config, tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"]["rendered"][0]["prompt"] == text


def test_stages_are_planned_with_their_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_config(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml() + "stages:\n- train: {steps: 1}\n- data: {max_prompt_length: 3}\n")
    assert main(["plan", str(path), "--gpus", "1", "--gpu", "a100-80g", "--data", "--json"]) == 1
    first, second = (stage["data"] for stage in json.loads(capsys.readouterr().out)["stages"])
    assert (first["refusals"], len(second["refusals"])) == ([], 2)
    path.write_text(config.to_yaml() + "stages:\n- train: {steps: 1}\n- data: {path: nowhere.jsonl}\n")
    assert main(["plan", str(path), "--gpus", "1", "--data"]) == 2
    assert "stage 2: want a data file; got data.path nowhere.jsonl" in capsys.readouterr().err


def test_a_plan_needs_no_package_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does: tests/trainer/test_trackers.py."""
    monkeypatch.setattr("rlplus.train.config.path_checks.find_spec", lambda name: None)
    assert plan(run_config(tmp_path, log={"wandb": "project"}), tmp_path) == 0
