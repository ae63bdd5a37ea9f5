"""Files of evaluations; the counting of `evaluate` with a scripted engine; repeated rows."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from counted_evaluations import evaluation
from rich.console import Console
from torch import Tensor
from trainer_runs import run_config

from rlplus.train.config import load_config
from rlplus.train.data import Example, byte_tokenizer, load_problems, read_kept
from rlplus.train.evaluation.asked import model_identity
from rlplus.train.evaluation.partial_samples import KeptCalls
from rlplus.train.evaluation.results import Evaluation, join, not_graded
from rlplus.train.evaluation.sample import _calls, evaluate
from rlplus.train.evaluation.scorers import Scorers, reward_of
from rlplus.train.evaluation.table import result_table
from rlplus.train.reward import Score
from rlplus.train.rollout import Completion, Request, Sampling, respond


def test_save_and_load(tmp_path: Path) -> None:
    one = evaluation([0, 2, 8], name="gsm8k ☃")
    one.save(tmp_path / "one.json")
    assert Evaluation.load(tmp_path / "one.json") == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "got Invalid JSON"),
        ("[]", "got .*object"),
        ('{"name": "x"}', "got problems: Field required, and 9 further problems"),
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
    known = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
    path.write_text(json.dumps(known | changes))
    with pytest.raises(ValueError, match=message):
        Evaluation.load(path)


def test_a_flipped_bit_changes_no_count(tmp_path: Path) -> None:
    path, result = tmp_path / "one.json", evaluation([0, 2, 8])
    result.save(path)
    whole = path.read_bytes()
    digit = whole.index(b"2,", whole.index(b'"correct"'))
    path.write_bytes(whole[:digit] + b"3" + whole[digit + 1 :])
    with pytest.raises(ValueError, match=r"one\.json is damaged: its CRC-32 is wrong"):
        Evaluation.load(path)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"one\.json"):  # a broken seal is an unknown key
            Evaluation.load(path)
    older = {key: value for key, value in json.loads(whole).items() if key != "checksum"}
    path.write_text(json.dumps(older))  # 0.2.0 wrote none
    assert Evaluation.load(path) == result


@dataclass
class ScriptedEngine:
    """Answers prompt (p,) with p right ones among n; a right one is (1, eos), a wrong one (0, 0, 0, 0) truncated."""

    name: str = "scripted"
    calls: list[tuple[Sequence[Request], Sampling]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.calls.append((requests, sampling))
        right = Completion(tokens=[1, 9], logprob=[0.0] * 2, truncated=False)
        wrong = Completion(tokens=[0] * 4, logprob=[0.0] * 4, truncated=True)
        return [[right] * r.prompt[0] + [wrong] * (r.n - r.prompt[0]) for r in requests]

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def score(texts: Sequence[str], answers: Sequence[str], columns: object = None, **_: object) -> list[Score]:
    return [
        Score(1.0, "ok") if text == answer else Score(0.5, "ok") if text == "1 9" else Score(0.0, "unparsed")
        for text, answer in zip(texts, answers, strict=True)
    ]


def spell(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


@pytest.mark.parametrize("at_once", [4096, 8])
def test_evaluate_counts(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("rlplus.train.evaluation.sample._COMPLETIONS_A_CALL", at_once)
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
    assert result.mean_reward == pytest.approx((8 * 1 + 2 * 0.5) / 20)
    assert result.mean_response_length == pytest.approx((10 * 2 + 10 * 4) / 20)
    assert result.truncated_share == pytest.approx(0.5)
    assert result.pass_at(1).mean == pytest.approx(8 / 20)
    assert result.pass_at(4).mean == pytest.approx(3 / 5)
    asked = [request for requests, _ in engine.calls for request in requests]
    assert [(request.n, request.max_tokens) for request in asked] == [(4, 4)] * 5
    assert [sampling for _, sampling in engine.calls] == [
        Sampling(0.6, s) for s in ([5] if at_once == 4096 else [5, 7, 9])
    ]


def test_an_evaluation_tells_the_grader_what_was_cut_off_and_what_the_prompts_ask() -> None:
    """As training does. A response whose reward is the environment's is not graded."""
    asked: list[Any] = []

    def grade(texts: Sequence[str], answers: Sequence[str], columns: object, **rest: Any) -> list[Score]:
        asked.append((texts, rest))
        return [Score(0.0, "cut_off" if cut else "ok") for cut in rest["cut"]]

    def answered(*arguments: Any) -> list[list[Completion]]:
        groups = respond(*arguments)
        groups[1][1] = replace(groups[1][1], reward=1.0)
        return groups

    examples = [Example(index=i, prompt=(right, 7), answer="1 9", demonstration=None) for i, right in enumerate([1, 2])]
    options: dict[str, Any] = {"samples": 3, "k": [1], "temperature": 0.6, "max_tokens": 4, "seed": 5}
    result = evaluate(ScriptedEngine(), grade, examples, spell, **options, respond=answered)  # type: ignore[arg-type]
    right, wrong = "1 9", "0 0 0 0"
    prompts, cut = ["1 7"] * 3 + ["2 7"] * 2, [False, True, True, False, True]
    assert asked == [([right, wrong, wrong, right, wrong], {"prompts": prompts, "cut": cut})]
    assert result.statuses == {"ok": 3, "cut_off": 3}
    assert not_graded(result.statuses) == "3 cut_off"


