"""A configuration file with comments, for people who go on from it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

WIDTH = 110


def commented_yaml(values: Mapping[str, Any], comments: Mapping[str, str], head: Iterable[str] = ()) -> str:
    """The sections as YAML; `load_config` reads the values back.

    comments: by dotted key, behind the value or, where they are long, above it. head: lines of comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in head]
    for name, value in values.items():
        if lines and isinstance(value, Mapping):
            lines.append("")
        lines += _lines(name, value, comments, name, "")
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, comments: Mapping[str, str], key: str, indent: str) -> Iterator[str]:
    section = isinstance(value, Mapping) and bool(value)
    line = f"{indent}{name}:" if section else f"{indent}{name}: {_scalar(value)}"
    comment = " ".join(comments.get(key, "").split())
    if comment and len(line) + len(comment) + 4 <= WIDTH:
        line = f"{line}  # {comment}"
    elif comment:
        yield from (f"{indent}# {part}" for part in wrap(comment, WIDTH - len(indent) - 2, break_on_hyphens=False))
    yield line
    if section:
        for inner, each in value.items():
            yield from _lines(inner, each, comments, f"{key}.{inner}", f"{indent}  ")


def _scalar(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def write_new(path: Path, text: str, key: str = "--out") -> None:
    """Write a new file; ValueError if it exists, or cannot be written. key: its name in messages."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"want {key} a new file; got {path}, which exists") from None
    except OSError as error:
        raise ValueError(f"want {key} a file to write; got {path}: {error.strerror}") from error
