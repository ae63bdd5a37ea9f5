r"""Responses without an end or without a box: every grader, the scorer, a run, and the shipped configurations.

CUT is a response of a real model: 100 tokens, and no word about the answer 5 but the number of a paragraph.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from reward_graders import decode, example, reward_config
from trainer_runs import metrics, run_config

from rlplus.common.agree import initialize_distributed
from rlplus.common.lazy import import_function
from rlplus.train.config import RewardConfig, load_config
from rlplus.train.data import Example, Sample, read_kept
from rlplus.train.reward import Score, Scorer, grade_demonstrations, rules_of
from rlplus.train.reward.graders import make_grader
from rlplus.train.reward.graders.base import boxes
from rlplus.train.reward.graders.rules import Judge
from rlplus.train.reward.scorer import score
from rlplus.train.trainer import train

CUT = "4. Calculate the amount.\n\n5. Finalize the result.\n\nThe initial amount of money Betty"
PROGRAM = "```python\nprint(2 * int(input()))\n```"
TESTS = json.dumps({"cases": [["1", "2"]]})
# By grader: a response that it finds right, the answer, and an answer that it cannot read; None where it reads any.
RIGHT = {
    "exact_match": ("5", "5", None),
    "choice": ("ANSWER: C", "C", "17"),
    "code": (PROGRAM, TESTS, "{"),
    "math_verify": (CUT, "5", " "),
    "math_verify_box": (r"\boxed{5}", "5", " "),
    "math_verify_strict": (r"\boxed{5}", "5", " "),
    "oat": (r"\boxed{5}", "5", " "),
    "rules_graders:grade": ("anything", "5", None),
}
KINDS = [name for name in RIGHT if ":" not in name]


@pytest.fixture(autouse=True)
def own_grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules_graders.py").write_text("def grade(text, answer):\n    return -0.5 if text == 'bad' else 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def reward_of(name: str, **changes: Any) -> RewardConfig:
    return reward_config(**({"function": name} if ":" in name else {"kind": name}), **changes)


def judge_of(reward: RewardConfig) -> Judge:
    return make_grader(reward.model_dump() | {"columns": []}, import_function)


@pytest.mark.parametrize("name", RIGHT)
def test_a_response_that_was_cut_off_is_worth_0_unless_a_function_of_yours_grades_it(name: str) -> None:
    text, answer, _ = RIGHT[name]
    for cut_off in ("auto", "zero", "grade"):
        judge = judge_of(reward_of(name, cut_off=cut_off, memory_mb=1024))
        assert judge(text, answer, {})[:2] == (1.0, "ok")
        zero = cut_off == "zero" or (cut_off == "auto" and name in KINDS)
        assert judge(text, answer, {}, cut=True)[:2] == ((0.0, "cut_off") if zero else (1.0, "ok"))


@pytest.mark.parametrize("name", RIGHT)
def test_a_box_is_wanted_where_it_is_required_or_math_verify_reads_a_prompt_that_asks(name: str) -> None:
    text, answer, _ = RIGHT[name]
    boxed = "\\boxed" in text
    for box in ("auto", "required", "optional"):
        judge = judge_of(reward_of(name, box=box, memory_mb=1024))
        for asked in (False, True):
            wanted = box == "required" or (box == "auto" and asked and name == "math_verify")
            right = boxed or not wanted
            assert judge(text, answer, {}, asked=asked)[:2] == ((1.0, "ok") if right else (0.0, "no_box"))
            assert judge(f"{text} \\boxed{{{answer}}}", answer, {}, asked=asked)[0] == (name != "exact_match")


@pytest.mark.parametrize("text", [CUT, r"\boxed{5", r"\boxed{}", r"\boxed{ } 5", r"\boxed{5}</think> 5", "\\boxed 5"])
def test_what_is_no_box_with_an_answer(text: str) -> None:
    """One that is open or empty, and one in the thought, is none."""
    judge = judge_of(reward_of("math_verify", require_think="</think>" in text))
    assert judge(text, "5", {}, asked=True)[:2] == (0.0, "no_box")


def test_a_response_that_was_cut_off_in_its_thought_was_cut_off() -> None:
    judge = judge_of(reward_of("math_verify", require_think=True))
    assert judge("hm", "5", {}, cut=True)[1] == "cut_off"
    assert judge("hm", "5", {}, asked=True)[1] == "unparsed"
    assert judge("hm</think> 5", "5", {}, asked=True)[1] == "no_box"
    assert judge("hm</think> 5", "5", {})[:2] == (1.0, "ok")


@pytest.mark.parametrize("name", [name for name in KINDS if RIGHT[name][2] is not None])
def test_a_reference_that_cannot_be_read_is_said_whatever_the_response(name: str) -> None:
    """Else an evaluation whose responses are all cut off would not say it."""
    text, _, unreadable = RIGHT[name]
    judge = judge_of(reward_of(name, box="required", require_think=True, memory_mb=1024))
    for given_, cut in ((text, True), (text, False), ("</think>", False)):
        assert judge(given_, unreadable, {}, cut=cut)[:2] == (0.0, "bad_gold")


def test_a_sum_loses_the_parts_of_kinds_alone() -> None:
    """The part of a function of one's own stays; with zero nothing does."""
    function = {"math_verify": 1.0, "rules_graders:grade": 0.25}
    judge = judge_of(reward_config(function=function))
    assert judge(CUT, "5", {})[:2] == (1.25, "ok")
    assert judge(CUT, "5", {}, cut=True)[:2] == (0.25, "cut_off")
    assert judge(CUT, "5", {}, asked=True)[:2] == (0.25, "no_box")
    zero = judge_of(reward_config(function=function, cut_off="zero"))
    assert zero(CUT, "5", {}, cut=True)[:2] == (0.0, "cut_off")
    with Scorer(reward_config(function=function, workers=1)) as scorer:  # in a process that has imported nothing else
        scores = scorer([CUT, CUT, "bad"], ["5"] * 3, cut=[False, True, False])
    assert [(one.value, one.status) for one in scores] == [(1.25, "ok"), (0.25, "cut_off"), (-0.125, "unparsed")]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "5", " "]), max_size=24).map("".join))
