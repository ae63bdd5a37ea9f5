"""Text files whose errors name them, and names of files."""

import re
import zlib
from pathlib import Path


def read_text(path: Path) -> str:
    """The UTF-8 text; otherwise ValueError with the file and the line."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: want UTF-8 text; got {error}") from error


def file_name(name: str, longest: int | None = None) -> str:
    """A file name for the name. One with other characters, only of dots or beyond `longest` gets a checksum."""
    plain = re.sub(r"[^\w.,+=-]+", "-", name)[:longest]
    if plain == name and plain.strip("."):
        return plain
    return f"{plain.strip('.')}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
