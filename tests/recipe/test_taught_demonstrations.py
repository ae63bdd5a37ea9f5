"""Distillation on demonstrations: from a model, or from its likeliest tokens in a column that the script writes."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine_runs import same
from teachers import K, divergence, gradients, log_probabilities, make_teacher, shown, taught
from tokenizers import AddedToken
from trainer_runs import metrics, run_config, write_task
from transformers import AutoModelForCausalLM
from update_cases import packed

from rlplus.train.config import load_config
from rlplus.train.data import byte_tokenizer, load_examples
from rlplus.train.trainer import open_run, train

SCRIPT = Path(__file__).parents[2] / "examples/score_demonstrations.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


def write_column(script: Any, folder: Path, teacher: Path, k: int = K) -> list[dict[str, Any]]:
    """Ask the teacher, whose head has more rows than there are tokens; -> the rows of the file."""
    plain = folder / "plain.yaml"
    plain.write_text(run_config(folder).to_yaml())
    script["main"]([str(plain), "--model", str(teacher), "--topk", str(k), "--output", str(folder / "taught.jsonl")])
    return [json.loads(line) for line in (folder / "taught.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("source", "loss"), [("column", "reverse_kl"), ("column", "forward_kl"), ("model", "jsd")])
def test_a_step_is_the_one_in_float64(tmp_path: Path, script: Any, source: str, loss: str) -> None:
    """The teacher in float64: its likeliest tokens and all others as one, or the whole vocabulary."""
    teacher = make_teacher(tmp_path)
    write_column(script, tmp_path, teacher)
    recipe = {"teacher_topk": K} if source == "column" else {"teacher": str(teacher)}
    with open_run(taught(tmp_path, loss=loss, recipe=recipe)) as run:
        update = shown(run)
        assert len(update.samples) == 6
        value, got = gradients(run, update, packed(run, update.samples))
        student, frozen = (
            AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64)
            for path in (run.folder.path / "scratch", teacher)
        )
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for s in update.samples:
            logp = log_probabilities(student, s.prompt, s.response, 1.0)
            with torch.no_grad():
                logq = log_probabilities(frozen, s.prompt, s.response, 1.0)
            if source == "column":
                likeliest = logq.topk(K).indices
                logp, logq = (
                    torch.cat([p.gather(1, likeliest), p.scatter(1, likeliest, 0.0).sum(1, keepdim=True)], 1).log()
                    for p in (logp.exp(), logq.exp())
                )
            total, tokens = total + divergence(logp, logq, loss).sum(), tokens + len(s.response)
        (total / tokens).backward()
        assert value == pytest.approx(float(total.detach()) / tokens, rel=1e-4)
        for name, p in student.named_parameters():
            bound = {"rtol": 1e-3, "atol": 2e-6 * float(p.grad.abs().max())}
            torch.testing.assert_close(got[name].double(), p.grad, msg=name, **bound)


def test_a_run_by_the_column_resumes_bit_for_bit_and_with_no_other_teacher(tmp_path: Path, script: Any) -> None:
    write_column(script, tmp_path, make_teacher(tmp_path))
    config = taught(tmp_path, train={"steps": 4, "lr": 1e-2}, checkpoint={"every": 2})
    whole = train(config)
    rows = metrics(whole)
    assert rows[-1]["distill/divergence"] < rows[0]["distill/divergence"]
    again = shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(again / "model")
    train(config.model_copy(update={"output_dir": str(again)}), resume="step-000002")
    assert same(whole, again)
    write_column(script, tmp_path, make_teacher(tmp_path, "other", seed=8))
    with pytest.raises(ValueError, match="was written by a run on other data"):
        train(config.model_copy(update={"output_dir": str(again)}), resume="step-000002")


def test_the_loss_is_that_of_demonstrated_tokens(tmp_path: Path) -> None:
    rows = metrics(train(taught(tmp_path, recipe={"teacher": str(make_teacher(tmp_path))}, train={"steps": 1})))
    assert rows[0]["actor/active_rows"] == 1
    assert rows[0]["actor/loss_internal"] == 0
    assert rows[0]["actor/loss_external"] == pytest.approx(rows[0]["distill/divergence"], rel=1e-5)


def test_in_half_precision_the_script_rounds_no_logits(tmp_path: Path, script: Any) -> None:
    """bf16 hidden states and weights of a head whose logits are up to 60: rounded ones would be off by .1."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(n, 64, generator=generator).bfloat16() * scale for n, scale in ((600, 4.0), (99, 1.0))
    )
    head = {"weight": weight, "bias": None, "logit_scale": 0.5, "logit_softcap": 30.0}
    tokens, logprobs = script["likeliest"](hidden, head, 4, 90)
    exact = (30 * (0.5 * hidden.double() @ weight[:90].double().t() / 30).tanh()).log_softmax(1)
    want = exact.topk(4)
    assert tokens.tolist() == want.indices.tolist()
    torch.testing.assert_close(logprobs.double(), want.values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("what", ["numbers", "rows"])
def test_the_script_refuses_a_teacher_without_the_runs_tokens(tmp_path: Path, script: Any, what: str) -> None:
    """Tokens that no demonstration uses, too."""
    teacher = make_teacher(
        tmp_path, **({"vocab_size": 200, "pad_token_id": None, "eos_token_id": None} if what == "rows" else {})
    )
    if what == "numbers":
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken("<think>", special=True)])
        tokenizer.save_pretrained(str(teacher))
    with pytest.raises(ValueError, match=r"want a teacher with all of the run's 258 tokens|want a demonstrator"):
        write_column(script, tmp_path, teacher)