def test_boxes_are_those_whose_braces_match(text: str) -> None:
    """By counting the depth behind each opening brace."""
    found = []
    for start in range(len(text)):
        for command in ("\\boxed", "\\fbox"):
            rest = text[start + len(command) :]
            opening = start + len(command) + len(rest) - len(rest.lstrip())
            if not text.startswith(command, start) or text[opening : opening + 1] != "{":
                continue
            depths = [
                text[opening : end + 1].count("{") - text[opening : end + 1].count("}") for end in range(len(text))
            ]
            ends = [end for end in range(opening, len(text)) if depths[end] == 0]
            if ends:
                found.append((start, ends[0] + 1, text[opening + 1 : ends[0]].strip()))
    assert list(boxes(text)) == found


def test_the_scorer_takes_prompts_and_ends() -> None:
    with Scorer(reward_of("math_verify", workers=1)) as scorer:
        texts, answers = [CUT, CUT, CUT, r"\boxed{5}"], ["5"] * 4
        plain, asks = "How much?", r"Put the answer within \boxed{}."
        scores = scorer(texts, answers, prompts=[plain, plain, asks, asks], cut=[False, True, False, False])
        assert [(one.value, one.status) for one in scores] == [(1, "ok"), (0, "cut_off"), (0, "no_box"), (1, "ok")]
        assert scorer.counts == {"ok": 2, "cut_off": 1, "no_box": 1}
        assert [one.detail for one in scores[1:3]] == [
            "the limit of tokens ended it",
            "there is no closed box with an answer in it",
        ]
        assert [one.status for one in scorer(texts, answers)] == ["ok"] * 4
        for short in ({"prompts": [plain]}, {"cut": [True]}, {"columns": [{}]}):
            with pytest.raises(ValueError, match=r"want columns, prompts and cut of 4 texts; got \[.*1.*\]"):
                scorer(texts, answers, **short)  # type: ignore[arg-type]


def test_demonstrations_are_graded_by_the_same_rule_and_are_not_cut_off() -> None:
    initialize_distributed()
    asks = tuple(map(ord, r"a \boxed{}?"))
    examples = [example(0, "It is 7"), example(1, r"It is \boxed{7}"), example(2, "It is 7")]
    examples[:2] = [Example(e.index, asks, "7", e.demonstration) for e in examples[:2]]
    with Scorer(reward_of("math_verify", workers=1)) as scorer:
        assert grade_demonstrations(examples, scorer, decode) == ["no_box", 1.0, 1.0]


