"""The data of a comparison: problems, demonstrations and base models of the demo's family of tasks."""

import json
import random
from math import log
from pathlib import Path

import pytest

from rlplus.compare.data import SET, TEST, TRAIN, VALIDATION, response_tokens, write_data
from rlplus.demo.base import Recipe
from rlplus.demo.task import Demonstrator, Problem, Task, make_tokenizer


def test_settings_with_one_recipe_share_the_base_model_and_the_problems(tmp_path: Path) -> None:
    recipe = Recipe(3, Task(transfer=True))
    files = {}
    for name, author in (("a", Demonstrator()), ("b", Demonstrator("backward", 0.5))):
        write_data(tmp_path / name, recipe, author)
        files[name] = {file: (tmp_path / name / file).read_text().splitlines() for file in (TRAIN, VALIDATION, TEST)}
    assert files["a"][TEST] == files["b"][TEST]
    rows = {file: [json.loads(line) for line in lines] for file, lines in files["b"].items()}
    assert [row["prompt"] for row in rows[TRAIN]] == [json.loads(line)["prompt"] for line in files["a"][TRAIN]]
    prompts = [row["prompt"] for each in rows.values() for row in each]
    assert len(set(prompts)) == len(prompts)
    assert [row[SET] for row in rows[TEST]] == ["trained"] * 100 + ["lengths"] * 50 + ["subtraction"] * 50


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_demonstrations_end_in_the_right_answer(order: str) -> None:
    task, rng = Task(hard=6, transfer=True), random.Random(0)
    author = Demonstrator(order, noise=0.4)  # type: ignore[arg-type]  # of the parametrization
    wrong, total = 0, 0
    for _ in range(200):
        problem = task.draw(rng, task.sets["trained"][1])
        response = author.response(problem, rng)
        sums, _, answer = response.removeprefix(";").partition(":")
        numbers = [*problem.numbers][:: 1 if order == "forward" else -1]
        exact = ["".join(str(sum(int(n[i]) for n in numbers[: k + 1]) % 4) for i in range(5)) for k in range(6)]
        assert answer == exact[-1] == problem.answer
        slips = 0
        for shown, right in zip(sums.split(","), exact[:-1], strict=True):
            slips += sum(a != b for a, b in zip(shown, right, strict=True))
            total += 5
        wrong += slips
        logprobs = author.logprobs(problem, response)
        assert len(logprobs) == len(make_tokenizer(task)(response).input_ids) + 1 == response_tokens(task)
        assert sum(logprobs) == pytest.approx(slips * log(0.4 / 4) + (25 - slips) * log(1 - 0.4 * 3 / 4))
    assert wrong / total == pytest.approx(0.4 * 3 / 4, abs=0.03)  # a digit drawn anew is right by chance


def test_subtraction_is_digitwise_and_without_borrowing() -> None:
    problem = Problem(("01230", "11111", "00003"), "~", places=4)
    assert problem.running_sums() == ["01230", "30123", "30120"]
    assert problem.prompt == "01230~11111~00003~-----="