def test_the_script_leaves_out_rows_of_the_head_that_are_no_token(tmp_path: Path, script: Any) -> None:
    teacher = make_teacher(tmp_path)
    rows = write_column(script, tmp_path, teacher)
    lm = AutoModelForCausalLM.from_pretrained(str(teacher))
    lm.resize_token_embeddings(320)
    with torch.no_grad():
        lm.get_output_embeddings().weight[258:] = 9.0
    lm.save_pretrained(str(tmp_path / "padded"))
    byte_tokenizer().save_pretrained(str(tmp_path / "padded"))
    assert write_column(script, tmp_path, tmp_path / "padded") == rows
    for options in (["2", "--temperature", "0.7"], ["-1"], ["1025"]):
        with pytest.raises(SystemExit):
            script["main"](["x.yaml", "--model", "x", "--output", "y", "--topk", *options])


def test_the_data_have_as_many_as_the_recipe(tmp_path: Path, script: Any) -> None:
    write_column(script, tmp_path, make_teacher(tmp_path))
    config = taught(tmp_path, recipe={"teacher_topk": K + 1})
    with (
        pytest.raises(
            ValueError, match=r"taught.jsonl:1: want 'teacher_topk' with 6 tokens at each of 4 places .*; got 5 at 4"
        ),
        open_run(config),
    ):
        pass


