"""The word problems: their arithmetic, what the base model sees of them, and what a comparison prepares."""

import json
import operator
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.toy.base_model import NOTE
from experiments.words import SET, prepare, words_base
from experiments.words.word_problems import Problem, draw, draw_many, make_tokenizer
from experiments.words.words_base import WordsBase, careless
from rlplus.tools.compare.config import load_comparison
from rlplus.tools.compare.launches import Runner
from rlplus.tools.compare.prepared import TEST, TRAIN, VALIDATION
from rlplus.train.config import load_config
from rlplus.train.reward.graders.exact import exact_match

TINY = WordsBase(hidden=64, layers=1, batch=2, clean_steps=1, careless_steps=1)
EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)\.")
APPLIED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return draw_many(random.Random(0), range(2, 6), 600)


def values_of(solution: str) -> list[int]:
    """The results of its equations, each of which begins with the one before."""
    found = [
        (int(a), APPLIED[operation](int(a), int(b)), int(result))
        for a, operation, b, result in EQUATION.findall(solution)
    ]
    assert all(begins == before[2] for before, (begins, _, _) in pairwise(found))
    assert all(wanted == result for _, wanted, result in found)
    return [result for _, _, result in found]


def test_every_solution_is_right_by_its_own_arithmetic(problems: list[Problem]) -> None:
    for problem in problems:
        for solution in (problem.worked(), problem.demonstration):
            values = values_of(solution)
            assert len(values) == len(problem.steps)
            assert all(1 <= value <= 99 for value in values)
            assert solution.endswith(f"#### {values[-1]}")
            assert problem.answer == str(values[-1])


def test_a_problem_says_each_of_its_numbers_once_and_in_order(problems: list[Problem]) -> None:
    for problem in problems:
        first, *rest = problem.steps
        said = [first.first, first.second, *(step.second for step in rest)]
        assert [int(number) for number in re.findall(r"\d+", problem.prompt)] == said, problem.prompt


def test_a_slip_is_a_wrong_result_with_which_a_solution_goes_on(problems: list[Problem]) -> None:
    rng, wrong = random.Random(1), 0
    for problem in problems:
        found = EQUATION.findall(problem.worked(rng, 0.25))
        assert all(before[3] == after[0] for before, after in pairwise(found))
        assert all(1 <= int(result) <= 99 for *_, result in found)
        wrong += APPLIED[found[0][1]](int(found[0][0]), int(found[0][2])) != int(found[0][3])
    assert wrong / len(problems) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / len(problems)) ** 0.5)


def test_the_second_phase_has_few_worked_solutions_and_bare_answers(problems: list[Problem]) -> None:
    rng, base = random.Random(2), WordsBase(worked_share=0.2, slip=0.0)
    solutions = [(problem, careless(problem, base, rng)) for problem in problems]
    assert {solution for problem, solution in solutions} <= {
        text for problem in problems for text in (problem.worked(), f"#### {problem.answer}")
    }
    share = sum("=" in solution for _, solution in solutions) / len(solutions)
    assert share == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / len(solutions)) ** 0.5)


def test_the_tokenizer_gives_back_every_text_and_has_a_token_for_each_digit(problems: list[Problem]) -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer) == 433
    for problem in problems[:200]:
        for text in (problem.prompt, problem.worked(), problem.demonstration):
            tokens = tokenizer(text).input_ids
            assert tokenizer.decode(tokens) == text
            pieces = tokenizer.convert_ids_to_tokens(tokens)
            assert "".join(piece for piece in pieces if piece.isdigit()) == re.sub(r"\D", "", text)
            assert all(len(piece) == 1 for piece in pieces if re.search(r"\d", piece))


