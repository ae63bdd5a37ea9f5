"""Error messages: causes in one line, hints at mistyped names, how a command ended, safe text, the log."""

import logging
import re
import signal
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class RunFailed(RuntimeError):
    """Training or the engine failed. The command line shows the message without a traceback."""


class SharedFailure(RunFailed):
    """Raised on every rank when any rank fails, so that they can still write a checkpoint together."""


def hint(name: object, valid: Iterable[str], prefix: str = "", *, otherwise: str = "") -> str:
    """ "; nearest: x" with the valid name that `name` probably means, ignoring case; `otherwise` if none is near.

    prefix: put in front of the valid name, such as the section of a key.
    """
    names = {text.lower(): text for text in valid}
    close = get_close_matches(str(name).lower(), names, n=1)
    return f"; nearest: {prefix}{names[close[0]]}" if close else otherwise


def check_name(what: str, name: object, valid: Iterable[str]) -> None:
    """ValueError unless the name is valid; it lists the valid ones and names the nearest. what: may be empty."""
    names = tuple(valid)
    if name not in names:
        wanted = f"want {what} one of" if what else "want one of"
        raise ValueError(f"{wanted} {', '.join(names)}; got {name!r}{hint(name, names)}")


def install_command(extra: str) -> str:
    """The command that installs the optional packages of an extra, in a checkout or beside an installed wheel."""
    if (Path(__file__).resolve().parents[2] / "pyproject.toml").exists():
        return f'pip install -e ".[{extra}]"'
    return f'pip install "rlplus[{extra}]"'


def one_line(error: BaseException) -> str:
    """The error and the errors that caused it, in a line: type and message of each, "because of" between them.

    A compiler's excerpt of the source, which a caret ends, is left with its first and its last line.
    """
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    texts: list[str] = []
    for each in chain:
        message = _without_excerpt(str(each)) or "without a message"
        if not any(text.endswith(message) for text in texts):  # a compiler quotes the cause
            texts.append(f"{type(each).__name__}: {message}")
    return ", because of ".join(texts)


def _without_excerpt(message: str) -> str:
    """The message with spaces for newlines; beyond 1000 characters the middle is left out."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    if "^" in lines[5:]:  # place, "def" of the function, others, the line with the error, caret
        at = lines.index("^", 5)
        lines[2 : at - 1] = ["..."]
    text = " ".join(lines)
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"


def ending(status: int) -> str:
    """The end of a command with this status of `subprocess`: "exit status 1" or "signal SIGKILL"."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def printable(text: str) -> str:
    """The text made safe for a terminal: newlines and tabs stay, everything else that is not printable (terminal
    commands, control characters, lone surrogates) is escaped as in Python's repr."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


# USER:PASSWORD@HOST without a scheme. No mailto:, no digest of an image, no "pass:metric@8".
_BARE = re.compile(
    r"(?<![\w@./+-])(?!mailto:)[\w.+-]+:[^\s/:](?:[^\s/]*@|\S*@(?=[\w.-]+:\d))(?!sha\d+:)(?=\[|\w*[a-z]|\d+\.)"
)


def without_passwords(text: str) -> str:
    """The text with *** in the place of what stands before the @ of an address: a user's name and password.

    Without a scheme a `:` before the `@` tells such an address from an e-mail's, in which a password cannot be told
    from a name. A password with a slash in it is found with a scheme, or where a port follows the host.
    """
    return _BARE.sub("***@", re.sub(r"(:/+)(?:\S*:\S*|[^\s/]*)@", r"\1***@", text))


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(without_passwords(super().format(record)))


def log_to_stderr() -> None:
    """Log warnings of this package, and errors of all others."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    logging.getLogger("rlplus").setLevel(logging.WARNING)