def place(tokens: Any = (1, 2), logprobs: Any = (-1.0, -2.0), places: int = 4) -> dict[str, Any]:
    return {"tokens": [list(tokens)] * places, "logprobs": [list(logprobs)] * places}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "with 2 tokens at each of 4 places; got None"),
        ({"tokens": [[1, 2]] * 4}, "as {tokens, logprobs}, each a list of k numbers for each token; got {'tokens'"),
        (place(places=3), "at each of 4 places (the end token has one; response_prefix has none); got 2 at 3"),
        (place((1, 2, 3), (-1.0, -2.0, -3.0)), "with 2 tokens at each of 4 places (the end token"),
        (place((1, 2), (-1.0,)), "got (4, 2) and (4, 1)"),
        ({"tokens": [], "logprobs": []}, "got (0,) and (0,)"),
        (place((1, 1)), "different tokens; got [(1.0, -1.0), (1.0, -2.0)] at place 0"),
        (place((1, 258)), "of the 258 of the run's tokenizer; got token 258"),
        (place((1, -1)), "different tokens; got"),
        (place((1, 0.5)), "different tokens; got"),
        (place((1, 2**31)), "different tokens; got"),
        (place(logprobs=(-0.1, -0.1)), "finite logprobs of probabilities that add up to at most 1; got"),
        (place(logprobs=(0.5, -9.0)), "finite logprobs"),
        (place(logprobs=(-1.0, -float("inf"))), "finite logprobs"),
        (place(logprobs=(-1.0, float("nan"))), "finite logprobs"),
        ({"tokens": [[1, 2]] * 4, "logprobs": [[-1.0, -2.0]] * 3 + [[-1.0]]}, "got {'tokens'"),
    ],
)
def test_what_does_not_fit_names_its_line(tmp_path: Path, column: Any, message: str) -> None:
    """A demonstration of three bytes and its end."""
    rows = [{"prompt": "1+1=", "answer": "2", "demonstration": "<2>", "taught": each} for each in (place(), column)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = taught(tmp_path, data={"path": str(path), "teacher_topk": "taught"}).data
    with pytest.raises(ValueError, match="want 'taught' ") as error:
        load_examples(config, byte_tokenizer(), max_demonstration_length=8, topk=2)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_of_several_demonstrations_has_its_own(tmp_path: Path, kind: str) -> None:
    """A null, and what belongs to a demonstration that is too long, are not looked at."""
    row = {"prompt": "1=", "answer": "1", "demonstration": ["<1>", "1"], "taught": [place(), place((3, 4), places=2)]}
    rows = [row, row | {"demonstration": None, "taught": None}, row | {"demonstration": ["x" * 9], "taught": [place()]}]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = taught(tmp_path, data={"path": str(path), "teacher_topk": "taught", "max_dropped_share": 0.5}).data
    first, second, *without = load_examples(config, byte_tokenizer(), max_demonstration_length=8)[0]
    assert [each.teacher_topk for each in without] == [None, None]
    for example, numbers in ((first, [[1, 2]] * 4), (second, [[3, 4]] * 2)):
        tokens, logprobs = example.teacher_topk
        assert tokens.tolist() == numbers
        assert logprobs.tolist() == [[-1.0, -2.0]] * len(numbers)
        assert (tokens.dtype, logprobs.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(
    ("algorithm", "more", "message"),
    [
        ({"preset": "grpo", "recipe": {"name": "distill"}}, {}, "is for demonstrations: want preset sft"),
        (
            {"preset": "sft", "recipe": {"name": "distill"}, "objective": {"external_coef": 0.5, "external": "none"}},
            {},
            "a divergence reads nothing of algorithm.objective; got external_coef, external",
        ),
        (
            {"preset": "sft", "recipe": {"name": "distill"}, "external_schedule": {"shape": "gradient-norm"}},
            {},
            "does not support algorithm.external_schedule",
        ),
        ({"preset": "sft", "recipe": {"name": "self-distill"}}, {}, "want recipe distill and a divergence with preset"),
        ({"preset": "dft", "recipe": {"name": "distill"}}, {}, "want sft, or a preset without demonstrations; got dft"),
        ({"preset": "sft", "recipe": {"name": "distill", "loss": "sampled"}}, {}, "got distill and loss sampled"),
        ({"preset": "sft", "recipe": {"name": "distill", "teacher": "x"}}, {}, "got teacher and data.teacher_topk"),
        ({"preset": "sft"}, {}, "data.teacher_topk would have no effect, leave it out: the recipe distill reads"),
        (
            {"preset": "sft", "recipe": {"name": "distill"}},
            {"rollout": {"temperature": 0.7}},
            "want rollout.temperature 1 with data.teacher_topk; got 0.7",
        ),
    ],
)  # fmt: skip
def test_settings_without_use_are_refused(
    tmp_path: Path, algorithm: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    data = {"path": str(write_task(tmp_path)), "demonstration": "demonstration", "teacher_topk": "taught"}
    with pytest.raises(ValueError, match=message):
        run_config(tmp_path, algorithm=algorithm, data=data, **more)


def test_the_command_of_the_docs(tmp_path: Path, script: Any) -> None:
    """Its file, and the key that names the column."""
    write_column(script, tmp_path, make_teacher(tmp_path))
    path = tmp_path / "sft.yaml"
    recipe = {"name": "distill", "teacher_topk": K}
    path.write_text(
        run_config(tmp_path, data={"teacher_topk": "x"}, algorithm={"preset": "sft", "recipe": recipe}).to_yaml()
    )
    config = load_config(path, [f"data.path={tmp_path / 'taught.jsonl'}", "data.teacher_topk=teacher_topk"])
    assert metrics(train(config))[0]["actor/grad_norm"] > 0
