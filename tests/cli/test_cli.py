"""The command line as a user meets it: train, evaluate, report; and one message, not a traceback, for what is wrong."""

import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from answers import answered_without_torch
from report_pages import Page
from trainer_runs import environment, metrics, run_config, write_task

from rlplus.tools.cli import main
from rlplus.train.config import ScratchModel
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import make_scratch_model, write_model


@pytest.fixture
def config_file(tmp_path):
    """The YAML file of a tiny run with evaluation data."""
    evaluation = {
        "data": {"path": str(write_task(tmp_path)), "max_prompt_length": 8},
        "every": 2,
        "samples": 4,
        "k": [1, 4],
    }
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, evaluation=evaluation).to_yaml())
    return path


STEP = r"rlplus +\d+% step [123] of 3  reward .*  length .*  entropy .*  .* tok/s  .* left"
LINES = (
    r"memory planned for 1 x cpu: .* of .*",
    r"responses end in <\|endoftext\|> \(257\)",
    r"6 rows, 6 kept, 6 demonstrations",
    r"demonstrations: 6 of 6 pass the run's own reward",
    r"head by backend '(cpp|torch)': .*",
    r"rollouts by transformers; output in {run}",
    r"3 steps done; model in {run}/model",
    r"responses end in <\|endoftext\|> \(257\)",
    r"problems evaluated: 0 of 6",
    r"problems evaluated: 6 of 6",
)


def test_train_evaluate_report(config_file, tmp_path, capsys):
    before = os.umask(0o027)
    try:
        assert main(["train", str(config_file), "train.steps=3"]) == 0
    finally:
        os.umask(before)
    run = tmp_path / "run"
    for folder in ("model", "scratch"):
        assert {path.stat().st_mode & 0o777 for path in (run / folder).iterdir()} == {0o640}, (
            "want it as the umask says"
        )
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"val/task/pass@1", "val/task/pass@4"} <= rows[1].keys()
    assert "val/task/pass@1" not in rows[0].keys() | rows[2].keys()
    assert main(["eval", str(config_file)]) == 0
    out, err = capsys.readouterr()
    said = (
        err.splitlines()
    )  # no other line and no bar; at most a line a second of steps, and of phases where they are slow
    steps = [line for line in said if line.startswith("rlplus ") and "  reward " in line]
    assert all(re.fullmatch(STEP, line) for line in steps), steps
    assert steps[-1].startswith("rlplus 100% step 3 of 3  ")
    for line, pattern in zip([line for line in said if not line.startswith("rlplus ")], LINES, strict=True):
        assert re.fullmatch(pattern.format(run=re.escape(str(run))), line), line
    result = json.loads((run / "evaluation-task.json").read_text())
    assert len(result["problems"]) == 6
    assert result["n"] == [4] * 6
    assert "pass@4" in out
    assert f"written to {run}/evaluation-task.json\n" in out
    base = tmp_path / "base"
    evaluate = ["eval", str(config_file), "--model", str(run / "scratch"), "--output"]
    assert main([*evaluate, str(tmp_path / "base.json")]) == 2
    assert "want --output a folder, which gets a file for each benchmark; got" in capsys.readouterr().err
    assert main([*evaluate, str(base)]) == 0
    assert json.loads((base / "evaluation-task.json").read_text())["model"].startswith(f"{run}/scratch@")
    report = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(report)]) == 0
    assert f"written to {report}\n" in capsys.readouterr().out
    page = report.read_text()
    assert "pass@4" in page
    assert "<svg" in page
    # The evaluation alone, and beside the run.
    for folders in ([base], [run, base]):
        assert main(["report", *map(str, folders), "-o", str(report)]) == 0
        shown = Page(report)
        assert shown.titles[0] == "task"
        assert "base, evaluation on task" in shown.text
        assert "pass@1, % pass@4, % problems × samples" in shown.text
        assert ("Entropy" in shown.titles) is (run in folders)