@pytest.mark.parametrize("at_once", [4096, 13, 8, 1])
def test_repeated_rows_are_one_problem_with_more_samples(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The prompt is asked once for all of its samples, so that they differ."""
    monkeypatch.setattr("rlplus.train.evaluation.sample._COMPLETIONS_A_CALL", at_once)
    examples = [
        Example(index=index, prompt=(right,), answer="1 9", demonstration=None, rows=rows)
        for index, right, rows in [(0, 7, 3), (1, 2, 1), (5, 0, 2)]
    ]
    engine = ScriptedEngine()
    options = {"samples": 4, "k": [1, 4], "temperature": 0.6, "max_tokens": 4, "seed": 5}
    result = evaluate(engine, score, examples, spell, **options)  # type: ignore[arg-type]
    assert (result.problems, result.n, result.correct) == ((0, 1, 5), (12, 4, 8), (7, 2, 0))
    calls = {4096: [[12, 4, 8]], 13: [[12], [4, 8]], 8: [[12], [4], [8]], 1: [[12], [4], [8]]}
    assert [[request.n for request in requests] for requests, _ in engine.calls] == calls[at_once]
    assert len({sampling.seed for _, sampling in engine.calls}) == len(engine.calls)
    assert result.mean_response_length == pytest.approx((9 * 2 + 15 * 4) / 24)
    assert result.truncated_share == pytest.approx(15 / 24)
    assert result.pass_at(1).mean == pytest.approx((7 / 12 + 2 / 4 + 0) / 3)


BENCHMARKS = Path(os.environ.get("RLPLUS_DATA", Path(__file__).parents[2] / "data")) / "math_benchmarks.parquet"


def test_the_problems_of_a_configuration_are_distinct(tmp_path: Path) -> None:
    rows = [{"data_source": "aime", "prompt": f"p{i % 3}", "answer": i % 3} for i in range(24)]
    rows += [{"data_source": "math", "prompt": f"p{i}", "answer": i} for i in range(5)]
    (tmp_path / "benchmarks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "benchmarks.jsonl"), "benchmark": "data_source", "max_prompt_length": 8}
    problems = load_problems(run_config(tmp_path, evaluation={"data": data}).evaluation, byte_tokenizer())
    assert [(e.index, e.benchmark, e.rows) for e in problems] == [
        *((i, "aime", 8) for i in range(3)),
        *((24 + i, "math", 1) for i in range(5)),
    ]


@pytest.mark.skipif(not BENCHMARKS.is_file(), reason="no data/math_benchmarks.parquet (or in the folder $RLPLUS_DATA)")
def test_the_math_benchmarks_are_1560_problems() -> None:
    config = Path(__file__).parents[2] / "configs/qwen2.5-math-7b.yaml"
    data = {"path": str(BENCHMARKS), "answer": "reward_model.ground_truth", "benchmark": "data_source", "chat": False}
    overrides = [f"evaluation.data.{key}={value}" for key, value in (data | {"max_prompt_length": 8192}).items()]
    problems = load_problems(load_config(config, ["evaluation.benchmarks=[]", *overrides]).evaluation, byte_tokenizer())
    assert Counter((e.benchmark, e.rows) for e in problems) == {
        ("aime", 8): 30, ("amc", 4): 83, ("math", 1): 500, ("olympiad_bench", 1): 675, ("minerva", 1): 272,
    }  # fmt: skip


def test_a_killed_evaluation_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept samples are not drawn again, and the result is the same; another evaluation's are not read."""
    monkeypatch.setattr("rlplus.train.evaluation.sample._COMPLETIONS_A_CALL", 8)
    problems = [
        Example(index=i, prompt=(right,), answer="1 9", demonstration=None) for i, right in enumerate([0, 3, 4, 1, 2])
    ]
    options: dict[str, Any] = {"samples": 4, "k": (1, 4), "temperature": 0.6, "max_tokens": 4, "seed": 5, "name": "toy"}
    whole = evaluate(ScriptedEngine(), score, problems, spell, **options)
    kept = KeptCalls(tmp_path / "new/evaluation-toy", 0, byte_tokenizer(), {"model": "here@a"})

    class Killed(ScriptedEngine):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
            if len(self.calls) == 2:
                raise KeyboardInterrupt
            return super().generate(requests, sampling)

    def seeds(kept: KeptCalls) -> list[object]:
        engine = ScriptedEngine()
        assert evaluate(engine, score, problems, spell, kept=kept, **options) == whole
        return [sampling.seed for _, sampling in engine.calls]

    with pytest.raises(KeyboardInterrupt):
        evaluate(Killed(), score, problems, spell, kept=kept, **options)
    assert seeds(kept) == [9]
    assert seeds(kept) == []
    samples = read_kept(tmp_path / "new/evaluation-toy-0-000000.parquet")
    assert [(r.problem, r.reward, r.status, r.response) for r in samples][3:6] == [
        (0, 0.0, "unparsed", "0 0 0 0"), (1, 1.0, "ok", "1 9"), (1, 1.0, "ok", "1 9"),
    ]  # fmt: skip
    damaged = tmp_path / "new/evaluation-toy-0-000002.parquet"
    content = damaged.read_bytes()
    for damage in (content[:100], content[:4] + bytes(200) + content[204:]):  # no footer; a footer without its data
        damaged.write_bytes(damage)
        assert seeds(kept) == [7]
    damaged.write_bytes(content[:100])
    kept.remove_damaged()
    assert not damaged.exists()
    assert f"damaged samples in {tmp_path}/new are removed and drawn again: {damaged.name}" in caplog.text
    assert seeds(kept) == [7]
    assert kept.problems() == 5
    assert seeds(replace(kept, asked={"model": "elsewhere@a"})) == []
    caplog.clear()
    assert seeds(replace(kept, rank=1)) == [5, 7, 9]
    other = replace(kept, asked={"model": "here@b"})
    assert seeds(other) == [5, 7, 9]
    assert seeds(replace(other, asked=None)) == [5, 7, 9]
    assert seeds(replace(other, rank=2)) == [5, 7, 9]
    for name in (
        "2-0-000000.parquet",
        "2-0-000000.parquet.7.new",
        "0-000099.parquet.7.new",
    ):  # two of a benchmark toy-2
        (tmp_path / f"new/evaluation-toy-{name}").touch()
    other.remove_damaged()
    left = {path.name for path in (tmp_path / "new").iterdir()}
    assert left == {
        "evaluation-toy-2-0-000000.parquet", "evaluation-toy-2-0-000000.parquet.7.new",
        *(f"evaluation-toy-{rank}-00000{first}.parquet" for rank in range(3) for first in (0, 2, 4)),
    }  # fmt: skip


def test_samples_of_another_revision_on_the_hub_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--name"
    (cached / "refs").mkdir(parents=True)

    def identity_at(revision: str) -> str:
        (cached / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        (cached / "snapshots" / revision / "config.json").touch()
        (cached / "refs/main").write_text(revision)
        return model_identity(Path("owner/name"))

    first, second = "0" * 40, "1" * 40
    assert identity_at(first) != identity_at(second)
    assert identity_at(first) == identity_at(first)


def test_long_responses_are_drawn_in_smaller_calls() -> None:
    assert [stop - start for start, stop in _calls([64] * 128, 2048)] == [64, 64]
    assert [stop - start for start, stop in _calls([64] * 128, 8192)] == [16] * 8
    assert list(_calls([5000] * 2, 1 << 24)) == [(0, 1), (1, 2)]


def test_a_benchmark_has_its_grader_whatever_the_runs_reward(tmp_path: Path) -> None:
    data = {"path": "-", "benchmark": "source", "max_prompt_length": 8}
    evaluation = {"data": data, "benchmarks": ["amc", "gpqa_diamond"]}
    config = run_config(tmp_path, evaluation=evaluation | {"math_grader": "math_verify_strict"})
    for name, kind in {"amc": "math_verify_strict", "gpqa_diamond": "choice", "other": "exact_match"}.items():
        assert reward_of(config.reward, config.evaluation, name).description == kind
    texts = {"amc": [r"\boxed{3+4}", r"\boxed{7}"], "gpqa_diamond": ["ANSWER: C", "**(d)**"]}
    answers = {"amc": ["7", "7"], "gpqa_diamond": ["C", "C"]}
    with Scorers(config, config.evaluation) as scorers:
        for name in texts:
            assert [score.value for score in scorers.of(name)(texts[name], answers[name])] == [
                float(name != "amc"), float(name == "amc"),
            ]  # fmt: skip
        assert scorers.of("amc") is scorers.of("amc")
    with pytest.raises(ValueError, match="closed"):
        scorers.of("amc")(["x"], ["y"])


def test_the_table_says_how_a_result_came_about() -> None:
    one = evaluation([0, 2, 8], grader="oat", statuses={"ok": 17, "unparsed": 5, "bad_gold": 2}, seconds=61.2)
    console = Console(width=200, file=StringIO(), record=True)
    console.print(result_table({"amc": one}))
    row = next(line for line in console.export_text().splitlines() if "pass@1" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:5] == ["amc", "3", "8", "pass@1", "0.417"]
    assert cells[6:] == ["oat", "2 bad_gold, 5 unparsed", "25.0%", "4", "61 s"]


def test_shares_of_several_ranks_join_to_the_whole() -> None:
    whole = evaluation(
        [3, 1, 4, 1, 5],
        mean_response_length=2.0,
        truncated_share=0.5,
        statuses={"ok": 30, "timeout": 10},
        mean_reward=0.375,
    )
    rows = {"problems": whole.problems, "correct": whole.correct, "n": whole.n}
    shares = [{key: values[rank::3] for key, values in rows.items()} for rank in range(3)]
    fields = ("seed", "mean_response_length", "truncated_share", "statuses", "mean_reward")
    values = [
        (0, 1.0, 0.0, {"ok": 16}, 0.25),
        (5, 2.0, 1.0, {"ok": 14, "timeout": 2}, 0.5),
        (10, 4.0, 0.5, {"timeout": 8}, 0.375),
    ]
    parts: list[Any] = [
        replace(whole, **share, **dict(zip(fields, row, strict=True)))  # type: ignore[arg-type]
        for share, row in zip(shares, values, strict=True)
    ]
    assert join(parts, seed=0) == whole
    assert join([whole], seed=0) == whole


def test_a_sample_on_which_the_grader_failed_is_neither_right_nor_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Its status is counted; it counts as wrong only if k exceeds the number of graded samples."""

    def failing(texts: Sequence[str], answers: Sequence[str], columns: object, **_: object) -> list[Score]:
        scores = score(texts, answers)
        for i in (0, 6, 8, 9, 10, 11):  # a right one, a wrong one, all of the 4 samples of 3 problems
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
    assert one.mean_reward == pytest.approx(4 / 6)
    assert "6 of 12" in caplog.text
    assert one.values(1).tolist() == pytest.approx([2 / 3, 2 / 3, 0])
    assert one.values(4).tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="want k <= 4"):
        one.values(5)
    parts = [evaluate(ScriptedEngine(), failing, part, spell, **options) for part in (problems, [problems[0]] * 3)]
    both = join(parts, seed=0)
    lengths = [4.0 - 2 * sum(right for right in rights) / 12 for rights in ((3, 2, 4), (3, 3, 3))]
    assert both.mean_response_length == pytest.approx(sum(lengths) / 2)
