"""The reward workers: verdicts, and what happens when a grader hangs, dies, fills the memory or leaves children."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplus.config import RewardConfig
from rlplus.data import Example
from rlplus.reward import Score, Scorer, grade_demonstrations

GRADERS = r"""
import os, re, subprocess, sys, time

def grade(text, answer):
    command, _, argument = text.partition(" ")
    if command == "sleep":
        time.sleep(600)
    if command == "regex":  # holds the interpreter lock for ages
        return float(re.match(r"(a+)+$", "a" * 40 + "b") is None)
    if command == "exit":
        os._exit(3)
    if command == "hog":
        return float(len(bytearray(1 << 40)))
    if command == "list":
        block = []
        while True:
            block.append(bytearray(1 << 20))
    if command == "raise":
        raise KeyError(argument)
    if command == "nan":
        return float("nan")
    if command == "none":
        return None
    if command == "pid":
        return float(os.getpid())
    if command in ("children", "children-then-sleep"):
        pids = [subprocess.Popen(["sleep", "600"]).pid for _ in range(5)]
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            pids.append(pid)
        with open(argument, "w") as file:
            file.write(" ".join(map(str, pids)))
        if command == "children-then-sleep":
            time.sleep(600)
    print("a print of the grader")
    return float(text == answer)

not_callable = 3
"""


def reward_config(**changes: object) -> RewardConfig:
    fields: dict[str, object] = {
        "pattern": None,
        "require_think": False,
        "workers": 2,
        "timeout_s": 20.0,
        "memory_mb": 512,
    }
    return RewardConfig(**(fields | changes))


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scorer]:
    """Makes Scorers of the functions above, found through the current directory."""
    (tmp_path / "own_graders.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    return lambda **changes: Scorer(reward_config(function="own_graders:grade", **changes))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")


# Verdicts


def test_exact_match() -> None:
    cases = [("42", "42", 1.0), (" 42\n", "42", 1.0), ("42", " 42 ", 1.0), ("4 2", "42", 0.0), ("", "42", 0.0)]
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


def test_a_hanging_power_is_a_timeout_and_the_others_are_graded() -> None:
    texts = ["\\boxed{1}"] * 8
    texts[2] = "$10^{10^{10}}$"  # sympy tries to write it out
    with Scorer(reward_config(kind="math_verify", timeout_s=1.0)) as scorer:
        scores = scorer(texts, ["1"] * 8)
    assert [score.status for score in scores] == ["ok"] * 2 + ["timeout"] + ["ok"] * 5
    assert [score.value for score in scores] == [1.0] * 2 + [0.0] + [1.0] * 5


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


def test_short_items_are_quick() -> None:
    texts = [f"so it is \\boxed{{{i}}}" for i in range(256)]
    with Scorer(reward_config(kind="exact_match", pattern=r"\\boxed\{(.*?)\}")) as scorer:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            scores = scorer(texts, [str(i) for i in range(256)])
            times.append(time.perf_counter() - start)
    assert all(score.value == 1 for score in scores)
    assert min(times) < 0.03


# Graders that misbehave


def test_hang_costs_only_that_item(grader: Callable[..., Scorer], caplog: pytest.LogCaptureFixture) -> None:
    texts = ["a"] * 40
    texts[3], texts[17] = "sleep", "regex"
    with caplog.at_level(logging.WARNING), grader(timeout_s=0.5) as scorer:
        start = time.monotonic()
        scores = scorer(texts, ["a"] * 40)
        assert time.monotonic() - start < 10
        assert scorer.counts == {"ok": 38, "timeout": 2}
        assert scorer(["a"], ["a"]) == [Score(1.0, "ok")]
    assert [i for i, score in enumerate(scores) if score.status == "timeout"] == [3, 17]
    assert all(score == Score(1.0, "ok") for i, score in enumerate(scores) if i not in (3, 17))
    assert len([record for record in caplog.records if "timeout" in record.message]) == 1


@linux
@pytest.mark.parametrize("command", ["exit", "hog", "list", "raise", "nan"])
def test_crash_costs_only_that_item(
    grader: Callable[..., Scorer], caplog: pytest.LogCaptureFixture, command: str
) -> None:
    texts = ["a"] * 12
    texts[0] = texts[5] = texts[11] = command
    with caplog.at_level(logging.WARNING), grader(memory_mb=256) as scorer:
        scores = scorer(texts, ["a"] * 12)
        assert scorer.counts == {"ok": 9, "crash": 3}
    assert [i for i, score in enumerate(scores) if score.status == "crash"] == [0, 5, 11]
    assert all(score == Score(1.0, "ok") for i, score in enumerate(scores) if i not in (0, 5, 11))
    assert len([record for record in caplog.records if "crash" in record.message]) == 1


def test_none_of_a_function_means_unparsed(grader: Callable[..., Scorer]) -> None:
    with grader() as scorer:
        assert [score.status for score in scorer(["none", "a"], ["none", "a"])] == ["unparsed", "ok"]


@linux
@pytest.mark.parametrize("command", ["children", "children-then-sleep"])
def test_children_left_behind_are_killed_with_the_group(
    grader: Callable[..., Scorer], tmp_path: Path, command: str
) -> None:
    with grader(timeout_s=2.0, workers=1) as scorer:
        scores = scorer([f"{command} {tmp_path}/pids", "a"], ["a", "a"])
        assert [score.status for score in scores] == ["timeout" if "sleep" in command else "ok", "ok"]
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 10
        if command == "children-then-sleep":
            assert wait_until_gone(pids) == []
    assert wait_until_gone(pids) == []


def test_close_leaves_no_process(grader: Callable[..., Scorer]) -> None:
    scorer = grader(workers=3)
    pids = {int(score.value) for _ in range(5) for score in scorer(["pid"] * 50, [""] * 50)}
    assert len(pids) == 3
    scorer.close()
    assert wait_until_gone(list(pids)) == []
    scorer.close()
    with pytest.raises(ValueError, match="closed"):
        scorer(["a"], ["a"])


def test_a_worker_killed_between_calls_is_replaced_and_nobody_pays(grader: Callable[..., Scorer]) -> None:
    with grader(workers=1) as scorer:
        first = int(scorer(["pid"], [""])[0].value)
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone([first]) == []
        (second,) = scorer(["pid"], [""])
        assert second.status == "ok"
        assert int(second.value) != first


PARENT = """
import json, sys, threading, time
from rlplus.config import RewardConfig
from rlplus.reward import Scorer
scorer = Scorer(RewardConfig(**json.loads(sys.argv[1])))
pids = sorted({int(s.value) for _ in range(5) for s in scorer(["pid"] * 20, [""] * 20)})
print(json.dumps(pids), flush=True)
scorer(["regex", "sleep"], ["", ""])
"""


@linux
def test_workers_exit_when_the_parent_is_killed(grader: Callable[..., Scorer], tmp_path: Path) -> None:
    config = {"function": "own_graders:grade", "workers": 2, "timeout_s": 500, "memory_mb": 512}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PARENT, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        time.sleep(0.5)  # into the hanging call
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.kill()
    assert wait_until_gone(pids) == []


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
    with pytest.raises(ValueError, match="could not start: ended with exit status 5"):
        Scorer(reward_config(function="dying_graders:grade"))


def test_answers_must_match_texts() -> None:
    with Scorer(reward_config(kind="exact_match", workers=1)) as scorer, pytest.raises(ValueError, match="one answer"):
        scorer(["a", "b"], ["a"])


# Demonstrations


def test_grade_demonstrations_drops_and_counts_failures() -> None:
    eos = 0

    def decode(tokens: tuple[int, ...]) -> str:
        return "".join(chr(token) for token in tokens if token != eos)

    def encode(text: str) -> tuple[int, ...]:
        return (*map(ord, text), eos)

    examples = [
        Example(index=0, prompt=(1,), answer="7", demonstration=encode("a #### 7")),
        Example(index=1, prompt=(1,), answer="7", demonstration=encode("a #### 8")),
        Example(index=2, prompt=(1,), answer="7", demonstration=None),
        Example(index=3, prompt=(1,), answer="7", demonstration=encode("seven")),
    ]
    with Scorer(reward_config(kind="exact_match", pattern=r"#### (\S+)")) as scorer:
        graded, report = grade_demonstrations(examples, scorer, decode)
    assert graded[0] == examples[0]
    assert graded[2] == examples[2]
    assert [example.demonstration is None for example in graded] == [False, True, True, True]
    assert [example.answer for example in graded] == ["7"] * 4
    assert [e.index for e in graded] == [0, 1, 2, 3]
    assert (report.graded, report.kept, report.dropped) == (3, 1, {"ok": 1, "unparsed": 1})
    assert report.dropped_share == pytest.approx(2 / 3)
    assert report.summary() == ("demonstrations: 1 of 3 pass the run's own reward; dropped: 1 wrong, 1 unparsed")