def test_benchmarks_are_reported_apart(config_file, tmp_path, capsys):
    names = ("bench/0", "bench/1[/red]\x1b[2J")
    rows = [json.loads(line) | {"data_source": names[i % 2]} for i, line in enumerate((tmp_path / "task.jsonl").open())]
    rows.append(rows[1])  # one problem with twice the samples
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", str(config_file), "evaluation.data.benchmark=data_source"]) == 0
    assert {f"val/{name}/pass@1" for name in names} <= metrics(tmp_path / "run")[1].keys()
    assert main(["eval", str(config_file), "evaluation.data.benchmark=data_source"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"bench/1\[/red\]\\x1b\[2J *│ *3 *│ *4–8 *│", out)
    assert "\x1b" not in out + err
    result = json.loads((tmp_path / "run/evaluation-bench-1-red-2J-41472683.json").read_text())
    assert (result["problems"], result["n"]) == ([1, 3, 5], [8, 4, 4])
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    assert "bench/0, pass@1" in (tmp_path / "report.html").read_text()


def test_a_result_that_cannot_be_written_is_shown_all_the_same(config_file, tmp_path, capsys):
    assert main(["train", str(config_file), "train.steps=1"]) == 0
    (result := tmp_path / "run/evaluation-task.json").symlink_to("/dev/full")
    assert main(["eval", str(config_file)]) == 2
    out, err = capsys.readouterr()
    assert f"could not write {result}: No space left on device" in err
    assert "pass@4" in out


def test_what_needs_no_model_is_answered_without_torch(config_file, tmp_path):
    """Help, mistyped keys and missing files are reported before anything slow is imported."""
    train, run = ["train", str(config_file)], tmp_path / "run"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "trained/model").mkdir(parents=True)
    (tmp_path / "trained/model/config.json").touch()
    path = ["model.scratch=null", "model.path"]
    cases = [
        (["--help"], 0, "usage: rlplus"),
        (["--version"], 0, "rlplus 0."),
        ([*train, "train.lrr=1"], 2, "train.lrr: unknown key; nearest: train.lr"),
        (["train", "nowhere.yaml"], 2, "nowhere.yaml: no such file"),
        ([*train, "data.path=nowhere.jsonl"], 2, "want a data file; got data.path nowhere.jsonl: no such file"),
        ([*train, f"data.path={tmp_path}"], 2, f"got data.path {tmp_path}: it is a folder"),
        ([*train, "data.path=[task.csv]"], 2, "got data.path task.csv"),
        ([*train, "data.path=[]"], 2, "want data.path, the prompts to train on"),
        ([*train, "evaluation.data.path=nowhere.jsonl"], 2, "got evaluation.data.path nowhere.jsonl: no such file"),
        ([*train, path[0], f"{path[1]}=./nowhere"], 2, "hub name; got './nowhere': no such folder"),
        ([*train, path[0], f"{path[1]}={tmp_path}/empty"], 2, "the folder has no config.json"),
        ([*train, path[0], f"{path[1]}={tmp_path}/file"], 2, "it is a file"),
        ([*train, "model.chat_template=no.jinja"], 2, "a Jinja template or its file; got 'no.jinja': no such file"),
        ([*train, f"output_dir={tmp_path}/file/run"], 2, f"{tmp_path}/file is a file"),
        ([*train, "output_dir=/proc/run"], 2, "want output_dir a folder to write to; got /proc/run: /proc cannot be"),
        (["train", str(tmp_path / "task.jsonl")], 2, "task.jsonl, a file of data: name it in one, as data.path"),
        (["eval", str(tmp_path / "task.jsonl")], 2, "task.jsonl': it is a file of data, for --data"),
        ([*train, "--train.steps=3"], 2, "--train.steps=3; keys of the configuration have no dashes: train.steps=3"),
        (["verify", "nowhere", "--step", "0"], 2, "argument --step: want an integer of at least 1; got 0"),
        (["compare", str(config_file), "--first-seed", "-1"], 2, "--first-seed: want an integer of at least 0; got -1"),
        (["compare", str(config_file), "--presets", "grpo,grpo"], 2, "want each name once with --presets; got 'grpo'"),
        (["plan", str(config_file), path[0], f"{path[1]}=a/b/c"], 2, "hub name; got 'a/b/c': no such folder"),
        (["eval", str(config_file)], 2, f"want a trained model in {run}/model"),
        (["eval", str(config_file), "--model", f"{tmp_path}/no"], 2, "want --model a Hugging Face folder or hub name"),
        (["eval", str(config_file), "--output", f"{tmp_path}/file"], 2, "want --output a folder"),
        (["eval", str(config_file), "--output", "x.json"], 2, "want --output a folder, which gets a file for each"),
        (["eval", str(config_file), "--model", "no/one"], 2, "http://127.0.0.1:9 cannot be reached (["),
        (["eval", str(config_file), "--model", "no/one"], 2, "HF_HUB_OFFLINE is set, and the cache"),
        ([*train, "evaluation.data.path=[]", "evaluation.benchmarks=[amc]"], 2, "evaluation.benchmarks hf://lkev"),
        (["eval"], 2, "the following arguments are required: model-or-configuration"),
        (["eval", "no/one", "--benchmarks", "amc,gpqa-diamond"], 2, "evaluation.benchmarks: want names from aime24, "),
        (["eval", "no/one", "--data", "nowhere.jsonl"], 2, "want a data file; got --data nowhere.jsonl: no such file"),
        (["eval", f"{tmp_path}/trained"], 2, "want as the first argument a Hugging Face folder or hub name; got"),
        (["eval", f"{tmp_path}/trained"], 2, f"the folder has no config.json; {tmp_path}/trained/model has one"),
        (["eval", "no/one", "data.prompt=question"], 2, "trains nothing; want evaluation.data.prompt"),
        (["eval", "no/one", "validation.samples=3"], 2, "validation.samples: an evaluation does not read the section"),
        (["eval", str(config_file), "data.limit=3"], 2, f"want a trained model in {run}/model"),
        (["eval", str(config_file), "output_dir=x"], 2, "in x/model, or --model with a folder; got none (current dir"),
        (["eval", "no/one", "evaluation.temperature=0"], 2, "eval: want other settings:\nevaluation: temperature 0 is"),
        (["train", "no\x1b[2Jwhere.yaml"], 2, "want a YAML file; got no\\x1b[2Jwhere.yaml: no such file"),
    ]
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "hub")}
    answered_without_torch(cases, hub)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.lr=fast"], r"train.lr: want a valid number; got 'fast' (str)"),
        (["data.max_prompt_length=2"], r"100.0% of the rows would be dropped"),
        (["data.max_demonstration_length=2"], r"demonstrations longer than 2 tokens"),
        (["algorithm.preset=rlpuls"], r"nearest: rlplus"),
        (
            ["model.scratch=null", "model.path=nowhere"],
            r"want model.path a Hugging Face folder or hub name; got 'nowhere'",
        ),
        (["train.backend=trito"], r"'cpp' or 'triton'; got 'trito' (str); nearest: triton"),
    ],
)
def test_what_is_wrong_is_one_message(config_file, capsys, arguments, message):
    assert main(["train", str(config_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path={run}/no-tokenizer"], "with a tokenizer as model.path"),
        (["model.path={run}/truncated"], "could not read the weights of {run}/truncated: "),
        (["model.path={run}/foreign"], "could not read the weights of {run}/foreign: "),
        (["model.path={run}/list"], "got '{run}/list': "),
        (["data.path={run}/surrogate.jsonl"], "{run}/surrogate.jsonl:2: want text that UTF-8 can hold; got the lone"),
        (["data.path={run}/latin1.jsonl"], "{run}/latin1.jsonl:1: want UTF-8 text; got"),
        (["data.path={run}/deep.jsonl"], "{run}/deep.jsonl:1: invalid JSON: nested too deeply"),
        (["data.path={run}/latin1.parquet"], "{run}/latin1.parquet"),
        (["train.lr=1e38"], "train: want an lr whose first step, lr / (1 - betas[0]), is a float32; got lr 1e+38"),
        (["train.betas=[1, 0.9]"], "train: want betas below 1; got [1.0, 0.9]"),
        (["model.scratch.hidden_size=1000000"], "the run would not fit (generate: needs "),
        (["model.scratch.hidden_size=1000000000"], "model.scratch.hidden_size: want less than or equal to 1048576"),
        (["rollout.group_size=1000000000"], "rollout.group_size at most 1048576; got 4 times 1000000000"),
        (["model.scratch.layers=1000000000"], "model.scratch.layers: want less than or equal to 1000"),
        (["rollout.kv_cache_memory_mb=100000000000"], "would not fit"),
        (["output_dir={run}/metrics"], "{run}/metrics/metrics.jsonl, line 1: want UTF-8 text; got"),
        (["output_dir={run}/latest"], "{run}/latest"),
    ],
)
def test_files_that_cannot_be_used_are_one_message(config_file, unusable, capsys, arguments, message):
    """Exit status 2 and one line that names the file and, where it has any, the place in it."""
    path = ["model.scratch=null"] if "model.path" in arguments[0] else []
    resume = ["--resume=auto"] if "output_dir" in arguments[0] else []
    overrides = [text.format(run=unusable) for text in arguments]
    assert main(["train", str(config_file), *resume, *path, *overrides]) == 2
    error = capsys.readouterr().err
    assert message.format(run=unusable) in error
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("rlplus train: ")]
    assert error.endswith(line + "\n") or "does not describe a run" in line


