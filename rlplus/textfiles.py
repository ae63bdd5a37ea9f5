"""Text files whose errors name them."""

from pathlib import Path


def read_text(path: Path) -> str:
    """The UTF-8 text; otherwise ValueError with the file and the line."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: want UTF-8 text; got {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8; an OSError names the file, which Python's error for a full disk does not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error
