"""Demonstrations whose author's logprobs are known: loading, the loss, and the script that scores them."""

import json
import runpy
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine_runs import changed, write_start
from trainer_runs import metrics, run_config, write_task
from transformers import AutoModelForCausalLM
from update_cases import batch_of_samples, check_gradients, packed

from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import Config, DataConfig, load_config
from rlplus.train.data import byte_tokenizer, load_examples
from rlplus.train.recipe import set_advantages
from rlplus.train.trainer import open_run, train
from rlplus.train.trainer.loop import train_step

SCRIPT = Path(__file__).parents[2] / "examples/score_demonstrations.py"


def load(path: Path, **fields: Any) -> Any:
    config = DataConfig(path=str(path), demonstration="demonstration", behavior_logprob="logprobs", **fields)
    return load_examples(config, byte_tokenizer(), max_demonstration_length=16)[0]


def write(folder: Path, *rows: dict[str, Any], kind: str = "jsonl") -> Path:
    path = folder / f"data.{kind}"
    whole = [{"prompt": "1+1=", "answer": "2"} | row for row in rows]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in whole))
    else:
        pq.write_table(pa.Table.from_pylist(whole), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_logprob_belongs_to_each_token_and_the_end(tmp_path: Path, kind: str) -> None:
    """After response_prefix; a row without a demonstration, or with a dropped one, needs no logprobs."""
    rows = [
        {"demonstration": "t<2>", "logprobs": [-1.0, -2.0, -0.5, 0.0]},
        {"demonstration": None, "logprobs": None},
        {"demonstration": "t" + "too long" * 3, "logprobs": None},
    ]
    examples = load(write(tmp_path, *rows, kind=kind), response_prefix="t", max_dropped_share=0.5)
    assert [e.behavior_logprob for e in examples] == [array("f", [-1.0, -2.0, -0.5, 0.0]), None, None]
    assert len(examples[0].demonstration) == 4


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([-1.0] * 3, "one per token of the demonstration (the end token is one; response_prefix is none); got 3"),
        ([-1.0] * 5, "want 'logprobs' a list of 4 logprobs"),
        (None, "want 'logprobs' a list of 4 logprobs, one per token of the demonstration; got None"),
        (-1.0, "one per token of the demonstration; got -1.0"),
        ([-1.0, 0.5, 0.0, 0.0], "finite and at most 0; got 0.5 at place 1"),
        ([-1.0, -1.0, float("nan"), 0.0], "finite and at most 0; got nan at place 2"),
        ([-1.0, -1.0, -1.0, float("-inf")], "finite and at most 0; got -inf at place 3"),
        ([-1.0, "x", -1.0, -1.0], "finite and at most 0; got 'x' at place 1"),
        ([-1.0, True, -1.0, -1.0], "finite and at most 0; got True at place 1"),
    ],
)
def test_what_does_not_fit_names_its_line(tmp_path: Path, logprobs: Any, message: str) -> None:
    good = {"demonstration": "<2>", "logprobs": [-1.0] * 4}
    path = write(tmp_path, good, {"demonstration": "<2>", "logprobs": logprobs})
    with pytest.raises(ValueError, match="want ") as error:
        load(path)
    assert str(error.value).startswith(f"{path}:2: want ")
    assert message in str(error.value)


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r":1: want a column 'logprobs'; got prompt, answer, demonstration, logprob; near"
    ):
        load(write(tmp_path, {"demonstration": "<2>", "logprob": [-1.0]}))


def with_column(folder: Path) -> Path:
    """The task, with logprobs that differ from token to token."""
    rows = [json.loads(line) for line in write_task(folder).read_text().splitlines()]
    for row in rows:
        row["logprobs"] = [-0.25 * (i + 1) for i in range(len(row["demonstration"]) + 1)]
    path = folder / "scored.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def known(folder: Path, output: str = "run", **sections: Any) -> Config:
    data = {"path": str(with_column(folder)), "demonstration": "demonstration", "behavior_logprob": "logprobs"}
    config = run_config(folder, output, **sections)
    return changed(config, "data", **data)


