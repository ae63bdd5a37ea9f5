"""pass@k against enumeration; the bootstrap's coverage; the counting of `evaluate` with a scripted engine."""

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import comb, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_runs import run_config

from rlplus.config import load_config
from rlplus.data import Example, byte_tokenizer
from rlplus.evaluation import (
    Estimate,
    Evaluation,
    evaluate,
    join,
    paired_difference,
    pass_at_k,
    pooled_pass_at,
    seeds_below,
)
from rlplus.evaluation.sample import _problems
from rlplus.reward import Score
from rlplus.rollout import Completion


def evaluation(correct: Sequence[int], n: int = 8, **changes: object) -> Evaluation:
    base = Evaluation(
        name="m",
        problems=tuple(range(len(correct))),
        n=(n,) * len(correct),
        correct=tuple(correct),
        k=(1, 4),
        temperature=1.0,
        seed=0,
        mean_response_length=3.5,
        truncated_share=0.25,
        statuses={"ok": n * len(correct)},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
        assert pass_at_k(n, c, k) == float(share)


def test_pass_at_k_is_unbiased() -> None:
    # Expectation over c ~ Binomial(n, p), in exact fractions, is 1 - (1-p)^k.
    n, p = 10, Fraction(3, 17)
    for k in range(1, n + 1):
        terms = (
            Fraction(len(list(itertools.combinations(range(n), c))))
            * p**c
            * (1 - p) ** (n - c)
            * Fraction(pass_at_k(n, c, k))
            for c in range(n + 1)
        )
        assert float(sum(terms)) == pytest.approx(float(1 - (1 - p) ** k), abs=1e-15)


def test_pass_at_k_with_many_samples() -> None:
    # 1 - prod_{i=n-c+1}^{n} (1 - k/i), in fractions
    for n, c, k in [(1024, 1, 1), (1024, 1, 512), (2000, 3, 1), (2000, 1999, 2), (4096, 700, 64)]:
        product = Fraction(1)
        for i in range(n - c + 1, n + 1):
            product *= 1 - Fraction(k, i)
        assert pass_at_k(n, c, k) == float(1 - product)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_mean_is_the_mean_over_problems_and_the_interval_is_reproducible() -> None:
    one = evaluation([0, 2, 8, 5])
    estimate = one.pass_at(4)
    assert estimate.mean == pytest.approx(sum(pass_at_k(8, c, 4) for c in (0, 2, 8, 5)) / 4, abs=1e-15)
    assert estimate.low < estimate.mean < estimate.high
    assert one.pass_at(4) == estimate


def binomial_tail(problems: int, least: int, share: Fraction) -> Fraction:
    """Probability of at least `least` successes in `problems` trials."""
    terms = (comb(problems, c) * share**c * (1 - share) ** (problems - c) for c in range(least, problems + 1))
    return sum(terms, Fraction(0))


@pytest.mark.parametrize("problems", [1, 5, 30])
def test_all_or_none_solved_has_the_exact_binomial_interval(problems: int) -> None:
    solved, unsolved = evaluation([8] * problems), evaluation([0] * problems)
    for k in (1, 4):
        low, high = solved.pass_at(k).low, unsolved.pass_at(k).high
        assert (solved.pass_at(k), unsolved.pass_at(k)) == (Estimate(1.0, low, 1.0), Estimate(0.0, 0.0, high))
        # At the limit, the tail that was seen has a probability of 2.5%.
        assert float(binomial_tail(problems, problems, Fraction(low))) == pytest.approx(0.025, rel=1e-12)
        assert float(1 - binomial_tail(problems, 1, Fraction(high))) == pytest.approx(0.025, rel=1e-12)
    assert pooled_pass_at([solved] * 3, 1) == solved.pass_at(1)  # more seeds are not more problems
    up = paired_difference([unsolved], [solved], 1)  # from -1 to 1: twice as wide
    assert (up.mean, up.high) == (1.0, 1.0)
    assert up.low == pytest.approx(1 - 2 * (1 - solved.pass_at(1).low), abs=1e-15)
    assert paired_difference([solved], [solved], 1).low == -paired_difference([solved], [solved], 1).high < 0


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_mean_is_within_the_interval_and_the_interval_within_the_possible(correct: list[list[int]], k: int) -> None:
    seeds = [evaluation(each) for each in correct]
    estimate = pooled_pass_at(seeds, k)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    other = paired_difference(seeds, [evaluation([8 - c for c in each]) for each in correct], k)
    assert -1 <= other.low <= other.mean <= other.high <= 1


@pytest.mark.parametrize("at_once", [1, 7, 640, 10**6])
def test_intervals_do_not_depend_on_the_indices_held_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The bootstrap goes in parts above 2,097 problems; here they are smaller."""
    seeds = [evaluation([0, 1, 5]), evaluation([8, 2, 4, 1, 7])]
    whole = pooled_pass_at(seeds, 4)
    monkeypatch.setattr("rlplus.evaluation.statistics._INDICES_AT_ONCE", at_once)
    assert pooled_pass_at(seeds, 4) == whole


def test_interval_of_more_problems_than_the_bootstrap_holds_at_once() -> None:
    one = evaluation([0, 8] * 1500)
    estimate = one.pass_at(1)
    error = 1.96 * 0.5 / 3000**0.5
    assert estimate.low == pytest.approx(0.5 - error, abs=0.1 * error)
    assert estimate.high == pytest.approx(0.5 + error, abs=0.1 * error)


def test_interval_agrees_with_the_normal_one_for_many_problems() -> None:
    generator = random.Random(1)
    one = evaluation([generator.randint(0, 8) for _ in range(600)])
    values = one.values(1)
    error = 1.96 * values.std().item() / 600**0.5
    estimate = one.pass_at(1)
    assert estimate.low == pytest.approx(estimate.mean - error, abs=0.1 * error)
    assert estimate.high == pytest.approx(estimate.mean + error, abs=0.1 * error)


def draw(problems: int, difficulty: float, generator: torch.Generator, n: int = 16) -> tuple[int, ...]:
    """Right answers of problems whose success rates are uniform in difficulty +- 0.4."""
    rate = difficulty + 0.8 * (torch.rand(problems, generator=generator, dtype=torch.float64) - 0.5)
    return tuple(int(c) for c in torch.binomial(torch.full_like(rate, n), rate, generator=generator))


def test_coverage_over_problems() -> None:
    generator = torch.Generator().manual_seed(3)
    trials, inside = 200, 0
    truth = 0.5
    for _ in range(trials):
        estimate = evaluation(draw(60, 0.5, generator), n=16).pass_at(1)
        inside += estimate.low <= truth <= estimate.high
    assert 0.90 <= inside / trials <= 0.985  # 95% nominal; the standard error here is 1.5%


def test_pooled_interval_covers_the_spread_over_seeds() -> None:
    generator = torch.Generator().manual_seed(4)
    trials, pooled, problems_only = 100, 0, 0
    for _ in range(trials):
        levels = 0.4 + 0.2 * torch.rand(10, generator=generator, dtype=torch.float64)  # one a seed
        runs = [evaluation(draw(40, level, generator), n=16) for level in levels.tolist()]
        estimate = pooled_pass_at(runs, 1)
        pooled += estimate.low <= 0.5 <= estimate.high
        everything = evaluation([c for run in runs for c in run.correct], n=16).pass_at(1)
        problems_only += everything.low <= 0.5 <= everything.high
    assert pooled / trials >= 0.88
    assert problems_only < pooled


def test_pooled_mean_weighs_seeds_equally_and_one_seed_is_the_plain_interval() -> None:
    one, two = evaluation([8, 8, 8, 0]), evaluation([0, 0])
    assert pooled_pass_at([one, two], 1).mean == pytest.approx((0.75 + 0.0) / 2)
    assert pooled_pass_at([one], 1) == one.pass_at(1)
    with pytest.raises(ValueError, match="at least one"):
        pooled_pass_at([], 1)


def test_paired_difference_uses_the_pairing() -> None:
    generator = random.Random(2)
    base = [generator.randint(0, 7) for _ in range(50)]
    first, second = evaluation(base), evaluation([c + 1 for c in base])
    difference = paired_difference([first], [second], 1)
    assert difference.mean == pytest.approx(1 / 8)
    assert (difference.low, difference.high) == pytest.approx((1 / 8, 1 / 8))
    assert paired_difference([second], [first], 1).mean == pytest.approx(-1 / 8)


def test_paired_difference_refuses_other_problems() -> None:
    first, second = evaluation([1, 2]), evaluation([1, 2], problems=(0, 7), name="other")
    with pytest.raises(ValueError, match=r"same problems.*'other'"):
        paired_difference([first], [second], 1)
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference([first, first], [first], 1)


def test_seeds_below_counts_the_seeds_on_which_less_is_solved() -> None:
    base = [evaluation([8, 2, 0]), evaluation([1, 1, 1]), evaluation([0, 4, 4])]
    other = [evaluation([7, 0, 0]), evaluation([8, 0, 0]), evaluation([4, 0, 8])]
    assert [seeds_below(base, other, k) for k in (1, 8)] == [1, 2]
    for permuted in itertools.permutations([1, 2, 3, 4]):  # whose sums in floats differ
        assert seeds_below([evaluation([1, 2, 3, 4])], [evaluation(permuted)], 3) == 0
    with pytest.raises(ValueError, match="3 and 2"):
        seeds_below(base, other[:2], 1)


def test_save_and_load(tmp_path: Path) -> None:
    one = evaluation([0, 2, 8], name="gsm8k ☃")
    one.save(tmp_path / "one.json")
    assert Evaluation.load(tmp_path / "one.json") == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got Invalid JSON"),
        ("[]", "got .*object"),
        ('{"name": "x"}', "got problems: Field required, and 8 further problems"),
        ("[" * 100_000, "got Invalid JSON: recursion limit"),
    ],
)
def test_load_refuses_something_else(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=f"want an evaluation, as `rlplus eval` writes it, in .*x.json; {message}"):
        Evaluation.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": "abc"}, "got n: Input should be a valid array"),
        ({"n": [8, 8.5, 8]}, r"got n\.1: Input should be a valid integer"),
        ({"statuses": {"ok": "x"}}, r"got statuses\.ok: "),
        ({"more": 1}, "got more: "),
        ({"n": [8, 8]}, r"of one length above 0, got lengths \(3, 2, 3\)"),
        ({"correct": [0, 9, 8]}, r"want 0 <= correct <= n for each problem, got n \(8, 8, 8\), correct \(0, 9, 8\)"),
        ({"k": []}, r"want at least one k, and each at least 1, got \(\)"),
        ({"k": [0]}, r"want at least one k, and each at least 1, got \(0,\)"),
    ],
)
def test_load_refuses_counts_that_cannot_be(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "one.json"
    evaluation([0, 2, 8]).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        Evaluation.load(path)


@dataclass
class ScriptedEngine:
    """Answers prompt (p,) with p right ones among n; a right one is (1, eos), a wrong one (0, 0, 0, 0) truncated."""

    name: str = "scripted"
    calls: list[dict[str, object]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: Sequence[int], *, temperature: float, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.calls.append({"prompts": len(prompts), "n": list(n)} | options)
        right = Completion(tokens=[1, 9], logprob=[0.0] * 2, truncated=False)
        wrong = Completion(tokens=[0] * 4, logprob=[0.0] * 4, truncated=True)
        return [[right] * prompt[0] + [wrong] * (count - prompt[0]) for prompt, count in zip(prompts, n, strict=True)]

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def score(texts: Sequence[str], answers: Sequence[str]) -> list[Score]:
    return [
        Score(1.0, "ok") if text == answer else Score(0.5, "ok") if text == "1 9" else Score(0.0, "unparsed")
        for text, answer in zip(texts, answers, strict=True)
    ]


def spell(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


@pytest.mark.parametrize("at_once", [4096, 8])
def test_evaluate_counts(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("rlplus.evaluation.sample._COMPLETIONS_A_CALL", at_once)
    rights = [0, 3, 4, 1, 2]
    examples = [
        Example(index=10 + i, prompt=(right,), answer="1 9" if i != 4 else "2", demonstration=None)
        for i, right in enumerate(rights)
    ]
    engine = ScriptedEngine()
    settings = {"samples": 4, "k": [1, 4], "temperature": 0.6, "max_tokens": 4, "seed": 5}
    result = evaluate(engine, score, examples, spell, name="toy", **settings)  # type: ignore[arg-type]
    assert result.name == "toy"
    assert result.problems == (10, 11, 12, 13, 14)
    assert result.n == (4,) * 5
    assert result.correct == (0, 3, 4, 1, 0)  # the last one has reward 0.5: not right
    assert result.statuses == {"ok": 10, "unparsed": 10}
    assert result.mean_response_length == pytest.approx((10 * 2 + 10 * 4) / 20)
    assert result.truncated_share == pytest.approx(0.5)
    assert result.pass_at(1).mean == pytest.approx(8 / 20)
    assert result.pass_at(4).mean == pytest.approx(3 / 5)
    assert sum(int(str(call["prompts"])) for call in engine.calls) == 5
    assert [call["seed"] for call in engine.calls] == ([5] if at_once == 4096 else [5, 7, 9])
    assert all(call["temperature"] == 0.6 and call["max_tokens"] == 4 for call in engine.calls)


@pytest.mark.parametrize("at_once", [4096, 13, 8, 1])
def test_repeated_rows_are_one_problem_with_more_samples(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The prompt is asked once for all of its samples, so that they differ."""
    monkeypatch.setattr("rlplus.evaluation.sample._COMPLETIONS_A_CALL", at_once)
    examples = [
        Example(index=index, prompt=(right,), answer="1 9", demonstration=None, rows=rows)
        for index, right, rows in [(0, 7, 3), (1, 2, 1), (5, 0, 2)]
    ]
    engine = ScriptedEngine()
    options = {"samples": 4, "k": [1, 4], "temperature": 0.6, "max_tokens": 4, "seed": 5}
    result = evaluate(engine, score, examples, spell, **options)  # type: ignore[arg-type]
    assert (result.problems, result.n, result.correct) == ((0, 1, 5), (12, 4, 8), (7, 2, 0))
    calls = {4096: [[12, 4, 8]], 13: [[12], [4, 8]], 8: [[12], [4], [8]], 1: [[12], [4], [8]]}
    assert [call["n"] for call in engine.calls] == calls[at_once]
    assert len({call["seed"] for call in engine.calls}) == len(engine.calls)
    assert result.mean_response_length == pytest.approx((9 * 2 + 15 * 4) / 24)
    assert result.truncated_share == pytest.approx(15 / 24)
    assert result.pass_at(1).mean == pytest.approx((7 / 12 + 2 / 4 + 0) / 3)


BENCHMARKS = Path(os.environ.get("RLPLUS_DATA", Path(__file__).parent.parent / "data")) / "math_benchmarks.parquet"


def test_the_problems_of_a_configuration_are_distinct(tmp_path: Path) -> None:
    rows = [{"data_source": "aime", "prompt": f"p{i % 3}", "answer": i % 3} for i in range(24)]
    rows += [{"data_source": "math", "prompt": f"p{i}", "answer": i} for i in range(5)]
    (tmp_path / "benchmarks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "benchmarks.jsonl"), "benchmark": "data_source", "max_prompt_length": 8}
    problems = _problems(run_config(tmp_path, evaluation={"data": data}), byte_tokenizer())
    assert [(e.index, e.benchmark, e.rows) for e in problems] == [
        *((i, "aime", 8) for i in range(3)),
        *((24 + i, "math", 1) for i in range(5)),
    ]


@pytest.mark.skipif(not BENCHMARKS.is_file(), reason="no data/math_benchmarks.parquet (or in the folder $RLPLUS_DATA)")
def test_the_math_benchmarks_are_1560_problems() -> None:
    config = Path(__file__).parent.parent / "configs/qwen2.5-math-7b.yaml"
    overrides = [f"evaluation.data.path={BENCHMARKS}", "evaluation.data.max_prompt_length=8192"]
    problems = _problems(load_config(config, overrides), byte_tokenizer())
    assert Counter((e.benchmark, e.rows) for e in problems) == {
        ("aime", 8): 30, ("amc", 4): 83, ("math", 1): 500, ("olympiad_bench", 1): 675, ("minerva", 1): 272,
    }  # fmt: skip


def test_shares_of_several_ranks_join_to_the_whole() -> None:
    whole = evaluation(
        [3, 1, 4, 1, 5], mean_response_length=2.0, truncated_share=0.5, statuses={"ok": 30, "timeout": 10}
    )
    rows = {"problems": whole.problems, "correct": whole.correct, "n": whole.n}
    shares = [{key: values[rank::3] for key, values in rows.items()} for rank in range(3)]
    parts = [
        replace(whole, **shares[0], seed=0, mean_response_length=1.0, truncated_share=0.0, statuses={"ok": 16}),
        replace(
            whole, **shares[1], seed=5, mean_response_length=2.0, truncated_share=1.0, statuses={"ok": 14, "timeout": 2}
        ),
        replace(whole, **shares[2], seed=10, mean_response_length=4.0, truncated_share=0.5, statuses={"timeout": 8}),
    ]
    assert join(parts, seed=0) == whole
    assert join([whole], seed=0) == whole


def test_evaluate_refuses_before_it_generates() -> None:
    example = Example(index=0, prompt=(1,), answer="1", demonstration=None)
    engine = ScriptedEngine()
    settings = {"samples": 4, "temperature": 1.0, "max_tokens": 4, "seed": 0}
    cases = [([], [1], "at least one problem"), ([example], [5], "samples=4"), ([example], [], "every k")]
    for examples, k, message in cases:
        with pytest.raises(ValueError, match=message):
            evaluate(engine, score, examples, spell, k=k, **settings)  # type: ignore[arg-type]
    assert engine.calls == []


def test_a_sample_on_which_the_grader_failed_is_neither_right_nor_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Its status is counted; only where more samples are asked for than were graded does it count as wrong."""

    def failing(texts: Sequence[str], answers: Sequence[str]) -> list[Score]:
        scores = score(texts, answers)
        for i in (0, 6, 8, 9, 10, 11):  # of 3 problems with 4 samples each: a right one, a wrong one, all
            scores[i] = Score(nan, "timeout")
        return scores

    problems = [
        Example(index=i, prompt=(right,), answer="1 9", demonstration=None) for i, right in enumerate((3, 2, 4))
    ]
    options: dict[str, Any] = {"samples": 4, "k": (1, 4), "temperature": 1.0, "max_tokens": 4, "seed": 0}
    one = evaluate(ScriptedEngine(), failing, problems, spell, **options)
    assert one.n == (3, 3, 0)
    assert one.correct == (2, 2, 0)
    assert one.statuses["timeout"] == 6
    assert "6 of 12" in caplog.text
    assert one.values(1).tolist() == pytest.approx([2 / 3, 2 / 3, 0])
    assert one.values(4).tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="want k <= 4"):
        one.values(5)
    parts = [evaluate(ScriptedEngine(), failing, part, spell, **options) for part in (problems, [problems[0]] * 3)]
    both = join(parts, seed=0)
    lengths = [4.0 - 2 * sum(right for right in rights) / 12 for rights in ((3, 2, 4), (3, 3, 3))]
    assert both.mean_response_length == pytest.approx(sum(lengths) / 2)
