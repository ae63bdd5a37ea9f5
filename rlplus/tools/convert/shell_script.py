"""verl's overrides, read from a shell script, which is never executed.

A variable is known where plain assignments, each executed once and in its place, are all that sets it. Any other
command makes unknown what it names, but for a few commands that are known to set nothing.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rlplus.common.yaml_text import parse_yaml
from rlplus.tools.convert.draft import Script
from rlplus.tools.convert.names import Names, Unknown
from rlplus.tools.convert.shell_words import Command, Part, Scanner, Word
from rlplus.tools.convert.verl_overrides import OPTIONS

PROGRAM = re.compile(r"(?:.*[./])?(?:async_)?main_(?:ppo|dapo)(?:_\w+)?(?:\.py)?")
OTHERS = re.compile(r"\b(?:verl\.[\w.]*|recipe\.[\w.]*|openrlhf\.cli\.)\w+")
OWN = re.compile(  # variables that bash itself sets, most of them without an assignment in the script
    r"|0|_|BASH\w*|COLUMNS|COMP_\w*|COPROC|DIRSTACK|EPOCH\w*|EUID|FUNCNAME|GROUPS|HISTCMD|HOST\w+|IFS|LINENO|LINES|MACHTYPE"
    r"|MAPFILE|OLDPWD|OPT\w+|OSTYPE|PATH|PIPESTATUS|PPID|PS\d|PWD|S?RANDOM|REPLY|SECONDS|SHELL|SHELLOPTS|SHLVL|TERM|UID"
)
DECLARING = {"export", "local", "readonly", "declare", "typeset"}
SETTING = DECLARING | {"read", "unset", "mapfile", "readarray", "getopts", "let", "printf", "wait"}
UNSEEN = {  # run a text that is not seen, or make names stand for one
    "source", ".", "eval", "trap", "enable", "fc", "bind", "alias", "complete", "compgen",
}  # fmt: skip
HARMLESS = {
    ":", "[", "[[", "test", "true", "false", "echo", "cd", "pwd", "pushd", "popd", "dirs", "exit", "return", "logout",
    "break", "continue", "shift", "set", "shopt", "ulimit", "umask", "times", "type", "hash", "help", "history", "jobs",
    "kill", "bg", "fg", "disown", "suspend", "caller", "unalias", "compopt", "case", "mkdir", "rm", "cat", "tee",
    "sleep", "pip", "pip3", "python", "python3", "ray", "torchrun",
}  # fmt: skip
NAME = r"[A-Za-z_]\w*"
TARGET = re.compile(rf"({NAME})(?:(\+?=).*)?", re.A | re.DOTALL)
NAMED = re.compile(rf"(?<![\w$.{{/-])({NAME})|^\{{({NAME})\}}[<>&]|^-\w*", re.A)
# The names that arithmetic and expansions set, wherever they are; arithmetic is taken to reach to the end of its line.
DEFAULTED = re.compile(rf"\$\{{({NAME})(?:\[[^]]*\])?:?=", re.A)
ARITHMETIC = re.compile(
    rf"(?:\(\(.*?\)\)|\$\[|\[\[|\w\[(?![@*])|\$\{{{NAME}:(?![-=?+])|\blet\b|\b(?:{'|'.join(DECLARING)})\b[^\n]*\s-\w*i)[^\n]*",
    re.A | re.DOTALL,
)
SET = r"\s*(?:\+\+|--|[-+*/%|&^<>]*=(?!=))"
COUNTED = re.compile(rf"(?:\+\+|--)\s*({NAME})|(?<![\w$.])({NAME})(?:\[[^]]*\])?{SET}", re.A)
COUNTING = re.compile(rf"(?:\+\+|--)\s*{NAME}|(?<![\w.]){NAME}{SET}", re.A)
EXPANSION = re.compile(r"(\w*)(?:(:?[-?])(.*)|\[([@*])\])?", re.A | re.DOTALL)
OPTION = re.compile(r"[-+][A-Za-z]+|pipefail|errexit|nounset|xtrace")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
# Tags, anchors, times, octal numbers and other booleans are YAML's; Hydra takes them for text.
YAML_ONLY = re.compile(r"(?:^|[\s,:\[{])[!&*]|^(?:[\d:.-]*\d[:-]\d[\d:.-]*|0\d+|yes|no|on|off)$", re.I)
LONGEST = 100_000  # characters of a value, and words of an array: doubled ones have no end
UNKNOWN = "\0"  # stands for what only running the script would tell


class Field(NamedTuple):
    """A word after the expansions, and its line."""

    text: str
    line: int


class Target(NamedTuple):
    """A variable that a plain assignment sets; without a value a declaration only names it."""

    name: str
    sign: str | None
    word: Word


def read_shell(text: str, path: Path) -> Script:
    """The overrides of the only command of verl; ValueError for another number of them."""
    commands = list(Scanner(text.replace("\r\n", "\n"), str(path)).commands())
    found = [i for i, command in enumerate(commands) if any(PROGRAM.fullmatch(word.raw) for word in command.words)]
    if len(found) != 1:
        lines = ", ".join(str(commands[i].words[0].line) for i in found)
        raise ValueError(f"{path}: want one command of verl.trainer.main_ppo; got {_came(lines, text)}")
    target = commands[found[0]]
    variables = _Variables(text, commands[: found[0]], commands[found[0] :] if target.inside else [])
    script = Script()
    start = next(i for i, word in enumerate(target.words) if PROGRAM.fullmatch(word.raw))
    read = [(*field, word.raw) for word in target.words[start + 1 :] for field in variables.fields(word)]
    while read:
        word, line, raw = read.pop(0)
        _read_word(f"{word}={read.pop(0)[0]}" if word in OPTIONS and read else word, line, raw, script)
    for command in commands[found[0] + 1 :]:
        if re.match(r"[+~]*[a-z]\w*(\.\w+)+=", command.words[0].raw):
            _not_passed(command, script)
    return script


def _came(lines: str, text: str) -> str:
    if lines:
        return f"{lines.count(',') + 1}, in lines {lines}"
    if re.search(r"\bmain_(ppo|dapo)\b", text):
        return "one inside of a quoted text, a here-document or a comment, which is not read: write it as a command"
    other = OTHERS.search(text)
    if other and other[0].startswith("openrlhf"):
        return (
            f"none: it is a script of OpenRLHF ({other[0]}), whose flags are not converted; verl's command and TRL's "
            "GRPOConfig in a Python file are. Start with rlplus init: a flag of OpenRLHF is answered with the key here"
        )
    return f"none, but {other[0]}, which is another program" if other else "none"


def _targets(command: Command) -> list[Target] | None:
    """The values that a command of plain assignments sets, also behind `export` and the like; else None."""
    words = command.words
    if words[0].raw in DECLARING:
        words = tuple(word for word in words[1:] if not re.fullmatch(r"-[agrxi]+", word.raw))
    found = [TARGET.fullmatch(word.raw) for word in words]
    indexed = any(item.raw.startswith("[") for word in words for item in word.items or ())
    if indexed or not all(match and (match[2] or words != command.words) for match in found):
        return None
    return [Target(match[1], match[2], word) for match, word in zip(found, words, strict=True) if match]


def _is_followed(command: Command) -> bool:
    """Whether the targets of a command get these values: an assignment, or an export without options."""
    first, *rest = command.words
    return first.raw not in DECLARING or (first.raw == "export" and not any(word.raw.startswith("-") for word in rest))


def _named(command: Command) -> set[str]:
    """The variables that a command may set; "" for any variable."""
    words = [re.sub(r"[\\'\"]", "", word.raw) for word in command.words]
    name = words[0]
    plain = name in HARMLESS or name.startswith("((")  # names that arithmetic sets are looked for everywhere
    plain |= name == "printf" and words[1:] != [] and words[1][:1] not in ("-", "$", "`", "")
    plain |= name == "wait" and not any(word.startswith("-") for word in words)
    if plain and not any(re.match(r"\{\w+\}[<>&]", word) for word in words):
        return set()
    expanded = any(re.search(r"[$`]", word) for word in words)
    references = not DECLARING.isdisjoint(words) and any(re.match(r"[-+]\w*n", word) for word in words)
    if not UNSEEN.isdisjoint(words) or references or re.search(r"[$`]", name):
        return {""}
    if not SETTING.isdisjoint(words) and expanded:
        return {""}
    names = {match[0].strip("{}<>&") for word in words for match in NAMED.finditer(word)}
    return names | {option[i:] for option in names if option.startswith("-") for i in range(2, len(option))}


class _Variables:
    """The variables at the end of `before`, the commands in front of verl's. behind: those that may precede it, too.

    A variable is unsure in the whole script if something but assignments that are executed in their place may set it.
    """

    def __init__(self, text: str, before: list[Command], behind: list[Command]) -> None:
        self._values: dict[str, str | list[Field]] = {"HOME": "~"}
        self._words: dict[str, list[Word]] = defaultdict(list)  # all that are assigned
        self._added: dict[str, list[Word]] = defaultdict(list)  # to arrays, where it is unsure whether they are
        self._unsure = {match[1] for match in DEFAULTED.finditer(text)}  # "" is any variable
        self._unseen = False  # whether a command has run that may set any variable
        self._arguments = not behind  # whether $1 is the script's
        arithmetic = "\n".join(match[0] for match in ARITHMETIC.finditer(text))
        self._unsure |= {match[1] or match[2] for match in COUNTED.finditer(arithmetic)}
        for i, command in enumerate(before + behind):
            self._look(command, command.sure and i < len(before))
        values = [value for words in self._words.values() for word in words for value in word.items or [word]]
        evaluated = arithmetic and any(COUNTING.search(_shape(value).partition("=")[2]) for value in values)
        if evaluated or "IFS" in self._unsure | self._words.keys():
            self._unsure.add("")
        for command in before:
            self._follow(command)

    def _look(self, command: Command, sure: bool) -> None:
        """Take what a command may set for unsure, unless `_follow` will see what it sets."""
        raws = [word.raw for word in command.words]
        self._arguments &= raws[0] != "set" or all(map(OPTION.fullmatch, raws[1:]))
        targets = _targets(command)
        for target in targets or ():
            self._words[target.name].append(target.word)
        if targets is None:
            names = _named(command)
            self._unsure |= names if not sure or "trap" in raws else names - {""}
        elif not sure or not _is_followed(command):
            for name, sign, word in targets:
                if sign == "+=" and word.items is not None:
                    self._added[name].append(word)
                else:
                    self._unsure.add(name)

    def _follow(self, command: Command) -> None:
        """Take over what a command sets, in the order of the script."""
        targets = _targets(command)
        if targets is None:
            names = _named(command)
            if "" in names or (self._unseen and command.words[0].raw not in HARMLESS):  # or a function that is not seen
                self._unseen = True
                self._values = {"HOME": "~"}
        elif command.sure and _is_followed(command):
            exports = command.words[0].raw == "export"  # which expands all words before it sets the first
            values = [self._assigned(target) for target in targets] if exports else []
            for i, target in enumerate(targets):
                if target.sign is not None:
                    self._set(target, values[i] if exports else self._assigned(target))

    def _assigned(self, target: Target) -> str | list[Field]:
        word = target.word
        if word.items is not None:
            return [field for item in word.items for field in self.fields(item)]
        first, *rest = word.parts
        value = first.text.removeprefix(f"{target.name}{target.sign}")
        return value + self._text(rest)

    def _set(self, target: Target, value: str | list[Field]) -> None:
        old = self._values.get(target.name, UNKNOWN if self._unseen else None)
        if target.sign == "+=" and old is not None:
            value = old + value if type(old) is type(value) else UNKNOWN  # type: ignore[operator]
        first = isinstance(old, list) and isinstance(value, str)  # the first element's
        if first or (target.name in self._added and not isinstance(value, list)):
            self._unsure.add(target.name)
        self._values[target.name] = value if len(value) <= LONGEST else UNKNOWN

    def _value(self, name: str) -> str | list[Field] | None:
        """None for a variable that the script does not set."""
        unknown = OWN.fullmatch(name) or name in self._unsure or ("" in self._unsure and name != "HOME")
        unset = UNKNOWN if self._unseen or (name.isdigit() and not self._arguments) else None
        return UNKNOWN if unknown else self._values.get(name, unset)

    def _possible(self, words: Iterable[Word], seen: set[str]) -> list[Field]:
        """The settings, with unknown values, that the texts of words and of the variables in them have."""
        found = []
        for word in words:
            text = word.raw.partition("=")[2] or word.raw
            found += [Field(f"{key}={UNKNOWN}", word.line) for key in re.findall(r"[^\s'\"(=]+(?==)", text)]
            for name in {*re.findall(rf"\$\{{?({NAME})", text)} - seen:
                seen.add(name)
                found += self._possible(self._words[name], seen)
        return found

    def fields(self, word: Word) -> list[Field]:
        """The words that a word of a command becomes, with their lines."""
        line = word.line
        parts = [part for part in word.parts if part != Part("", quoted=True)]
        if len(parts) == 1 and parts[0].kind == "name" and (match := EXPANSION.fullmatch(parts[0].text)):
            quoted = parts[0].quoted
            value = self._value(match[1])
            if isinstance(value, list) and (match[4] == "@" or (match[4] and not quoted)):
                known = [field for one in value for field in ([one] if quoted else _split(one))]
                return known + self._possible(self._added[match[1]], set())
            if value == UNKNOWN or isinstance(value, list):
                return [Field(UNKNOWN, line), *self._possible([word], set())]
            if not quoted:
                return _split(Field(self._text(parts), line))
        text = self._text(parts)
        found: list[Field] = []
        for part in parts:
            if part.kind == "name" and not part.quoted and re.search(rf"\s|{UNKNOWN}", inner := self._text([part])):
                text = text.replace(inner, UNKNOWN)  # may be several words
                found = self._possible([word], set())
        shape = "".join("_" if part.quoted or part.kind != "text" else part.text for part in parts)
        return [Field(text + UNKNOWN * bool(BRACES.search(shape)), line), *found]

    def _text(self, parts: list[Part]) -> str:
        """The parts as one word, in which a list, and what cannot be known, is UNKNOWN."""
        texts = []
        for part in parts:
            if part.kind == "text":
                texts.append(part.text)
            elif part.kind == "sum":
                texts.append(self._sum(part.text))
            else:
                texts.append(self._expanded(part) if part.kind == "name" else UNKNOWN)
        return "".join(texts)

    def _expanded(self, part: Part) -> str:
        match = EXPANSION.fullmatch(part.text)
        if match is None:
            return UNKNOWN
        name, operation, rest, index = match.groups()
        value = self._value(name)
        if operation in ("-", ":-") and (value is None or (value == "" and operation == ":-")):
            default = [*Scanner(rest).parts(part.quoted)]
            mixed = not part.quoted and any(inner.quoted and re.search(r"\s", inner.text) for inner in default)
            return UNKNOWN if mixed else self._text(default)
        return value if isinstance(value, str) and not index else UNKNOWN

    def _sum(self, terms: str) -> str:
        """The value of an integer expression; only what Python computes as a shell does is computed."""
        terms = self._text([*Scanner(terms).parts(quoted=True)])
        terms = re.sub(rf"\b{NAME}", lambda name: str(self._value(name[0]) or UNKNOWN), terms, flags=re.A)
        negative = "-" in terms and re.search(r"[/%]|\*\*|--", terms)
        if negative or not re.fullmatch(r"(?:[\d\s()*%-]|\+(?!\+)|/(?!/)){1,1000}", terms):
            return UNKNOWN
        try:
            tree = ast.parse(terms.strip().replace("/", "//"), mode="eval")
            value = Names(tree).value(tree.body)
        except (SyntaxError, Unknown, MemoryError, RecursionError):
            return UNKNOWN
        return str(value) if isinstance(value, int) else UNKNOWN


def _shape(word: Word) -> str:
    """The word with a name in front of each expansion."""
    return "".join(part.text if part.kind == "text" else f"X{part.text}" for part in word.parts)


def _split(field: Field) -> list[Field]:
    return [Field(text, field.line) for text in re.split(r"[ \t\n]+", field.text) if text]


def _read_word(text: str, line: int, raw: str, script: Script) -> None:
    key, equals, value = text.partition("=")
    key = key.lstrip("+") if equals else key
    if not equals or UNKNOWN in key:
        script.doubt(raw if UNKNOWN in text else text, line)
    elif UNKNOWN in value or "${" in value:  # Hydra's own interpolation
        script.doubt(key, line)
    else:
        script.put(key, _typed(value), line)


def _not_passed(command: Command, script: Script) -> None:
    for word in command.words:
        key, equals, _ = word.raw.partition("=")
        if equals:
            script.outside[key.lstrip("+")] = word.line


def _typed(value: str) -> Any:
    """A value as Hydra reads it."""
    if re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    if "\n" in value or YAML_ONLY.search(value):
        return value
    try:
        return parse_yaml(re.sub(r"(?<=\w):(?=[^\s/])", ": ", value) if value.startswith("{") else value, "a setting")
    except ValueError:
        return value