@pytest.fixture(scope="module")
def unusable(tmp_path_factory):
    """Models, data and runs that something is wrong with."""
    folder = tmp_path_factory.mktemp("unusable")
    tokenizer = byte_tokenizer()
    write_model(make_scratch_model(ScratchModel(hidden_size=32, layers=1), tokenizer, seed=0), str(folder / "foreign"))
    shutil.copytree(folder / "foreign", folder / "no-tokenizer")
    tokenizer.save_pretrained(folder / "foreign")
    shutil.copytree(folder / "foreign", folder / "truncated")
    shutil.copytree(folder / "foreign", folder / "list")
    os.truncate(folder / "truncated/model.safetensors", 5000)
    (folder / "foreign/model.safetensors").write_text("some text " * 100)
    (folder / "list/config.json").write_text("[1]")
    row = '{"prompt": "1+1=", "answer": "2", "demonstration": "<2>"}\n'
    (folder / "surrogate.jsonl").write_text(row + row.replace("1+", "\\ud800"))
    (folder / "latin1.jsonl").write_bytes(row.replace("1+", "\xe9").encode("latin1"))
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    text = _invalid_strings()
    pq.write_table(pa.table({name: text for name in ("prompt", "answer", "demonstration")}), folder / "latin1.parquet")
    (folder / "metrics").mkdir()
    (folder / "metrics/metrics.jsonl").write_bytes(b"\xff\n")
    (folder / "latest/checkpoints").mkdir(parents=True)
    (folder / "latest/checkpoints/latest").write_bytes(b"\xff")
    return folder


