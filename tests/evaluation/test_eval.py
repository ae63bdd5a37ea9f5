"""`rlplus eval`: a model without a configuration, a killed evaluation, several processes."""

import json
import os
import re
import signal
from pathlib import Path

import processes
import pytest
from trainer_runs import by_torchrun, environment, run_config, write_task

from rlplus.tools.cli import main, parse
from rlplus.tools.cli.evaluate import evaluated
from rlplus.train.config import RolloutConfig, ScratchModel, load_config
from rlplus.train.data import byte_tokenizer
from rlplus.train.evaluation.output_folder import held
from rlplus.train.evaluation.sample import _alone
from rlplus.train.learner.pretrained import make_scratch_model, write_model
from rlplus.train.rollout.transformers_engine import TransformersEngine


def write_tiny(folder: Path, **scratch: int) -> str:
    """A random model with its tokenizer."""
    tokenizer = byte_tokenizer()
    write_model(make_scratch_model(ScratchModel(hidden_size=32, layers=1, **scratch), tokenizer, seed=0), str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def test_lengths_fit_the_positions_of_the_model(tmp_path, monkeypatch, capsys):
    """Defaults are lowered, and said; lengths that were given and do not fit are refused."""
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=48)
    (tmp_path / "bench.jsonl").write_text(json.dumps({"prompt": "1?", "answer": "1"}) + "\n")
    monkeypatch.chdir(tmp_path)
    asked = []

    def evaluates(config, *_, **__):
        data = config.evaluation.data
        asked.append((data.max_prompt_length, config.rollout.max_response_length))
        raise ValueError("not here")

    options = [model, "--data", "bench.jsonl", "rollout.engine=transformers", "model.dtype=float32"]
    with monkeypatch.context() as patch:
        patch.setattr("rlplus.train.evaluation.sample.evaluate_model", evaluates)
        given = [[], ["rollout.max_response_length=40"], ["evaluation.data.max_prompt_length=10"]]
        for lengths in given:
            assert main(["eval", *options, *lengths]) == 2
        assert asked == [(24, 24), (8, 40), (10, 38)]
        said = capsys.readouterr().err
        assert "rollout.max_response_length=24 and evaluation.data.max_prompt_length=24, so that prompt" in said
    assert main(["eval", *options, "rollout.max_response_length=48"]) == 2
    assert "have 2096 tokens together, the model has 48 positions: lower evaluation.data." in capsys.readouterr().err


def test_a_file_of_problems_is_read_as_the_runs_data(tmp_path: Path) -> None:
    """Unless the configuration names problems of its own; what is given comes last."""
    config = run_config(
        tmp_path, data={"prompt": "question", "system_prompt": "A \\boxed{}, 100%: '\"\n\x7f \u2028 é", "chat": True}
    )
    path = tmp_path / "run.yaml"
    path.write_text(config.to_yaml())
    command = ["eval", str(path), "--data", "a.jsonl", "data.answer=final", "evaluation.data.chat=false"]
    command += ["evaluation.data.max_prompt_length=8"]
    data = load_config(*evaluated(parse(command))).evaluation.data
    assert data is not None
    assert (data.path, data.prompt, data.answer, data.chat) == ("a.jsonl", "question", "final", False)
    assert data.system_prompt == config.data.system_prompt
    data = load_config(*evaluated(parse([*command[:-2], "--template", "qwen", command[-1]]))).evaluation.data
    assert data is not None
    assert (data.prompt, data.chat, data.system_prompt) == ("question", False, None)
    data = load_config(*evaluated(parse([*command[:-2], "evaluation.data.template=qwen", command[-1]]))).evaluation.data
    assert data is not None
    assert (data.prompt, data.template, data.system_prompt) == ("question", "qwen", None)
    path.write_text(run_config(tmp_path, evaluation={"data": {"path": "b.jsonl", "max_prompt_length": 8}}).to_yaml())
    data = load_config(*evaluated(parse(command))).evaluation.data
    assert data is not None
    assert (data.prompt, data.system_prompt) == ("prompt", None)


def test_an_engine_alone_needs_neither_the_runs_server_nor_its_adapters():
    server = {"engine": "sglang", "mode": "server", "server_url": "http://x", "weights_folder": "/x"}
    for given in (server, {"lora": "adapters"}, {"engine": "auto"}):
        alone = _alone(RolloutConfig(max_response_length=8, **given))
        assert (alone.engine, alone.mode, alone.lora, alone.weights_folder) == ("auto", "colocated", "merged", None)


def test_a_signal_ends_an_evaluation_and_says_what_is_kept(tmp_path, monkeypatch, capsys):
    """The same command then draws what is missing; another evaluation in the folder would have been refused."""
    rows = [{"prompt": f"{i}?", "answer": "1"} for i in range(6)]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplus.train.evaluation.sample._COMPLETIONS_A_CALL", 4)
    options = ["rollout.engine=transformers", "rollout.max_response_length=4", "model.dtype=float32"]
    command = ["eval", write_tiny(tmp_path / "tiny"), "--data", "bench.jsonl", *options, "evaluation.samples=2"]
    run, drawn, generate = tmp_path / "runs/eval/tiny", [], TransformersEngine.generate

    def signalled(self, *args, **settings):
        drawn.append(args)
        if len(drawn) == 2:
            with pytest.raises(ValueError, match=r"another evaluation is writing into .*tiny.* held by process"):
                held(run).__enter__()
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, *args, **settings)

    monkeypatch.setattr(TransformersEngine, "generate", signalled)
    assert main(command) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert "stopping; once more after 5 s to stop at once\n" in said
    assert "stopped by signal 15: 2 of 6 problems are kept in runs/eval/tiny/samples, the same command goes on" in said
    assert main(command) == 0
    assert len(drawn) == 4
    out, err = capsys.readouterr()
    assert "2 of 6 problems from the samples kept" in err
    assert "written to runs/eval/tiny/evaluation-bench.json" in out
    with held(run):
        pass


