"""verl's overrides, read from a shell script or a command line, which is never executed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlplus.convert.draft import Script

COMMAND = re.compile(r"\bverl\.trainer\.main_\w+|\bmain_(ppo|dapo)(\.py)?\b|\brecipe\.\w+\.main_\w+")
ASSIGNED = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
ARRAY = re.compile(r'^"?\$\{(\w+)\[@\]\}"?$')
QUOTED_DEFAULT = re.compile(r"""\$\{(\w+):?-(["'])([^"'{}]*)\2\}""")
SUM = re.compile(r"\$\(\(([\w\s+*/()$-]+)\)\)")
UNKNOWN = "\0"  # stands for what only running the script would tell


def read_shell(text: str, path: Path) -> Script:
    """The overrides of the only command of verl; ValueError for another number of them."""
    script = Script()
    names: dict[str, Any] = {"HOME": "~"}
    found = 0
    for number, line in _commands(text):
        if assigned := ASSIGNED.fullmatch(line):
            _assign(assigned[1], assigned[2].strip(), names)
        elif COMMAND.search(line):
            found += 1
            _read_command(number, line, names, script)
    if found != 1:
        raise ValueError(f"{path}: want one command of verl.trainer.main_ppo; got {found or 'none'}")
    return script


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations and open parentheses of arrays, by the number of the first."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        whole = _bare(line)
        while whole.endswith("\\") or re.fullmatch(r"\s*\w+=\([^)]*", whole, re.DOTALL):
            _, more = next(lines, (0, None))
            if more is None:
                break
            whole = f"{whole.removesuffix(chr(92))}\n{_bare(more)}"
        yield number, whole


def _bare(line: str) -> str:
    """The line without a comment at its start or behind a space."""
    return re.sub(r"(^|\s)#.*$", "", line).rstrip()


def _assign(name: str, value: str, names: dict[str, Any]) -> None:
    if value.startswith("("):
        names[name] = list(_words(value.strip("()"), names))
    else:
        words = list(_words(value, names))
        names[name] = words[0] if len(words) == 1 else "" if not words else UNKNOWN


def _words(text: str, names: dict[str, Any]) -> Iterator[str]:
    """The words of a command, with variables that are known in place."""
    text = SUM.sub(lambda found: _sum(found[1], names), QUOTED_DEFAULT.sub(r"${\1:-\3}", text))
    try:
        words = shlex.split(text.replace("\n", " "), posix=False)
    except ValueError as error:
        raise ValueError(f"want a shell command; got {text[:80]!r} ({error})") from error
    for word in words:
        if (array := ARRAY.match(word)) and isinstance(names.get(array[1]), list):
            yield from names[array[1]]
        else:
            yield _unquoted(word, names)


def _unquoted(word: str, names: dict[str, Any]) -> str:
    """A word without its quotes; variables stay as they are in single ones."""
    parts = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|[^'\"]+|['\"]", word)
    texts = []
    for part in parts:
        if part[0] == "'" and len(part) > 1:
            texts.append(part[1:-1])
        elif part[0] == '"' and len(part) > 1:
            texts.append(_expanded(part[1:-1], names).replace('\\"', '"'))
        else:
            texts.append(_expanded(part, names).replace("\\", ""))
    return "".join(texts)


def _expanded(text: str, names: dict[str, Any]) -> str:
    def variable(found: re.Match[str]) -> str:
        value = names.get(found[1] or found[3])
        if value is None:
            return UNKNOWN if found[2] is None else _unquoted(found[2], names)
        return value if isinstance(value, str) else UNKNOWN

    return UNKNOWN if "$(" in text or "`" in text else VARIABLE.sub(variable, text)


def _sum(terms: str, names: dict[str, Any]) -> str:
    """The value of a sum of products and quotients of integers and variables."""
    terms = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: str(names.get(name[1], UNKNOWN)), terms)
    if not re.fullmatch(r"[\d\s+*/-]+", terms):
        return UNKNOWN
    total = 0
    for sign, product in re.findall(r"([+-]?)\s*([\d\s*/]+)", terms):
        value, *rest = re.findall(r"([*/]?)\s*(\d+)", product)
        result = int(value[1])
        for operation, factor in rest:
            if operation == "/" and int(factor) == 0:
                return UNKNOWN
            result = result * int(factor) if operation == "*" else result // int(factor)
        total += -result if sign == "-" else result
    return str(total)


def _read_command(number: int, line: str, names: dict[str, Any], script: Script) -> None:
    lines = line.split("\n")
    for word in _words(line, names):
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if not equals or not re.fullmatch(r"~?[a-z]\w*(\.\w+)+", key):
            continue
        place = next((number + i for i, part in enumerate(lines) if f"{key}=" in part), number)
        if UNKNOWN in value:
            script.unread[key] = place
            continue
        script.settings[key] = _typed(value)
        script.places[key] = place


def _typed(value: str) -> Any:
    """A value as Hydra reads it."""
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