def _invalid_strings():
    """Three Arrow strings that are no UTF-8."""
    data = pa.array([b"a\xff"] * 3)
    return pa.Array.from_buffers(pa.string(), 3, data.buffers())


def test_absurd_plans_can_be_forced(config_file, capsys, monkeypatch):
    """The plan is an estimate, so a run that it refuses may be tried."""
    monkeypatch.setattr("rlplus.tools.plan.cluster._host_memory", lambda: 2**20)
    assert main(["train", str(config_file)]) == 2
    assert "try with --force" in capsys.readouterr().err
    assert main(["train", str(config_file), "train.steps=1", "--force"]) == 0
    assert "It does not fit" in capsys.readouterr().err


def test_reports_that_cannot_be_written_or_read_name_the_file(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config_file.read_text())
    (run / "metrics.jsonl").write_text('{"step": 1, "generated_tokens": 1}\n')

    def complaint(*arguments):
        assert main(["report", str(run), *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert complaint("-o", "/dev/full") == "rlplus report: could not write /dev/full: No space left on device\n"
    assert complaint("-o", tmp_path) == f"rlplus report: could not write {tmp_path}: Is a directory\n"
    assert complaint("-o", config_file / "x.html").startswith("rlplus report: want --output a folder; got")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/evaluation-x.json").write_bytes(b'{\n"name": "\xff"}')
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "a/b.html")]) == 2
    assert f"{tmp_path}/a/evaluation-x.json, line 2: want UTF-8 text; got" in capsys.readouterr().err
    (run / "metrics.jsonl").write_bytes(b"\n\n\xff\n")
    assert f"{run}/metrics.jsonl, line 3: want UTF-8 text; got" in complaint()


