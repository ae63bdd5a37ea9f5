"""Text on its way to a terminal: data and names stay text, whatever they hold."""

import logging
import sys
import unicodedata

import pytest
from rich.table import Table

from rlplus.common.errors import hint, log_to_stderr, printable
from rlplus.common.terminal import Terminal, counter

HOSTILE = "[red]a[/nothing] :smile: \x1b]0;title\x07\x1b[2J\x9b31m\r\u202e\ud800"
SHOWN = r"[red]a[/nothing] :smile: \x1b]0;title\x07\x1b[2J\x9b31m\r\u202e\ud800"


def test_only_what_a_terminal_shows_is_left() -> None:
    """One of a category that is shown stays as it is, any other becomes visible ASCII."""
    for point in (*range(0x10000), 0x1F600, 0xE0001, sys.maxunicode):
        sign = chr(point)
        kind = unicodedata.category(sign)
        if sign in " \n\t" or kind[0] in "LMNPS":
            assert printable(sign) == sign
        else:
            assert printable(sign).isascii()
            assert printable(sign).isprintable()
            assert printable(sign).encode().decode("unicode_escape") == sign
    assert printable(HOSTILE) == SHOWN


def test_strings_and_cells_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE)
    table.add_row(HOSTILE + "x" * 200)
    Terminal().print(HOSTILE, "y" * 200, table, sep="\n")
    Terminal(stderr=True).print(HOSTILE)
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [SHOWN, "y" * 200]  # neither wrapped nor cut
    assert out.count(SHOWN) == 3
    assert SHOWN + "x" * 200 in out
    assert not set("\x1b\x07\x9b\r\u202e") & set(out + err)
    assert err == SHOWN + "\n"


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with counter("problems:") as show:
        show(0, 7)
        show(7, 7)
    assert capsys.readouterr().err == "problems: 0 of 7\nproblems: 7 of 7\n"


def test_the_log_has_our_warnings_and_others_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        log_to_stderr()
        logging.getLogger("rlplus.x").warning("%s", HOSTILE)
        logging.getLogger("others.x").warning("nothing to act on")
        logging.getLogger("others.x").error("broken http://me:secret@host/x")
    finally:
        root.setLevel(level)
    assert capsys.readouterr().err == f"WARNING rlplus.x: {SHOWN}\nERROR others.x: broken http://***@host/x\n"


@pytest.mark.parametrize(
    ("name", "near"),
    [("RLPLUS", "rlplus"), ("rlpuls", "rlplus"), ("Dr-Grpo", "dr-grpo"), ("xyz", None), ("", None), ("ppo2000", None)],
)
def test_hints_ignore_case_and_are_silent_when_nothing_is_near(name: str, near: str | None) -> None:
    assert hint(name, ["rlplus", "dr-grpo", "sft"], "x.") == (f"; nearest: x.{near}" if near else "")
    assert hint(name, ["rlplus", "dr-grpo", "sft"], otherwise="; none") == (f"; nearest: {near}" if near else "; none")
