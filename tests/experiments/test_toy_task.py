"""The toy task's problems and demonstrations, what a comparison prepares of them, and the orders of responses."""

import json
import math
import random
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from experiments import scratchpads
from experiments.toy import SET, prepare
from experiments.toy.base_model import ToyBase
from experiments.toy.task import Demonstrator, Problem, Task, make_tokenizer
from rlplus.common.textfiles import file_name
from rlplus.tools.compare.prepared import TEST, TRAIN, VALIDATION
from rlplus.train.data import KeptSample, write_kept


def test_settings_with_one_base_have_the_same_model_and_problems(tmp_path: Path) -> None:
    base = ToyBase(Task(transfer=True), batch=1, learnt_loss=100.0, sloppy_steps=1)
    files = {}
    for name, author in (("a", Demonstrator()), ("b", Demonstrator("backward", 0.5))):
        prepare(tmp_path / name, 3, base, author)
        files[name] = {file: (tmp_path / name / file).read_text().splitlines() for file in (TRAIN, VALIDATION, TEST)}
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in files]
    assert weights[0] == weights[1]
    assert files["a"][TEST] == files["b"][TEST]
    rows = {file: [json.loads(line) for line in lines] for file, lines in files["b"].items()}
    assert [row["prompt"] for row in rows[TRAIN]] == [json.loads(line)["prompt"] for line in files["a"][TRAIN]]
    uniform = math.log(1 / len(make_tokenizer(base.task)))
    for row in rows[TRAIN]:
        assert len(row["uniform_logprob"]) == len(row["behavior_logprob"]) == len(row["demonstration"]) + 1
        assert row["uniform_logprob"] == pytest.approx([uniform] * len(row["uniform_logprob"]), abs=1e-4)
    prompts = [row["prompt"] for each in rows.values() for row in each]
    assert len(set(prompts)) == len(prompts)
    assert [row[SET] for row in rows[TEST]] == ["trained"] * 100 + ["lengths"] * 50 + ["subtraction"] * 50


def test_a_base_model_is_trained_once_for_all_settings_that_hold_out_the_same_problems(tmp_path: Path) -> None:
    base = ToyBase(Task(transfer=True), batch=1, learnt_loss=100.0, sloppy_steps=1)

    def prepared(setting: str, **options: Any) -> Path:
        prepare(tmp_path / setting / "seed-3", 3, base, **options)
        return tmp_path / setting / "seed-3"

    few = prepared("few", problems=64, validation="all")
    (few / "model/mark").touch()
    many = prepared("many", problems=128, validation="all", demonstrator=Demonstrator(noise=0.5))
    others = [prepared("other problems"), tmp_path / "other base" / "seed-3"]
    prepare(others[1], 3, replace(base, hidden=32), problems=64, validation="all")
    assert (many / "model/mark").exists()
    assert not any((each / "model/mark").exists() for each in others)
    rows = {each: [json.loads(line) for line in (each / TRAIN).read_text().splitlines()] for each in (few, many)}
    assert [row["prompt"] for row in rows[few]] == [row["prompt"] for row in rows[many]][:64]
    assert (len(rows[few]), len(rows[many])) == (64, 128)
    tuning = [json.loads(line) for line in (few / VALIDATION).read_text().splitlines()]
    assert [row[SET] for row in tuning] == ["trained"] * 64 + ["lengths"] * 32 + ["subtraction"] * 32
    held_out = [*tuning, *map(json.loads, (few / TEST).read_text().splitlines())]
    assert len({row["prompt"] for row in (*held_out, *rows[many])}) == len(held_out) + 128


@pytest.mark.parametrize(("order", "copies"), [("forward", True), ("backward", True), ("forward", False)])
def test_demonstrations_end_in_the_right_answer(order: str, copies: bool) -> None:
    task, rng = Task(hard=6, transfer=True), random.Random(0)
    author = Demonstrator(order, noise=0.4, copies=copies)  # type: ignore[arg-type]  # of the parametrization
    wrong, total, sums_on_the_way = 0, 0, 5 if copies else 4
    for _ in range(200):
        problem = task.draw(rng, task.sets["trained"][1])
        response = author.response(problem, rng)
        sums, _, answer = response.removeprefix(";").partition(":")
        numbers = [*problem.numbers][:: 1 if order == "forward" else -1]
        exact = ["".join(str(sum(int(n[i]) for n in numbers[: k + 1]) % 4) for i in range(5)) for k in range(6)]
        assert answer == exact[-1] == problem.answer
        slips = 0
        for shown, right in zip(sums.split(","), exact[-1 - sums_on_the_way : -1], strict=True):
            slips += sum(a != b for a, b in zip(shown, right, strict=True))
            total += 5
        wrong += slips
        logprobs = author.logprobs(problem, response)
        assert len(logprobs) == len(make_tokenizer(task)(response).input_ids) + 1 == 6 * (sums_on_the_way + 1) + 1
        assert sum(logprobs) == pytest.approx(
            slips * log(0.4 / 4) + (5 * sums_on_the_way - slips) * log(1 - 0.4 * 3 / 4)
        )
    assert wrong / total == pytest.approx(0.4 * 3 / 4, abs=0.03)  # a digit drawn anew is right by chance


def test_subtraction_is_digitwise_and_without_borrowing() -> None:
    problem = Problem(("01230", "11111", "00003"), "~", places=4)
    assert problem.running_sums() == ["01230", "30123", "30120"]
    assert problem.prompt == "01230~11111~00003~-----="


def test_orders_of_scratchpads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison's runs: two seeds, a method whose name cannot be a folder's, hard and easy problems."""
    hard, easy = "00001+00000+00000+00000+33333=", "00001+33333+-----+-----+-----="
    responses = {
        0: [":33330", ";00001,00001,00001,00001:33330", ";33332,33333,33333,33333:33330", ";12121,1:0"],
        1: [";33333,33333,33333,33333:33330", ";33333", ";3333", ""],
    }
    method = "γ = 0"
    for seed, given in responses.items():
        samples = [
            KeptSample(None, row, "trained", prompt, response, reward, "ok", False, [], [], [])
            for row, prompt in ((0, easy), (1, hard))
            for response in given
            for reward in [float(response.endswith(":33330"))]
        ]
        folder = tmp_path / "runs" / "foreign" / f"seed-{seed}" / file_name(method)
        write_kept(folder / "samples" / "evaluation-trained-0-000000.parquet", samples)
    outcomes = [{"setting": "foreign", "seed": seed, "method": method} for seed in responses]
    (tmp_path / "results.json").write_text(json.dumps({"outcomes": outcomes}))
    scratchpads.main([str(tmp_path), "foreign"])
    assert capsys.readouterr().out.splitlines()[2:] == [f"| {method} | 25 | 12 | 38 | 25 | 75, 25 |"]
    with pytest.raises(SystemExit, match=r"want a setting with finished runs \(foreign\); got rare"):
        scratchpads.main([str(tmp_path), "rare"])
    (folder / "samples" / "evaluation-trained-0-000000.parquet").unlink()
    with pytest.raises(SystemExit, match=r"want the samples of an evaluation on hard problems in .*; got none"):
        scratchpads.main([str(tmp_path), "foreign"])
