"""The reward's verdicts, the order of its scores, and set-ups that fail."""

import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_graders import linux, reward_config

from rlplus.train.reward import Scorer
from rlplus.train.reward.worker_handle import Worker

# Verdicts


def test_exact_match() -> None:
    cases = [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42", " 42 ", 1.0), ("4 2", "42", 0.0), ("", "42", 0.0)]
    cases += [("1,234", "1234", 1.0), ("-12345.5", "-12,345.5", 1.0), ("1,2", "12", 0.0), ("1,234,5", "12345", 0.0)]
    with Scorer(reward_config(kind="exact_match")) as scorer:
        scores = scorer([text for text, _, _ in cases], [answer for _, answer, _ in cases])
    assert [(score.value, score.status) for score in scores] == [(value, "ok") for *_, value in cases]


def test_exact_match_takes_the_last_match_of_the_pattern() -> None:
    texts = ["so #### 5\nno: #### 7", "#### 7\nno: #### 5", "seven", "#### 7"]
    with Scorer(reward_config(kind="exact_match", pattern=r"#### *(\S+)")) as scorer:
        scores = scorer(texts, ["7"] * 4)
        assert scorer.counts == {"ok": 3, "unparsed": 1}
    assert [(s.value, s.status) for s in scores] == [(1.0, "ok"), (0.0, "ok"), (0.0, "unparsed"), (1.0, "ok")]


def test_require_think_reads_only_what_follows() -> None:
    texts = ["<think>7</think>7", "7", "<think>7", "<think>7</think>8", "a</think>8</think> 7"]
    with Scorer(reward_config(kind="exact_match", require_think=True)) as scorer:
        scores = scorer(texts, ["7"] * 5)
    assert [s.value for s in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [s.status for s in scores] == ["ok", "unparsed", "unparsed", "ok", "ok"]


MATH = [  # text after </think>, answer, right or not
    ("She sold 48+24 = 72 clips. The answer is \\boxed{72}.", "72", True),
    ("The answer is \\boxed{73}.", "72", False),
    ("so \\boxed{1,000}", "1000", True),
    ("so \\boxed{\\$18}", "18", True),
    ("so \\boxed{10.0}", "10", True),
    ("so $\\boxed{\\frac{2}{4}}$", "\\frac{1}{2}", True),
    ("so \\boxed{0.5}", "\\frac{1}{2}", True),
    ("so \\boxed{\\dfrac12}", "\\boxed{\\frac{1}{2}}", True),
    ("so \\boxed{\\frac{1}{3}}", "\\frac{1}{2}", False),
    ("so \\boxed{2\\sqrt{3}}", "\\sqrt{12}", True),
    ("so \\boxed{(x+1)^2}", "x^2+2x+1", True),
    ("so \\boxed{x^2+1}", "x^2+2x+1", False),
    ("so \\boxed{\\{1, 2\\}}", "\\{2, 1\\}", True),
    ("so \\boxed{(1, 2)}", "(2, 1)", False),
    ("so \\boxed{[0, 1)}", "[0, 1)", True),
    ("so \\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
    ("so \\boxed{A}", "A", True),
    ("so \\boxed{\\text{A}}", "A", True),
    ("so \\boxed{B}", "A", False),
    ("\\boxed{1} or maybe \\boxed{2}", "2", False),  # several answers are read as the set of them
    ("\\boxed{1} or maybe \\boxed{2}", "\\{1, 2\\}", True),
    ("so \\boxed{90^\\circ}", "90", True),
    ("so \\boxed{50\\%}", "50\\%", True),
]


def test_math_verify_table_and_the_same_verdict_as_on_the_main_thread() -> None:
    math_verify = pytest.importorskip("math_verify")
    direct = [
        math_verify.verify(
            math_verify.parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"), math_verify.parse(text)
        )
        for text, answer, _ in MATH
    ]
    with Scorer(reward_config(kind="math_verify", require_think=True)) as scorer:
        scores = scorer([f"<think>\\boxed{{0}}</think>{text}" for text, *_ in MATH], [answer for _, answer, _ in MATH])
    assert {score.status for score in scores} == {"ok"}
    assert [bool(score.value) for score in scores] == direct
    assert [(text, bool(score.value)) for (text, *_), score in zip(MATH, scores, strict=True)] == [
        (text, right) for text, _, right in MATH
    ]


def test_math_verify_counts_what_it_cannot_read(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["<think>\\boxed{2}", "<think></think>no idea", "<think></think>\\boxed{2}", "<think></think>\\boxed{2}"]
    with (
        caplog.at_level(logging.WARNING),
        Scorer(reward_config(kind="math_verify", require_think=True, workers=1)) as scorer,
    ):
        scores = scorer(texts, ["2", "2", " ", "2"])
        assert scorer.counts == {"unparsed": 2, "bad_gold": 1, "ok": 1}
    assert [score.status for score in scores] == ["unparsed", "unparsed", "bad_gold", "ok"]
    assert [score.value for score in scores] == [0.0, 0.0, 0.0, 1.0]
    assert "bad_gold" in caplog.text


def test_a_power_that_nobody_can_write_out_is_wrong_and_the_others_are_graded() -> None:
    """Not a timeout, which would leave the sample out of its group."""
    texts = ["\\boxed{1}"] * 8
    texts[2] = "$10^{10^{10}}$"
    with Scorer(reward_config(kind="math_verify", timeout_s=10.0)) as scorer:
        scores = scorer(texts, ["1"] * 8)
    assert [score.status for score in scores] == ["ok"] * 2 + ["unparsed"] + ["ok"] * 5
    assert [score.value for score in scores] == [1.0] * 2 + [0.0] + [1.0] * 5


# Several rewards, and columns of the data

OWN = """
def starts(text, answer):
    return float(text.startswith("<")) if text else None

def level(text, answer, difficulty, *, topic="none"):
    return difficulty * (topic == "sums") * (text == answer)

def same(text, answer):
    return text == answer

def everything(text, answer, **columns):
    return float(sorted(columns) == ["difficulty", "topic"])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_rewards_add_up_with_their_weights(own: None) -> None:
    weights = {"exact_match": 1.0, "own_rewards:starts": 0.25}
    config = reward_config(function=weights, pattern=r"(\d+)", workers=1)
    with Scorer(config) as scorer:
        scores = scorer(["<7", "7", "<8", "<x", ""], ["7"] * 5)
    assert [score.value for score in scores] == [1.25, 1.0, 0.25, 0.25, 0.0]
    assert [score.status for score in scores] == ["ok", "ok", "ok", "unparsed", "unparsed"]
    assert config.description == "1 exact_match + 0.25 own_rewards:starts"
    with Scorer(reward_config(function=["exact_match", "own_rewards:starts"], workers=1)) as scorer:
        assert [score.value for score in scorer(["<7", "7"], ["<7", "7"])] == [2.0, 1.0]
    parts = {"exact_match": 0.6, "own_rewards:starts": 0.3, "own_rewards:same": 0.1}
    with Scorer(reward_config(function=parts, workers=1)) as scorer:
        assert scorer(["<7"], ["<7"])[0].value == 1, "want 1 or more, as a right response has"


def test_a_function_may_be_named_with_its_file(own: None, tmp_path: Path) -> None:
    """In any folder, with what it imports from there."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/length.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "parts/by-length.py").write_text(
        "from length import length\n\ndef grade(text, answer):\n    return length(text)\n"
    )
    weights = {"parts/by-length.py:grade": 1.0, f"{tmp_path}/own_rewards.py:starts": 10}
    config = reward_config(function=weights, workers=1)
    with Scorer(config) as scorer:
        assert [score.value for score in scorer(["abc", "<7"], ["7", "7"])] == [3.0, 12.0]
    wrong = {"absent.py:grade": "there is no file", "own_rewards.py:absent": "no attribute 'absent'"}
    for function, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            Scorer(reward_config(function=function))


def test_columns_are_arguments_by_name(own: None) -> None:
    rows = [{"difficulty": 2, "topic": "sums"}, {"difficulty": 3, "topic": "sums"}, {"difficulty": 3, "topic": "x"}]
    with Scorer(reward_config(function="own_rewards:level", workers=1), ["difficulty", "topic"]) as scorer:
        assert [score.value for score in scorer(["a", "a", "a"], ["a"] * 3, rows)] == [2, 3, 0]
    with Scorer(reward_config(function="own_rewards:level", workers=1), ["difficulty"]) as scorer:
        assert [score.value for score in scorer(["a"], ["a"], rows[:1])] == [0]
    with Scorer(reward_config(function="own_rewards:everything", workers=1), ["difficulty", "topic"]) as scorer:
        assert [score.value for score in scorer(["a"], ["a"], rows[:1])] == [1]
    with pytest.raises(ValueError, match=r"takes 'difficulty': want a column of that name in data.columns; got topic"):
        Scorer(reward_config(function="own_rewards:level", workers=1), ["topic"])


@pytest.mark.parametrize("function", ["exact_match", "a:b:c", [], {}, ["x"], {"a:b": "1"}, {"a:b": float("nan")}, 3])
def test_what_names_no_rewards_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r'want "module:name" or "file\.py:name", a list of these and of kinds, or a'):
        reward_config(function=function)


# Order, amount, awkward text


def test_order_is_kept_for_many_items_and_awkward_text() -> None:
    texts = [f"{i} ünï ☃ \ud800 \x00 \r\n </think> \u2028" for i in range(3000)]
    answers = [text if i % 3 else "other" for i, text in enumerate(texts)]
    with Scorer(reward_config(kind="exact_match", workers=3)) as scorer:
        scores = scorer(texts, answers)
        assert scorer([], []) == []
        assert scorer.counts.total() == 3000
    assert [score.value for score in scores] == [float(i % 3 > 0) for i in range(3000)]


def test_long_texts() -> None:
    texts = [str(i) * (1 << 20) for i in range(8)]
    with Scorer(reward_config(kind="exact_match")) as scorer:
        assert [score.value for score in scorer(texts, texts)] == [1.0] * 8


@linux
def test_a_text_beyond_the_memory_limit_costs_only_itself() -> None:
    texts = ["x", "y" * (1 << 27), "z", "z"]
    with Scorer(reward_config(kind="exact_match", memory_mb=256)) as scorer:
        scores = scorer(texts, ["x", "y", "z", "z"])
    assert [score.status for score in scores] == ["ok", "crash", "ok", "ok"]


def test_short_items_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message costs more than a short item. The last ones are small, so that both workers end at once."""
    sizes: list[int] = []
    grade = Worker.grade

    def counted(worker: Worker, items: deque[int], *rest: Any) -> None:
        sizes.append(len(items))
        grade(worker, items, *rest)

    monkeypatch.setattr(Worker, "grade", counted)
    texts = [f"so it is \\boxed{{{i}}}" for i in range(256)]
    with Scorer(reward_config(kind="exact_match", pattern=r"\\boxed\{(.*?)\}")) as scorer:
        assert {score.value for score in scorer(texts, [str(i) for i in range(256)])} == {1.0}
    assert sum(sizes) == 256
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:4] == [32] * 4
    assert sizes[-4:] == [1] * 4
    assert len(sizes) <= 4 + 2 * 8


@linux
def test_a_worker_may_end_by_itself_as_it_is_told_to(
    grader: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = grader(workers=1)
    (worker,) = scorer._workers
    os.kill(worker.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_ended", lambda: False)  # still running, a moment ago
        worker.end()
    scorer.close()
    assert worker.process.returncode == -signal.SIGKILL


# Set-up that fails


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:grade", "no_such_module"),
        ("own_graders:no_such_function", "no_such_function"),
        ("own_graders:not_callable", "callable"),
    ],
)
def test_a_broken_function_is_an_error_at_construction(
    grader: Callable[..., Scorer], function: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Scorer(reward_config(function=function))


@linux
def test_too_little_memory_is_an_error_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hungry_graders.py").write_text("block = bytearray(1 << 40)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="MemoryError"):
        Scorer(reward_config(function="hungry_graders:grade"))


@linux
def test_a_function_that_ends_the_process_at_import_is_an_error_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_graders.py").write_text("import os\nos._exit(5)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"could not start: .*exit status 5"):
        Scorer(reward_config(function="dying_graders:grade"))


def test_answers_must_match_texts() -> None:
    with Scorer(reward_config(kind="exact_match", workers=1)) as scorer, pytest.raises(ValueError, match="one answer"):
        scorer(["a", "b"], ["a"])
