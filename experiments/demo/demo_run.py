"""Creates the task and a base model, trains it with GRPO and RL-PLUS, and compares the three by pass@k."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.toy.base_model import ToyBase, make_base
from experiments.toy.task import EASY, HARD, draw_splits, read_jsonl, write_jsonl
from rlplus.common.commands import ending_with_this_process, terminated_as_exit
from rlplus.common.durable import claimed
from rlplus.common.errors import RunFailed, ending
from rlplus.common.terminal import Terminal
from rlplus.tools.report import load_run, seeds_line, write_report
from rlplus.train.evaluation.estimates import Estimate
from rlplus.train.evaluation.results import Evaluation, load_results, paired_difference, pooled_pass_at

CONFIG = Path(__file__).parent.parent / "demo.yaml"
BASE, GRPO, RLPLUS = "base", "GRPO", "RL-PLUS"
RUNS = {GRPO: "grpo", RLPLUS: "rlplus"}  # label -> preset, and the name of the run's folder
MARK = ".rlplus-demo"  # only a folder with this file is written to again
TAIL, LONGEST = 30, 500  # lines of a failed command's log that are shown, and characters of a line

NOTES = (
    "The task: add numbers of five base-4 digits, digit by digit. Half of the evaluation's problems have two numbers, "
    "which the base model mostly adds at once; half have five, where its direct answers are guesses and only writing "
    "down the running sums helps. It was taught to do that, and then to do it seldom and carelessly. The "
    "demonstrations do it always and without a slip. A quarter of the problems to train on have five numbers.",
    "GRPO and RL-PLUS start from the same base, with the same learning rate, and stop with the step that reaches the "
    "same number of generated tokens. No problem of the evaluation occurs in the base model's training or in theirs.",
    "The setting was chosen on other seeds, after several in which GRPO solved the hard problems too. How GRPO fares "
    "depends on the learning rate and on the seed: the tables say what happened on the seeds of this report and no "
    "more, and one seed is one draw. Several seeds (python -m experiments.demo --seeds N) have a table of their own.",
)


def run_demo(output: str | Path, *, seeds: int = 1, overrides: Sequence[str] = ()) -> Path:
    """Run the comparison for the seeds 0 ... seeds - 1 and print it; returns the path of the report.

    output/seed<N>/ receives train.jsonl, test.jsonl, and base/, grpo/, rlplus/ with an evaluation each; output/
    report.html. A finished base of the same dials is reused, everything else is created anew. overrides:
    "train.lr=1e-4", for both runs. ValueError if `output` is something else's folder or seeds < 1; RunFailed if a run
    fails.
    """
    if seeds < 1:
        raise ValueError(f"want at least one seed; got {seeds}")
    folder = claimed(Path(output).expanduser(), MARK, "demo")
    console = Terminal(stderr=True)
    started = time.monotonic()
    with terminated_as_exit():
        for seed in range(seeds):
            _run_seed(folder / f"seed{seed}", seed, overrides, console)
    evaluations = {label: [_evaluation(folder, seed, label) for seed in range(seeds)] for label in (BASE, *RUNS)}
    runs = {label: [load_run(folder / f"seed{seed}" / name) for seed in range(seeds)] for label, name in RUNS.items()}
    report = folder / "report.html"
    kinds = [problem.hard for problem in read_jsonl(folder / "seed0" / "test.jsonl")]
    parts = {
        f"{'Hard' if hard else 'Easy'} problems: {HARD if hard else EASY} numbers": _numbers(kinds, hard)
        for hard in (False, True)
    }
    write_report(report, runs, {"": evaluations}, "RL-PLUS and GRPO from the same base model", NOTES, parts)
    tables = [results_table(evaluations, kinds), differences_table(evaluations)]
    Terminal().print(*tables, *([seeds_table(evaluations)] if seeds > 1 else []))
    console.print(f"Report: {report}  ({(time.monotonic() - started) / 60:.1f} minutes)")
    return report


def _run_seed(folder: Path, seed: int, overrides: Sequence[str], console: Console) -> None:
    """Data, base model, the two runs and the three evaluations of one seed."""
    console.print(f"seed {seed}: {folder}", style="bold")
    folder.mkdir(exist_ok=True)
    train, test = draw_splits(seed)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "test.jsonl", test)
    base = folder / "base"
    console.print(f"data: {len(train)} problems to train on, {len(test)} others to evaluate on")
    if not make_base(base, ToyBase(), seed, frozenset(test), console):
        console.print(f"base model: the finished one in {base} is used again (delete it to make it anew)")
    common = [
        f"model.path={base}",
        f"data.path={folder / 'train.jsonl'}",
        f"evaluation.data.path={folder / 'test.jsonl'}",
        f"train.seed={seed}",
        *overrides,
    ]
    for label, preset in RUNS.items():
        run = folder / preset
        if run.exists():
            console.print(f"{label}: the earlier run in {run} is replaced")
            shutil.rmtree(run)
        settings = [*common, f"algorithm.preset={preset}", f"output_dir={run}"]
        _command(f"{label}: training", ["train", str(CONFIG), *settings], folder / f"{preset}-train.log", console)
    models = {BASE: base, **{label: folder / preset / "model" for label, preset in RUNS.items()}}
    for label, model in models.items():
        output = ["--output", str(_result_folder(folder, label)), "--overwrite"]
        command = ["eval", str(CONFIG), "--model", str(model), *output, *common]
        _command(f"{label}: evaluation", command, folder / f"{label.lower()}-eval.log", console)


def _result_folder(folder: Path, label: str) -> Path:
    return folder / RUNS.get(label, label)


def _evaluation(folder: Path, seed: int, label: str) -> Evaluation:
    (result,) = load_results(_result_folder(folder / f"seed{seed}", label)).values()
    return replace(result, name=f"{label}, seed {seed}")


def _command(title: str, arguments: Sequence[str], log: Path, console: Console) -> None:
    """Run an rlplus command in a separate process: its live display goes to the terminal, the rest to `log`."""
    console.print(title, style="bold")
    with log.open("w", encoding="utf-8") as file:
        command = ending_with_this_process([sys.executable, "-m", "rlplus", *arguments])
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # more are not faster here, and wait for busy cores
        status = subprocess.run(command, stdout=file, env=environment).returncode
    if status:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        for line in tail:
            console.print(line[:LONGEST])
        raise RunFailed(f"{title} failed with {ending(status)}; the whole log is {log}")


def results_table(evaluations: Mapping[str, Sequence[Evaluation]], hard: Sequence[bool]) -> Table:
    """pass@k of each model over all problems and over each kind. `hard`: the kind of each problem by its number."""
    first = evaluations[BASE][0]
    seeds = f", {len(evaluations[BASE])} seeds" if len(evaluations[BASE]) > 1 else ""
    title = f"% of {len(first.problems)} unseen problems solved with k samples (95% intervals, rounded outwards{seeds})"
    caption = f"easy: {EASY} numbers to add, hard: {HARD}"
    table = Table("problems", "model", *(f"pass@{k}" for k in first.k), title=title, caption=caption)
    for kind, problems in (("all", range(len(hard))), ("easy", _numbers(hard, False)), ("hard", _numbers(hard, True))):
        for label, each in evaluations.items():
            parts = [one.among(problems) for one in each]
            table.add_row(kind if label == BASE else "", label, *(_percent(pooled_pass_at(parts, k)) for k in first.k))
        table.add_section()
    return table


def _numbers(hard: Sequence[bool], wanted: bool) -> frozenset[int]:
    """The numbers of the problems of a kind."""
    return frozenset(number for number, kind in enumerate(hard) if kind == wanted)


def differences_table(evaluations: Mapping[str, Sequence[Evaluation]]) -> Table:
    """Differences between the models over all problems, in bold where 0 is outside the interval."""
    ks = evaluations[BASE][0].k
    table = Table("difference", *(f"pass@{k}" for k in ks), title="Differences on the same problems (95% intervals)")
    for first, second in ((BASE, GRPO), (BASE, RLPLUS), (GRPO, RLPLUS)):
        estimates = [paired_difference(evaluations[first], evaluations[second], k) for k in ks]
        cells = [Text(_percent(e, "+"), "bold" if e.low > 0 or e.high < 0 else "") for e in estimates]
        table.add_row(f"{second} − {first}", *cells)
    return table


def seeds_table(evaluations: Mapping[str, Sequence[Evaluation]]) -> Table:
    """pass@k of each seed, for the smallest and the largest k, and the number of seeds where it is below the base's."""
    ks = evaluations[BASE][0].k
    shown = sorted({min(ks), max(ks)})
    title = f"Seed by seed: % solved with {' / '.join(map(str, shown))} samples"
    table = Table("seed", *evaluations, title=title, caption=seeds_line(evaluations, max(ks)))
    for each in zip(*evaluations.values(), strict=True):
        cells = [" / ".join(f"{100 * one.values(k).mean().item():.1f}" for k in shown) for one in each]
        table.add_row(str(each[0].seed), *cells)
    return table


def _percent(estimate: Estimate, sign: str = "") -> str:
    """An interval short enough for three on 80 columns. Limits are rounded outwards, so that the mean is inside."""
    mean, low, high = (round(100 * value, 6) for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean:{sign}.1f} ({floor(low):{sign}d}..{ceil(high):{sign}d})"
