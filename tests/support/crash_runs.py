"""Commands whose calls are watched, with marks of what they have promised, and what their folders must then hold."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from comparisons import FILE, written
from crash_states import Disk
from file_calls import Call, mark, watch
from trainer_runs import metrics, run_config

from rlplus.common.durable import flush
from rlplus.tools.cli import main
from rlplus.tools.compare.comparing import MARK
from rlplus.tools.compare.config import load_comparison
from rlplus.tools.compare.launches import Run, Runner
from rlplus.train import checkpoint
from rlplus.train.config import Config, ScratchModel
from rlplus.train.data import byte_tokenizer, drop_kept, kept_steps
from rlplus.train.evaluation import sample as evaluations
from rlplus.train.evaluation.partial_samples import KeptCalls
from rlplus.train.learner.pretrained import make_scratch_model, write_model
from rlplus.train.trainer import metrics as run_metrics
from rlplus.train.trainer.run_folder import RunFolder

STEPS = 3
Files = dict[str, bytes | None]

# Made anew at every start, or a log that is only shown; nothing of a run depends on it.
_NOISE = ("tensorboard", "progress.json", "model_config", "scratch", ".lock")


def noise(path: str) -> bool:
    return path.partition("/")[2].startswith(_NOISE)


def write_config(folder: Path, output: Path) -> Path:
    """A run of three steps, each with samples and a checkpoint, of which one is kept."""
    sections = {"checkpoint": {"every": 1, "keep": 1}, "log": {"samples_every": 1, "sample_groups": 1}}
    config = run_config(folder, train={"steps": STEPS}, **sections).model_copy(update={"output_dir": str(output)})
    (path := folder / "run.yaml").write_text(config.to_yaml())
    return path


def train_in_parts(folder: str, path: str) -> int:
    """`rlplus train` for two steps, the same again with the model removed, and on to the third; with marks."""
    if status := train_marked(folder, path, "train.steps=2"):
        return status
    mark("removed 2")
    shutil.rmtree(Path(folder) / "run/model")
    flush(Path(folder) / "run")
    return _train(path, "train.steps=2", "--resume") or _train(path, "--resume")


def train_marked(_: str, path: str, *options: str) -> int:
    """`rlplus train`, with a mark for each checkpoint and line of metrics.jsonl when its writer returns."""
    checkpoint.save = _marked(checkpoint.save, "saved", 2)  # type: ignore[assignment]
    run_metrics.RunLog.write = _marked(run_metrics.RunLog.write, "logged", 1)  # type: ignore[method-assign]
    return _train(path, *options)


def train_as(folder: str, rank: int, port: int, path: str) -> int:
    """`train_marked` as one of two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return train_marked(folder, path)


def _train(path: str, *options: str) -> int:
    mark("begun 0")
    if not (status := main(["train", path, *options])):
        mark("finished 0")
    return status


def _marked(function: Callable[..., Any], word: str, place: int) -> Callable[..., Any]:
    """The function, which marks its argument at that place when it returns."""

    def marked(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        mark(f"{word} {args[place]}")
        return result

    return marked


def recorded(folder: Path, action: Callable[..., Any], *arguments: str, method: str = "forkserver") -> list[Call]:
    """The calls of an undisturbed process below the folder; the model of the disk agrees with the disk."""
    folder.mkdir(exist_ok=True)
    done = watch(folder, action, [str(folder), *arguments], method=method)
    assert done.status == 0, done.said[-3000:]
    disk = Disk()
    for call in done.calls:
        if call.kind != "mark":
            disk.apply(call)
    assert disk.files() == read(folder)
    return done.calls


def numbers(marks: Sequence[str], word: str) -> list[int]:
    """0, and the numbers of such marks."""
    return [0, *(int(text.split()[1]) for text in marks if text.split()[0] == word)]


class Truth:
    """The files that an undisturbed run wrote, at the moments of its marks."""

    def __init__(self, calls: Sequence[Call]) -> None:
        disk = Disk()
        self.checkpoints: dict[int, Files] = {}
        self.models: dict[int, Files] = {}
        for call in calls:
            word, _, number = call.path.partition(" ")
            if call.kind != "mark":
                disk.apply(call)
            elif word == "saved":
                place = f"run/checkpoints/{checkpoint.name_of(int(number))}/"
                self.checkpoints[int(number)] = below(disk.files(), place)
            elif word == "finished":
                self.models[max(self.checkpoints)] = below(disk.files(), "run/model/")
        self.last = disk.files()
        self.samples = below(self.last, "run/samples/")
        self.lines = (self.last.get("run/metrics.jsonl") or b"").decode().splitlines()


def below(files: Files, place: str) -> Files:
    return {path.removeprefix(place): content for path, content in files.items() if path.startswith(place)}


def read(folder: Path) -> Files:
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in folder.rglob("*")}