@pytest.mark.parametrize("external", ["mis", "omega", "shaped"])
def test_the_true_denominator_reaches_the_gradient(tmp_path: Path, external: str) -> None:
    """RL-PLUS eq. 4 with p_omega, and others', (1 - p)^0.5 and group advantages, in float64 through the plain model."""
    generator = torch.Generator().manual_seed(2)
    samples = batch_of_samples()
    set_advantages(samples, ALGORITHMS["rlplus"])
    for s in samples:
        if s.demonstration:
            s.behavior_logprob = (-2 * torch.rand(len(s.response), generator=generator)).tolist()
    objective = replace(ALGORITHMS["rlplus"].objective, external=external)
    with open_run(known(tmp_path)) as run:
        lm = AutoModelForCausalLM.from_pretrained(str(run.folder.path / "scratch"), dtype=torch.float64)
        tokens = sum(len(s.response) for s in samples)
        for s in samples:
            logits = lm(torch.tensor([[*s.prompt, *s.response]])).logits[0, len(s.prompt) - 1 : -1]
            p = logits.log_softmax(-1).gather(1, torch.tensor(s.response)[:, None]).squeeze(1).exp()
            old = p.detach()
            weight = p / old
            if s.demonstration:
                author = torch.tensor(s.behavior_logprob, dtype=torch.float64).exp()
                ratios = {"mis": 2 * p / (author + old), "omega": p / author, "shaped": p / (p + 0.1 * author)}
                weight = ratios[external] * (1 - old) ** 0.5
            (-(s.advantage * weight).sum() / tokens).backward()
        model = run.policy.engine.module
        for batch in packed(run, samples):
            model(batch, run.policy._loss_op(objective, batch)).loss.backward()
        check_gradients(model, {name: p.grad for name, p in lm.named_parameters()})
        with pytest.raises(AssertionError, match="want the author's logprob of"):
            packed(run, [replace(s, behavior_logprob=None) for s in samples])


def test_the_column_reaches_the_loss_of_a_run(tmp_path: Path) -> None:
    """The mean weight of demonstrated tokens has the true denominator; another column counts as other data."""
    config = known(tmp_path, train={"steps": 1})
    with open_run(config) as run:
        seen = []
        accumulate = run.policy.backward

        def watched(batches: Any, *rest: Any) -> Any:
            outputs = accumulate(batches, *rest)
            seen.extend(zip(batches, outputs, strict=True))
            return outputs

        run.policy.backward = watched  # type: ignore[method-assign]
        train_step(run, None)
        run.save_checkpoint()
    assert sum(int(batch.external.sum()) for batch, _ in seen) > 0
    for batch, out in seen:
        assert (batch.behavior_logprob.isnan() == ~batch.external).all()
        external = batch.external & (batch.token_weight != 0)
        for sequence in batch.sequence[external].unique():
            logprobs = batch.behavior_logprob[batch.sequence == sequence]
            assert logprobs.tolist() == [-0.25 * (i + 1) for i in range(len(logprobs))]
        p, author = out.logprob[external].exp(), batch.behavior_logprob[external].exp()
        want = float((2 * p / (author + p)).sum())
        assert float(out.stats["ratio_external"]) == pytest.approx(want, rel=1e-4)
    path = Path(config.data.paths[0])
    path.write_text(path.read_text().replace("-0.75", "-0.76"))
    with pytest.raises(ValueError, match="was written by a run on other data"):
        train(changed(config, "train", steps=2), resume="newest")


# ---- the script


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


def test_the_script_scores_the_tokens_that_the_run_trains_on(tmp_path: Path, script: Any) -> None:
    """The logprobs of the demonstrator in float64, at a temperature; rows keep their columns; a run takes the file."""
    model = write_start(tmp_path / "demonstrator", tied=True)
    config = run_config(
        tmp_path, model={"scratch": None, "path": str(model)}, train={"steps": 1}, data={"response_prefix": "<"}
    )
    path, output = tmp_path / "run.yaml", tmp_path / "scored.jsonl"
    path.write_text(config.to_yaml())
    rows = [json.loads(line) for line in Path(config.data.paths[0]).read_text().splitlines()]
    rows.append({"prompt": "1=", "answer": "1", "demonstration": None})
    Path(config.data.paths[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(model), "--output", str(output), "--temperature", "0.7", "--tokens", "24"]
    script["main"]([str(path), *options, "train.seed=1"])
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "behavior_logprob"} for row in scored] == rows
    assert scored[-1]["behavior_logprob"] is None
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for row in scored[:-1]:
        prompt, response = [*row["prompt"].encode(), ord("<")], [*row["demonstration"].encode()[1:], 257]
        logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
        want = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(row["behavior_logprob"]), want.float(), rtol=1e-4, atol=1e-5)
    column = ["data.behavior_logprob=behavior_logprob", f"data.path={output}"]
    assert metrics(train(load_config(path, column)))[0]["actor/ratio_external_mean"] > 0


@pytest.mark.parametrize("what", ["token", "end"])
def test_the_script_refuses_another_tokenizer(tmp_path: Path, script: Any, what: str) -> None:
    run = write_start(tmp_path / "run", tied=True)
    other = write_start(tmp_path / "other", tied=True)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    if what == "token":
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        message = "want a demonstrator with the run's tokens; token 49 is '1' there, got '2'"
    else:
        generation = json.loads((other / "generation_config.json").read_text()) | {"eos_token_id": [3, 4]}
        (other / "generation_config.json").write_text(json.dumps(generation))
        message = r"want a demonstrator that ends at the run's token 257; it ends at \[3, 4\]"
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, model={"scratch": None, "path": str(run)}).to_yaml())
    with pytest.raises(ValueError, match=message):
        script["main"]([str(path), "--model", str(other), "--output", str(tmp_path / "out.jsonl")])