def test_answers_that_no_grader_reads_are_said_before_anything_is_sampled(tmp_path, monkeypatch, capsys):
    def ends(*args, **settings):
        raise ValueError("nothing is sampled here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplus.train.evaluation.sample.make_engine", ends)
    rows = [{"prompt": f"{i}?", "answer": "see the text" if i else "1"} for i in range(40)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", write_tiny(tmp_path / "tiny"), "--data", "words.jsonl", "rollout.max_response_length=4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "words: answers: 19 of 20 cannot be read by math_verify: every response there is worth 0 (first: row 3" in said
    )
    assert "nothing is sampled here" in said


@pytest.mark.slow
def test_a_model_is_evaluated_without_a_configuration(tmp_path, monkeypatch, capsys):
    """On benchmarks in a file. Samples are kept until the result is written; a killed evaluation resumes with them."""
    write_tiny(tmp_path / "tiny")
    rows = [{"data_source": name, "prompt": f"{i}?", "answer": "1"} for name in ("amc", "aime") for i in range(3)]
    rows += [{"data_source": "gpqa", "prompt": "A) x", "answer": "A"}]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlplus.train.evaluation.sample._COMPLETIONS_A_CALL", 4)
    short = ["rollout.engine=transformers", "rollout.max_response_length=4", "evaluation.data.answer=answer"]
    options = ["tiny", "--data", "bench.jsonl", *short, "evaluation.samples=2", "model.dtype=float32"]
    scored, generate = [], TransformersEngine.generate

    def dies(self, *args, **settings):
        scored.append(args)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **settings)

    run = tmp_path / "runs/eval/tiny"
    command = ["eval", *options, "--benchmarks", "gpqa_diamond,amc"]
    monkeypatch.setattr(TransformersEngine, "generate", dies)
    assert main(command) == 130
    assert [path.name for path in run.rglob("[!.]*.*")] == ["evaluation-amc-0-000000.parquet"]
    assert main(command) == 0
    assert len(scored) == 4
    assert {path.name for path in run.glob("[!.]*.*")} == {"evaluation-amc.json", "evaluation-gpqa_diamond.json"}
    out = capsys.readouterr().out
    assert re.search(r"gpqa_diamond +│ 1 +│ 2 +│ pass@1 .*│ choice +│", out)
    assert re.search(r"amc +│ 3 +│ 2 +│ pass@1 .*│ math_verify +│ 6 unparsed +│", out)
    once = {name: json.loads((run / f"evaluation-{name}.json").read_text()) for name in ("amc", "gpqa_diamond")}
    assert main([*command, "evaluation.k=[1,2]"]) == 0
    assert len(scored) == 4, "want the samples that were kept"
    for name, result in once.items():
        again = json.loads((run / f"evaluation-{name}.json").read_text())
        assert again == result | {"k": [1, 2], "checksum": again["checksum"]}
    for benchmark in ("amc", "gpqa_diamond"):  # each by itself, from the same samples
        assert main(["eval", *options, "--benchmarks", benchmark]) == 0
    assert len(scored) == 4
    # The whole file, graded by the run's own reward: three of the prompts are in both benchmarks.
    assert main(["eval", *options, "evaluation.data.benchmark=null"]) == 0
    assert "│ 4 " in capsys.readouterr().out
    # The name of the run tells runs' models apart.
    for name in ("a", "b"):
        write_tiny(tmp_path / name / "model")
        assert main(["eval", f"{name}/model", *options[1:], "--benchmarks", "gpqa_diamond"]) == 0
    assert {path.name for path in (tmp_path / "runs/eval").iterdir()} == {"tiny", "a-model", "b-model"}
    assert main(["samples", "runs/eval/a-model", "-n", "1"]) == 0
    assert "gpqa_diamond, row 7 of the data" in capsys.readouterr().out
    assert main(["eval", "tiny", "--benchmarks", "amc", "--template", "qwem"]) == 2
    assert "evaluation.data.template: want 'own', 'qwen', 'simplerl'" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_an_evaluation(tmp_path):
    """Each evaluates its problems and keeps its samples, one writes the result of all."""
    evaluation = {"data": {"path": str(write_task(tmp_path)), "max_prompt_length": 8}, "samples": 4}
    config_file = tmp_path / "run.yaml"
    config_file.write_text(run_config(tmp_path, evaluation=evaluation).to_yaml())
    folder = write_tiny(tmp_path / "tiny")
    output = tmp_path / "result"
    command = by_torchrun("-m", "rlplus", "eval", config_file, "--model", folder, "--output", output)
    done = processes.run(command, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("written to") == 1
    result = json.loads((output / "evaluation-task.json").read_text())
    assert (result["problems"], result["n"]) == (list(range(6)), [4] * 6)
    assert {path.name for path in output.rglob("[!.]*.*")} == {
        "evaluation-task.json", "evaluation-task-0-000000.parquet", "evaluation-task-1-000000.parquet",
    }  # fmt: skip
    assert "of 3" in done.stderr
