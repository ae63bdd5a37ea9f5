"""Values of a server's answer, read by name: one that is missing or of another type is an error with its place."""

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_METRIC = re.compile(r"^([\w:]+)(?:\{.*\})? +(\S+)", re.MULTILINE)
_KINDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number", bool: "true or false"}


class BadAnswer(OSError):
    """An answer in a form that no server of its kind gives."""


@dataclass(frozen=True)
class Field:
    """A value in an answer's JSON. request: `POST /generate`; path: its place in the answer, `choices[0].index`."""

    request: str
    value: Any
    path: str = ""

    def __str__(self) -> str:
        return f"{self.request}: {self.path}"

    def __getitem__(self, key: str | int) -> "Field":
        """A member of an object or list. BadAnswer without it."""
        if isinstance(key, str):
            inside: Any = self.a(dict)
            path = f"{self.path}.{key}".lstrip(".")
            found = key in inside
        else:
            inside = self.a(list)
            path = f"{self.path}[{key}]"
            found = key < len(inside)
        if not found:
            raise BadAnswer(f"{self.request}: want {path}; got none")
        return Field(self.request, inside[key], path)

    def get(self, key: str) -> "Field":
        """A member of an object, with the value None if there is none."""
        return self[key] if key in self.a(dict) else Field(self.request, None, f"{self.path}.{key}")

    def items(self) -> "list[Field]":
        """The members of a list."""
        return [self[place] for place in range(len(self.a(list)))]

    def column(self, key: str | int) -> list[Any]:
        """The value of this member for each member of a list: lists are long, so no Field is made for a good one."""
        try:
            return [each[key] for each in self.a(list)]
        except (LookupError, TypeError):
            return [each[key].value for each in self.items()]

    def a(self, kind: type[T]) -> T:
        """The value. BadAnswer unless it has this type; true and false are no whole numbers."""
        if type(self.value) is not kind:
            raise self.wrong(_KINDS[kind])
        found: T = self.value
        return found

    def wrong(self, want: str) -> BadAnswer:
        """The error of a value that is something else than `want`."""
        return BadAnswer(f"{self.request}: want {self.path or 'the answer'} to be {want}; got {self.value!r:.200}")


def parsed(text: bytes, request: str) -> Field:
    """The JSON of an answer; BadAnswer for another text."""
    try:
        return Field(request, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"{request}: want JSON; got {text.decode(errors='replace')[:200]!r}") from error


def metrics(text: bytes, names: Collection[str]) -> dict[str, float]:
    """The metrics of these names in an answer to GET /metrics, each summed over its labels; one may be missing."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text.decode(errors="replace")):
        if name not in names:
            continue
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadAnswer(f"GET /metrics: want {name} to be a finite number; got {value!r:.50}")
        found[name] = found.get(name, 0.0) + number
    return found
