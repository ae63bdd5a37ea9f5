"""Messages about what went wrong: a failure without a traceback, hints at mistyped names, safe text, the log."""

import logging
from collections.abc import Iterable
from difflib import get_close_matches


class RunFailed(RuntimeError):
    """Training or the engine failed. The message says how: the command line shows it without a traceback."""


class SharedFailure(RunFailed):
    """Raised on all ranks in the same place, whichever of them failed: together they can still write a checkpoint."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` is probably meant to be, whatever its case; None where none is near."""
    names = {text.lower(): text for text in valid}
    close = get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else None


def printable(text: str) -> str:
    """The text as a terminal may have it: newlines and tabs stay, everything else that is not printable (commands to
    the terminal, control characters, lone surrogates) is escaped as in Python's repr."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Warnings of this package, errors of all others."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("rlplus").setLevel(logging.WARNING)