def check_run(config: Config, marks: Sequence[str], truth: Truth) -> None:
    """A resumed run finds all that was promised before its first step, and whole, in the code that looks for it."""
    saved, word = max(numbers(marks, "saved")), (marks or ["begun"])[-1].split()[0]
    folder = Path(config.output_dir)
    with ExitStack() as stack:
        run = RunFolder(config, "auto", stack)
        step = run.state.get("step", 0)
        assert saved <= step <= saved + 1, f"promised {saved}, found {step}"
        if run.last is not None and step in truth.checkpoints:
            assert read(run.last) == truth.checkpoints[step]
        if run.has_result and step in truth.models and word != "removed":
            assert read(run.model) == truth.models[step]
        assert run.has_result or word != "finished" or step != saved, "the result is lost"
    lines = run_metrics._complete_lines(folder / "metrics.jsonl")
    kept = [line for line in lines if run_metrics._step_of(line, folder / "metrics.jsonl") <= step]
    assert kept == truth.lines[:step]
    drop_kept(folder / "samples", step)
    samples = {path.name: path.read_bytes() for path in kept_steps(folder / "samples")}
    assert samples == {f"step-{s + 1:06d}.parquet": truth.samples[f"step-{s + 1:06d}.parquet"] for s in range(step)}


def same_end(folder: Path, truth: Truth) -> None:
    """The folder holds what the undisturbed run ended with, bit for bit but for clocks."""
    assert read(folder / "model") == truth.models[STEPS]
    assert not [*folder.glob("*.new")]
    rows = [json.loads(line) for line in truth.lines]
    timed = {"tokens_per_second"} | {key for row in rows for key in row if key.startswith("time/")}
    assert metrics(folder) == [{key: value for key, value in row.items() if key not in timed} for row in rows]
    assert read(folder / "samples") == truth.samples


def write_problems(folder: Path) -> tuple[str, str]:
    """A model and six problems, for `evaluate`."""
    tokenizer, model = byte_tokenizer(), folder / "tiny"
    write_model(make_scratch_model(ScratchModel(hidden_size=32, layers=1), tokenizer, seed=0), str(model))
    tokenizer.save_pretrained(str(model))
    (data := folder / "bench.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": "1"}}\n' for i in range(6)))
    return str(model), str(data)


def evaluate(folder: str, model: str, data: str) -> int:
    """`rlplus eval` of six problems in three calls of the engine, with a mark for each whose samples are kept."""
    evaluations._COMPLETIONS_A_CALL = 4
    KeptCalls.write = _marked(KeptCalls.write, "kept", 1)  # type: ignore[method-assign]
    options = ["rollout.engine=transformers", "rollout.max_response_length=4", "model.dtype=float32"]
    command = ["eval", model, "--data", data, "--output", f"{folder}/eval", *options, "evaluation.samples=2"]
    status = main(command)
    mark("finished 0")
    return status


def check_evaluation(place: Path, marks: Sequence[str], truth: Files) -> None:
    """All samples and results that are there belong to the whole evaluation, and all that was promised is there."""
    found = {path: content for path, content in read(place).items() if path.endswith((".parquet", ".json"))}
    assert found.items() <= truth.items()
    for first in numbers(marks, "kept")[1:]:
        assert f"eval/samples/evaluation-bench-0-{first:06d}.parquet" in found
    assert "finished 0" not in marks or "eval/evaluation-bench.json" in found


