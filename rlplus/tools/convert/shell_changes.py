"""Variables that a command of a shell script sets: by a plain assignment, or else perhaps each one that it names."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rlplus.tools.convert.shell_words import Command, Part, Word

NAME = r"[A-Za-z_]\w*"
ASSIGNED = re.compile(rf"({NAME})(\+?=)", re.A)
NAMED = re.compile(rf"({NAME})(?:\[.*)?(?:\+?=.*)?", re.A | re.DOTALL)
PLAIN_OPTION = re.compile(r"-[agrx]+")
DESCRIPTOR = re.compile(r"\{(\w+)\}[<>&]")
PASSING = {"command", "builtin", "env", "exec", "nohup"}  # run the words behind them
DECLARING = {"export", "local", "readonly", "declare", "typeset"}
SETTING = DECLARING | {"read", "unset", "mapfile", "readarray", "getopts", "let", "printf", "wait"}
RUNNING = {"source", ".", "eval", "trap", "enable", "fc", "bind", "alias", "complete", "compgen"}
HARMLESS = {
    ":", "[", "[[", "test", "true", "false", "echo", "cd", "pwd", "pushd", "popd", "dirs", "exit", "return", "logout",
    "break", "continue", "shift", "set", "shopt", "ulimit", "umask", "times", "type", "hash", "help", "history", "jobs",
    "kill", "bg", "fg", "disown", "suspend", "caller", "unalias", "compopt", "case", "mkdir", "rm", "cat", "tee",
    "sleep", "pip", "pip3", "python", "python3", "ray", "torchrun",
}  # fmt: skip
DEFAULTED = re.compile(rf"\$\{{({NAME})(?:\[[^]]*\])?:?=", re.A)
COUNTED = re.compile(
    rf"(?:\+\+|--)\s*({NAME})|(?<![\w$.])({NAME})(?:\[[^]]*\])?\s*(?:\+\+|--|[-+*/%|&^<>]*=(?!=))", re.A
)
DEFAULT = re.compile(rf'"?\$\{{({NAME})(:?)=([\w./:-]*)\}}"?', re.A)
NAMELESS = re.compile(r"\$\{?\w+\}?\s*(?:\+\+|--|[-+*/%|&^<>]*=(?!=))")
POSIX = re.compile(r"^[^#\n]*\b(?:set|shopt)\b[^\n#]*\bposix\b|\bPOSIXLY_CORRECT\b", re.M)
TYPED = re.compile(r"\blet\b[^\n]*|\b(?:declare|typeset|local|export|readonly)\b[^\n]*\s-[a-zA-Z]*i[^\n]*")
INDEX = re.compile(rf"(?:\$\[|\[\[|\w\[|\$\{{{NAME}:(?![-=?+]))[^\n]*", re.A)  # arithmetic, to the end of its line


class Change(NamedTuple):
    """An assignment with its sign and word, or another way to set a variable, without a word. No name: any variable."""

    name: str
    sign: str = "="
    word: Word | None = None
    fixes: bool = False  # the variable may get a type, or be read-only, from here on


def counted(text: str) -> Iterator[str]:
    """Variables that expansions and arithmetic set, wherever they are, each time; "" where bash reads all otherwise."""
    yield from ("" for _ in POSIX.finditer(text))
    yield from (found[1] for found in DEFAULTED.finditer(text))
    for region in [*(found[0] for found in INDEX.finditer(text)), *_parenthesized(text)]:
        yield from _set_in(region)


def evaluated(text: str, commands: Iterable[Command]) -> Iterator[str]:
    """Variables that are set by texts of variables which arithmetic names, and which it takes for arithmetic, too."""
    texts: dict[str, list[str]] = defaultdict(list)
    for command in commands:
        for change in (change for group in changes(command) for change in group):
            words = [change.word.raw.partition("=")[2]] if change.word else [word.raw for word in command.words[1:]]
            texts[change.name] += [re.sub(r"[\\'\"]", "", word) for word in words]
    indices = (found[0] for found in INDEX.finditer(text))
    regions = [index.partition("]]" if index.startswith("[[") else "]")[0] for index in indices]
    regions += [*_parenthesized(text), *TYPED.findall(text)]
    seen: set[str] = set()
    while regions:
        for name in {*re.findall(NAME, regions.pop(), re.A)} - seen:
            seen.add(name)
            regions += texts[name]
            for inner in texts[name]:
                yield from _set_in(inner)
                yield from ("" for _ in NAMELESS.finditer(inner))


def _set_in(arithmetic: str) -> Iterator[str]:
    yield from (found[1] or found[2] for found in COUNTED.finditer(arithmetic))


def _parenthesized(text: str) -> list[str]:
    """The insides of `((`."""
    regions = []
    at = 0
    while (start := text.find("((", at)) >= 0:
        depth = 2
        at = start + 2
        while depth and at < len(text):
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        regions.append(text[start:at])
    return regions


def changes(command: Command) -> list[list[Change]]:
    """Changes that a command may make, in groups: all words of a group are expanded before the first one is made."""
    words = [word for word in command.words if not DESCRIPTOR.match(word.raw)]
    groups = [[Change(found[1])] for word in command.words if (found := DESCRIPTOR.match(word.raw))]
    if all(_is_assignment(word) for word in words):
        return [*groups, *([_assignment(word)] for word in words)]
    while words and (_is_assignment(words[0]) or words[0].raw in PASSING):
        words.pop(0)
        while words and words[0].raw.startswith("-"):
            words.pop(0)
    name, whole = _literal(words[0]) if words else (":", True)
    rest = words[1:]
    options = [word.raw for word in rest if word.raw[0] in "-+"]
    if command.words[0].raw == ":":
        return [*groups, *([_defaulted(found, word)] for word in rest if (found := DEFAULT.fullmatch(word.raw)))]
    if (words and words[0].raw.startswith("((")) or name in HARMLESS:
        return groups
    if name == "printf" and rest and _literal(rest[0])[0][:1] not in ("", "-"):
        return groups
    if name == "wait" and not any(re.match("-.*p", _literal(word)[0]) for word in rest):
        return groups
    namerefs = name in DECLARING and any("n" in option for option in options)
    if not whole or name in RUNNING or namerefs:
        return [*groups, [Change("")]]
    plain = words == list(command.words) and all(map(PLAIN_OPTION.fullmatch, options))
    plain &= name in DECLARING and not (name == "local" and command.sure)
    group = []
    for word in rest:
        array = word.items is not None or not any("a" in option for option in options)
        if plain and array and ASSIGNED.match(word.raw):
            group.append(_assignment(word)._replace(fixes=name not in ("export", "local") or options != []))
        elif not (plain and (word.raw in options or (name == "export" and NAMED.fullmatch(word.raw)))):
            group += _named(word, name)
    return [*groups, group]


def _is_assignment(word: Word) -> bool:
    return bool(re.match(rf"{NAME}(\[.*\])?\+?=", word.raw, re.A | re.DOTALL))


def _assignment(word: Word) -> Change:
    indexed = word.items and any(item.raw.startswith("[") for item in word.items)
    if (found := ASSIGNED.match(word.raw)) and not indexed:
        return Change(found[1], found[2], word)
    return Change(re.match(NAME, word.raw, re.A)[0])  # type: ignore[index]


def _defaulted(found: re.Match[str], word: Word) -> Change:
    """The assignment `X=${X:-value}` in place of `: ${X:=value}`."""
    name, colon, value = found.groups()
    return Change(
        name, "=", Word((Part(f"{name}="), Part(f"{name}{colon}-{value}", "name", True)), word.line, word.raw)
    )


def _literal(word: Word) -> tuple[str, bool]:
    """The word's beginning that has no expansion, and whether that is the whole word."""
    texts: list[str] = []
    for part in word.parts:
        if part.kind != "text":
            return "".join(texts), False
        texts.append(part.text)
    return "".join(texts), True


def _named(word: Word, command: str) -> list[Change]:
    """The variables that a word names."""
    text, whole = _literal(word)
    if command not in SETTING:
        found = NAMED.fullmatch(text)
        return [Change(found[1])] if found else []
    if not whole and "=" not in text:
        return [Change("")]
    names = re.findall(NAME, text, re.A)
    ends = [name[i:] for name in names for i in range(len(name))] if text.startswith("-") else []  # -vX sets X
    return [Change(name) for name in (*names, *ends)]
