"""Error messages: failures without a traceback, hints at mistyped names, how a command ended, safe text, the log."""

import logging
import signal
from collections.abc import Iterable
from difflib import get_close_matches


class RunFailed(RuntimeError):
    """Training or the engine failed. The command line shows the message without a traceback."""


class SharedFailure(RunFailed):
    """Raised on all ranks in the same place, whichever failed, so that together they can still write a checkpoint."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` probably means, ignoring case; None if none is near."""
    names = {text.lower(): text for text in valid}
    close = get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else None


def ending(status: int) -> str:
    """How a command with this status of `subprocess` ended, "exit status 1" or "signal SIGKILL"."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def printable(text: str) -> str:
    """The text made safe for a terminal: newlines and tabs stay, everything else that is not printable (terminal
    commands, control characters, lone surrogates) is escaped as in Python's repr."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Log warnings of this package, and errors of all others."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("rlplus").setLevel(logging.WARNING)