# A stand-in for `python -m rlplus`: writes what a run writes, as durably.
COMMAND = """
import json, sys
from pathlib import Path
sys.excepthook = lambda kind, error, _: print("stand-in:", error, file=sys.stderr)
from rlplus.common.durable import make_folder, write_text
_, _, command, *arguments = sys.argv
values = dict(each.split("=", 1) for each in arguments if "=" in each and each[0] != "-")
values = {key: json.loads(value) for key, value in values.items()}
folder = Path(values["output_dir"])
if command == "train":
    make_folder(folder / "model")
    for name in ("config.yaml", "model/config.json"):
        write_text(folder / name, "{}")
    write_text(folder / "metrics.jsonl", '{"step": 7, "generated_tokens": 70, "reward/internal": 0.5}\\n')
else:
    result = dict(name="set", problems=[0, 1], n=[4, 4], correct=[1, 2], k=[1], seed=0, statuses={"ok": 8})
    result |= dict(temperature=values.get("evaluation.temperature", 1.0), mean_response_length=5.0)
    write_text(folder / "evaluation-set.json", json.dumps(result | dict(truncated_share=0.0, mean_reward=None)))
"""
COLD = "evaluation.temperature=0.5"


def prepare(folder: Path, seed: int) -> None:
    """Base model and data, left to the system to flush."""
    (folder / "model").mkdir()
    for name in ("model/config.json", "train.jsonl", "validation.jsonl", "test.jsonl"):
        (folder / name).write_text(f"{seed}")


def write_comparison(folder: Path) -> Path:
    """A base model and two methods, one after the other; with the stand-in's script beside it."""
    (folder / "command.py").write_text(COMMAND)
    studies = {"Methods": {"settings": ["one"], "methods": ["SFT", "SFT+GRPO"], "seeds": 1}}
    methods = {name: FILE["methods"][name] for name in ("SFT", "SFT+GRPO")}
    changes = {"settings": {"one": {"prepare": "crash_runs:prepare"}}, "methods": methods, "studies": studies}
    return written(folder, FILE | changes | {"search": None})


def compare(folder: str, path: str, *overrides: str) -> int:
    """`rlplus compare`, and once more for other evaluations; or once with the overrides that are given."""
    Runner._prepare = _prepare_here  # type: ignore[method-assign]
    launcher = f"{sys.executable} {Path(path).parent / 'command.py'}"
    for number, each in enumerate([list(overrides)] if overrides else [[], [COLD]], 1):
        mark(f"begun {number}")
        if status := main(["compare", path, *each, "--output", f"{folder}/all", "--launcher", launcher]):
            return status
        mark(f"done {number}")
    return 0


def _prepare_here(runner: Runner, runs: Sequence[Run]) -> None:
    """In this process: a new one would import everything."""
    for one in (runner.preparation(run.setting, run.seed) for run in runs):
        if one is not None and not one.is_made():
            one.make()


def check_comparison(place: Path, path: Path, marks: Sequence[str]) -> None:
    """Each run that counts as finished has its own results, and all that was promised is finished."""
    done, output = numbers(marks, "done")[-1], place / "all"
    comparison = load_comparison(path)
    prepared = Runner(comparison, Path(FILE["run"]), output).preparation("one", 0)
    if prepared is not None and prepared.is_made():
        assert len(read(prepared.folder)) == 6
        assert b"" not in read(prepared.folder).values()
    finished = []
    for given, temperature in ([], 1.0), ([COLD], 0.5):
        runs = Runner(comparison, Path(FILE["run"]), output, overrides=given).finished()
        assert all(one["set"].temperature == temperature for one in runs.values())
        finished.append(len(runs))
    assert not done or finished[done - 1] == 3 or (done == 1 and marks[-1] == "begun 2")
    assert not done or (output / MARK).is_file()