def test_all_seeds_share_the_base_model_and_the_tests_and_none_of_them_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, excluded = set[str](), set[str]()

    def noting(rng: random.Random, steps: int, exclude: set[str]) -> Problem:
        problem = draw(rng, steps, exclude)
        seen.add(problem.prompt)
        excluded.update(exclude)
        return problem

    monkeypatch.setattr(words_base, "draw", noting)
    folders = [tmp_path / "words" / f"seed-{seed}" for seed in (3, 4)]
    for seed, folder in zip((3, 4), folders, strict=True):
        prepare(folder, seed, replace(TINY, batch=60), problems=400)
    assert len(seen) > 110, "the model of the second seed was trained, too, or that of the first was not"
    files = [{name: (folder / name).read_text() for name in (TRAIN, VALIDATION, TEST)} for folder in folders]
    assert [files[0][name] == files[1][name] for name in (TRAIN, VALIDATION, TEST)] == [False, True, True]
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in files[0].items()}
    prompts = [row["prompt"] for each in rows.values() for row in each]
    assert len(set(prompts)) == len(prompts) == 400 + 96 + 192
    held_out = {row["prompt"] for name in (VALIDATION, TEST) for row in rows[name]}
    assert excluded == held_out, "a draw would hardly ever meet one of them by chance"
    assert not seen & held_out
    assert [row[SET] for row in rows[TEST]] == ["trained"] * 96 + ["longer"] * 96


def test_another_base_model_is_not_copied(tmp_path: Path) -> None:
    for setting, base in (("a", TINY), ("b", replace(TINY, slip=0.2))):
        prepare(tmp_path / setting / "seed-0", 0, base, problems=4)
    notes = [json.loads((tmp_path / setting / "seed-0/model" / NOTE).read_text())["slip"] for setting in ("a", "b")]
    assert notes == [0.1, 0.2]


@pytest.mark.parametrize(("dial", "value", "wanted"), [("slip", 1.5, "a probability"), ("layers", 0, "above 0")])
def test_a_dial_out_of_range_is_refused(dial: str, value: float, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"want {dial} {wanted}; got {value}"):
        WordsBase(**{dial: value})


def test_the_run_rewards_right_answers_alone_and_everything_fits(problems: list[Problem]) -> None:
    config, tokenizer = load_config("experiments/words.yaml"), make_tokenizer()
    assert config.rollout is not None
    grade = exact_match(config.reward.pattern)
    for problem in problems:
        wrong = problem.demonstration[:-1] + str((int(problem.demonstration[-1]) + 1) % 10)
        responses = (problem.worked(), problem.demonstration, f"#### {problem.answer}", wrong, problem.answer)
        assert [grade(each, problem.answer, {})[0] for each in responses] == [1, 1, 1, 0, 0]
        assert len(tokenizer(problem.prompt).input_ids) <= config.data.max_prompt_length
        assert len(tokenizer(problem.demonstration).input_ids) < config.rollout.max_response_length


def test_the_comparison_is_as_it_was_fixed(tmp_path: Path) -> None:
    """By docs/decisions/064, written before its runs."""
    path = Path("experiments/compare/words.yaml")
    comparison = load_comparison(path)
    runner = Runner(comparison, path.parent / comparison.run, tmp_path)
    runner.check()
    (study,), search = comparison.studies.values(), comparison.search
    assert search is not None
    assert (study.seed_numbers, search.seed_numbers, search.share) == (range(5), range(1000, 1001), 1.0)
    assert (search.rates, search.further) == ([1e-4, 3e-4, 1e-3], 2)
    presets = {name: comparison.methods[name].preset for name in study.methods[1:]}
    assert [*presets.values()] == ["grpo-official", "grpo-official", "rlplus-official-omega", "rlplus-official"]
    evaluation = runner.config_of(runner.chain("words", 0, "GRPO")[-1]).evaluation
    assert (evaluation.samples, evaluation.k) == (32, [1, 2, 4, 8, 16, 32])
    for method in study.methods[1:]:
        train = runner.config_of(runner.chain("words", 0, method)[-1]).train
        assert (train.prompts_per_step, train.prompts_per_update, train.generated_tokens) == (16, 8, 300_000)