def test_a_step_tells_the_grader_which_responses_were_cut_off_and_what_the_prompts_ask() -> None:
    """Demonstrations and responses that have their reward from elsewhere are not graded."""
    initialize_distributed()
    examples = [
        Example(i, tuple(map(ord, prompt)), "7", None, demonstration_reward=1.0) for i, prompt in enumerate("ab")
    ]
    samples = [
        Sample((0,), [*map(ord, text)], group, shown, cut, None, scored=scored)
        for text, group, shown, cut, scored in (
            ("1", 0, False, True, False),
            ("2", 0, True, True, False),
            ("3", 1, False, True, True),
            ("4", 1, False, False, False),
            ("5", 1, False, True, False),
        )
    ]
    asked: list[Any] = []

    def scorer(texts: Sequence[str], answers: Sequence[str], columns: Sequence[Any], **rest: Any) -> list[Score]:
        asked.append((texts, rest))
        return [Score(0.0, "ok") for _ in texts]

    score(samples, examples, scorer, decode)  # type: ignore[arg-type]
    assert asked == [(["1", "4", "5"], {"prompts": ["a", "b", "b"], "cut": [True, False, True]})]


# A run: a random model whose responses end at one byte of eight, or after 8 bytes.

ENDS = {"end_tokens": [*range(32)]}


def run_of(folder: Path, output: str, reward: dict[str, Any], **data: Any) -> Path:
    """The response prefix holds the answer 5 of all prompts."""
    rows = [{"prompt": f"{i}?", "answer": "5"} for i in range(8)]
    (folder / "fives.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"path": str(folder / "fives.jsonl"), "demonstration": None, "response_prefix": "<5>"} | data
    template = {"chat_template": "Put it into \\boxed{} {{ messages[0].content }}"} if data else {}
    return train(
        run_config(
            folder,
            output,
            model=ENDS | template,
            data=changes,
            reward={"pattern": None} | reward,
            algorithm={"preset": "grpo"},
            log={"samples_every": 1},
        )
    )


def test_a_run_counts_what_was_cut_off_and_gives_it_nothing(tmp_path: Path) -> None:
    """Any text is right, so that the mean reward is the share of the responses that ended."""
    any_text = {"kind": "exact_match", "pattern": "^<(5)>"}
    for name, changes in (("auto", {}), ("grade", {"cut_off": "grade"})):
        folder = run_of(tmp_path, name, any_text | changes)
        for row in metrics(folder):
            clipped = row["response_length/clipped"]
            assert row["reward/cut_off"] == (clipped if name == "auto" else 0)
            assert row["reward/internal"] == pytest.approx(1 - clipped if name == "auto" else 1)
            assert row["reward/no_box"] == row["reward/unparsed"] == 0
        kept = read_kept(folder / "samples/step-000001.parquet")
        verdicts = {(one.truncated, one.status, one.reward) for one in kept}
        assert verdicts == {(False, "ok", 1.0), (True, "cut_off", 0.0) if name == "auto" else (True, "ok", 1.0)}


def test_a_run_wants_the_box_that_the_chat_template_asks_for(tmp_path: Path) -> None:
    """Its prompts are text in the data."""
    for name, changes in (("auto", {}), ("optional", {"box": "optional"})):
        folder = run_of(tmp_path, name, {"kind": "math_verify"} | changes, chat=True, max_prompt_length=40)
        for row in metrics(folder):
            ended = 1 - row["response_length/clipped"]
            assert 0 < ended < 1
            assert row["reward/no_box"] == pytest.approx(ended if name == "auto" else 0)


CONFIGS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "lenient"),
    [
        ("configs/qwen2.5-math-7b.yaml", True),
        ("configs/qwen2.5-math-1.5b.yaml", True),
        ("configs/llama-3.1-8b-instruct.yaml", True),
        ("configs/deepseek-math-7b-instruct.yaml", True),
        ("configs/eval.yaml", True),
        ("configs/gsm8k-0.5b.yaml", False),
        ("configs/gsm8k-7b-24gb.yaml", False),
        ("experiments/demo.yaml", True),
        ("experiments/sft+grpo.yaml", True),
        ("experiments/words.yaml", True),
    ],
)
def test_what_reproduces_a_published_or_committed_result_keeps_its_rule(file: str, lenient: bool) -> None:
    reward = load_config(CONFIGS / file).reward
    (name,) = reward.names
    rules = rules_of(name, reward.cut_off, reward.box)
    assert rules == ((False, "optional") if lenient else (True, "asked"))