def test_problems_that_cannot_be_used_are_refused_before_the_run(config_file, tmp_path, capsys):
    (tmp_path / "problems.jsonl").write_text('{"prompt": 7, "answer": "7"}\n')
    assert main(["train", str(config_file), f"evaluation.data.path={tmp_path}/problems.jsonl"]) == 2
    assert "problems.jsonl:1: want the prompt as a string or as chat messages" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_folder_is_refused(config_file, capsys):
    assert main(["train", str(config_file), "train.steps=1"]) == 0
    assert main(["train", str(config_file), "train.steps=1"]) == 2
    assert "already holds a run, at step-000001: resume it (--resume)" in capsys.readouterr().err


def test_overrides_may_follow_an_option(config_file, capsys):
    assert main(["train", str(config_file), "--resume", "train.lrr=1"]) == 2
    assert "train.lrr: unknown key" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", str(config_file), "train.steps=1", "--resume", "train.lr=1", "--nothing"])
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--resume", "auto", "{}"], ["{}", "--resume", "auto"], ["--resume=auto", "{}"]])
def test_the_value_of_resume_may_follow_it(config_file, tmp_path, capsys, options):
    """It is taken neither for the configuration nor for an override."""
    assert main(["train", *(text.format(config_file) for text in options), "train.steps=1"]) == 0
    assert main(["train", str(config_file), "--resume", "step-000001", "train.steps=2"]) == 0
    assert "resumed at step 1" in capsys.readouterr().err


def test_a_run_that_fails_is_one_message(config_file, capsys):
    assert main(["train", str(config_file), "rollout.max_logprob_gap=1e-30"]) == 2
    assert "the mean gap between the logprobs" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(config_file, tmp_path, capsys):
    assert main(["train", str(config_file), "train.steps=1"]) == 0
    saved = tmp_path / "run/checkpoints/step-000001"
    os.truncate(saved / "policy/mp_rank_00_model_states.pt", 100)
    assert main(["train", str(config_file), "train.steps=2", "--resume"]) == 2
    assert (
        f"{saved / 'policy/mp_rank_00_model_states.pt'} is damaged: File is not a zip file. There is no older"
        in capsys.readouterr().err
    )
    (saved / "state.json").write_text("{")
    assert main(["train", str(config_file), "train.steps=2", "--resume"]) == 2
    assert f"{saved}/state.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_train_with_vllm_in_a_process_of_its_own(config_file, tmp_path):
    """Real DeepSpeed and real vLLM together: the engine follows the policy to fp32 rounding, and a resume works."""

    def rlplus(*arguments: str) -> None:
        command = [sys.executable, "-m", "rlplus", *arguments]
        done = processes.run(command, env=environment())
        assert done.returncode == 0, done.stderr[-4000:]
        assert not re.search("NUMA|WARN|Warning", done.stderr), done.stderr

    options = ["rollout.engine=vllm", "train.lr=0.01", "rollout.kv_cache_memory_mb=64"]
    rlplus("train", str(config_file), *options, "train.steps=2")
    rlplus("train", str(config_file), *options, "train.steps=4", "--resume")
    rows = metrics(Path(tmp_path / "run"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-4
    rlplus("eval", str(config_file), *options)
    assert (tmp_path / "run/evaluation-task.json").exists()
