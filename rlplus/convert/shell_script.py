"""verl's overrides, read from a shell script, which is never executed.

A variable is known where each of its assignments is a plain one outside of conditions, loops and functions. All else
that can change it makes it unknown.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplus.common.yaml_text import parse_yaml
from rlplus.convert.draft import Script
from rlplus.convert.expressions import Unknown, calculate, number
from rlplus.convert.shell_words import Command, Part, Scanner, Word
from rlplus.convert.verl_overrides import OPTIONS

PROGRAM = re.compile(r"(?:.*[./])?(?:async_)?main_(?:ppo|dapo)(?:_\w+)?(?:\.py)?")
OTHERS = re.compile(r"\b(?:verl\.[\w.]*|recipe\.[\w.]*|openrlhf\.cli\.)\w+")
ASSIGNED = re.compile(r"(\w+)(\+?=)")
DECLARING = {"export", "local", "readonly", "declare", "typeset"}
CHANGING = {"read", "unset", "mapfile", "readarray", "getopts", "let", "printf", "for", "select"}
READING = {"source", ".", "eval"}
DEFAULTED = re.compile(r"\$\{(\w+):?=")
COUNTED = re.compile(r"(?:\+\+|--)([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%|&^<>]*=(?!=))")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
# Tags, anchors, times, octal numbers and other booleans are YAML's; Hydra takes them for text.
YAML_ONLY = re.compile(r"(?:^|[\s,:\[{])[!&*]|^(?:[\d:.-]*\d[:-]\d[\d:.-]*|0\d+|yes|no|on|off)$", re.I)
EXPANSION = re.compile(r"(\w*)(:?[-?]|\[(?:@|\*|\d+)\]|)(.*)", re.DOTALL)
DEEPEST = 10_000  # characters of an expansion, which may contain others
LONGEST = 100_000  # characters of a value, and words of an array: doubled ones have no end
UNKNOWN = "\0"  # stands for what only running the script would tell

Field = tuple[str, int]  # a word after the expansions, and its line


def read_shell(text: str, path: Path) -> Script:
    """The overrides of the only command of verl; ValueError for another number of them."""
    commands = list(Scanner(text.replace("\r\n", "\n"), str(path)).commands())
    found = [i for i, command in enumerate(commands) if any(PROGRAM.fullmatch(word.raw) for word in command.words)]
    if len(found) != 1:
        lines = ", ".join(str(commands[i].words[0].line) for i in found)
        raise ValueError(f"{path}: want one command of verl.trainer.main_ppo; got {_came(lines, text)}")
    target = commands[found[0]]
    variables = _Variables()
    for i, command in enumerate(commands):
        if not command.sure or (i > found[0] and target.inside):
            variables.doubt(command)
    for command in commands[: found[0]]:
        variables.follow(command)
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


class _Variables:
    def __init__(self) -> None:
        self._values: dict[str, str | list[Field]] = {"HOME": "~"}
        self._unsure: dict[str, list[Word | None]] = {}  # a name that may be assigned, and may not
        self._added: set[str] = set()  # arrays to which unsure commands only add
        self._open: set[str] = set()

    def doubt(self, command: Command) -> None:
        """Take what a command may change, or may not, or later than its place says, for unknown in the whole script."""
        for name, sign, word in _changes(command):
            adds = sign == "+=" and word is not None and word.items is not None
            if adds and name not in self._unsure:
                self._added.add(name)
            elif not adds:
                self._added.discard(name)
            self._unsure.setdefault(name, []).append(word and _after(word, f"{name}{sign}"))

    def follow(self, command: Command) -> None:
        """Take over what a command changes, in the order of the script."""
        if command.words[0].raw in READING:
            for name in self._values.keys() - {"HOME"}:
                self._forget(name)
        for name, sign, word in _changes(command) if command.sure else ():
            if word is None:
                self._forget(name)
                continue
            new: str | list[Field]
            if word.items is None:
                new = self._text(_after(word, f"{name}{sign}"))
            else:
                new = [field for item in word.items for field in self.fields(item)]
            if sign == "+=":
                old = self._values.get(name, [] if isinstance(new, list) else "")
                same = isinstance(new, str) == isinstance(old, str)
                new = old + new if same else UNKNOWN  # type: ignore[operator]
            self._values[name] = new
            if len(new) > LONGEST:
                self._forget(name)

    def _forget(self, name: str) -> None:
        old = self._values.get(name)
        doubted = [_doubted(field) for field in old] if isinstance(old, list) and len(old) <= LONGEST else []
        self._values[name] = [*doubted, (UNKNOWN, 0)] if isinstance(old, list) else UNKNOWN

    def _possible(self, name: str) -> list[Field]:
        """The settings that an unsure variable may contain, each with an unknown value, and an unknown word."""
        if name in self._open:
            return []
        self._open.add(name)
        value = self._values.get(name, "")
        found = [(text, 0) for text in value.split()] if isinstance(value, str) else list(value)
        for word in self._unsure[name]:
            if word and word.items is not None:
                found += [field for item in word.items for field in self.fields(item)]
                continue
            found.append((UNKNOWN, 0))
            if word:
                inner = [part.text for part in word.parts if part.kind == "name" and part.text in self._unsure]
                found += [field for other in inner for field in self._possible(other)]
                found += [(text, word.line) for text in self._text(word).split() if "=" in text]
        self._open.remove(name)
        return [_doubted(field) for field in found]

    def _text(self, word: Word) -> str:
        return "".join(text for text, _ in self._texts(word.parts))

    def _value(self, name: str) -> str | list[Field] | None:
        """None for a variable that the script does not assign."""
        value = self._values.get(name)
        if name not in self._unsure:
            return value
        if name in self._added and isinstance(value, list):
            kept = len(value)
            return value + self._possible(name)[kept:]
        return self._possible(name) if isinstance(value, list) or self._is_array(name) else UNKNOWN

    def _is_array(self, name: str) -> bool:
        return any(word is not None and word.items is not None for word in self._unsure[name])

    def fields(self, word: Word) -> list[Field]:
        """The words that a word of a command becomes, with their lines."""
        parts = [part for part in word.parts if part != Part("", quoted=True)]
        alone = re.fullmatch(r"(\w+)(\[@\])?", parts[0].text) if [part.kind for part in parts] == ["name"] else None
        if alone and (alone[2] or not parts[0].quoted):
            value = self._possible(alone[1]) if alone[1] in self._unsure and not alone[2] else self._value(alone[1])
            if isinstance(value, list):
                value = [(text, line or word.line) for text, line in value]
                return value if parts[0].quoted else [(piece, line) for text, line in value for piece in text.split()]
        fields: list[str] = []
        joins = False
        for text, splits in self._texts(word.parts):
            for i, piece in enumerate(re.split(r"[ \t\n]+", text) if splits else [text]):
                joins = joins and i == 0
                if piece or not splits:
                    fields[-1:] = [fields[-1] + piece] if joins else [*fields[-1:], piece]
                    joins = True
        shape = "".join("_" if part.quoted or part.kind != "text" else part.text for part in word.parts)
        return [(field + UNKNOWN * bool(BRACES.search(shape)), word.line) for field in fields]

    def _texts(self, parts: tuple[Part, ...]) -> Iterator[tuple[str, bool]]:
        """The parts' texts, and whether each is split at blanks."""
        for part in parts:
            if part.kind == "text":
                yield part.text, False
            elif part.kind == "sum":
                yield self._sum(part.text), False
            elif part.kind == "name":
                yield from self._expanded(part.text, part.quoted)
            else:
                yield UNKNOWN, False

    def _expanded(self, inside: str, quoted: bool) -> Iterator[tuple[str, bool]]:
        found = EXPANSION.fullmatch(inside)
        if found is None or len(inside) > DEEPEST:
            yield UNKNOWN, False
            return
        name, operation, rest = found.groups()
        value = self._value(name)
        if operation in ("-", ":-") and (value is None or (value == "" and operation == ":-")):
            for text, splits in self._texts(Scanner(rest).parts(quoted)):
                yield text, splits and not quoted
            return
        if rest and operation not in ("-", ":-", "?", ":?"):
            value = UNKNOWN
        elif isinstance(value, list):
            texts = [text for text, _ in value]
            index = operation.strip("[]") if operation.startswith("[") else "0"
            doubtful = name in self._unsure or any(UNKNOWN in text for text in texts)
            if index in ("@", "*"):
                value = " ".join(texts)
            elif doubtful or int(index) >= len(texts):
                value = UNKNOWN
            else:
                value = texts[int(index)]
        yield UNKNOWN if value is None else value, not quoted

    def _sum(self, terms: str) -> str:
        """The value of an integer expression; only what Python computes as a shell does is computed."""
        terms = "".join(text for text, _ in self._texts(Scanner(terms).parts(quoted=True))).strip()
        if UNKNOWN in terms or len(terms) > 1000:
            return UNKNOWN
        try:
            return str(self._integer(ast.parse(terms, mode="eval").body))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return UNKNOWN

    def _integer(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return number(node.value)
        if isinstance(node, ast.Name):
            value = self._value(node.id)
            if not isinstance(value, str) or not re.fullmatch(r"-?(0|[1-9]\d*)", value):
                raise Unknown
            return number(int(value))
        power = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.BinOp)  # -2 ** 2 is 4 in a shell
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not power:
            return -self._integer(node.operand)
        if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.FloorDiv):
            raise Unknown
        left, right = self._integer(node.left), self._integer(node.right)
        if not isinstance(node.op, ast.Div | ast.Mod):
            result = calculate(node.op, left, right)
            if not isinstance(result, int):  # a shell has no powers below 1
                raise Unknown
            return result
        quotient = calculate(ast.FloorDiv(), abs(left), abs(right)) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if isinstance(node.op, ast.Div) else left - quotient * right


def _changes(command: Command) -> Iterator[tuple[str, str, Word | None]]:
    """Names that a command changes, the sign and the word of a plain assignment; None for another change."""
    words = list(command.words)
    raws = [word.raw for word in words]
    for raw in raws:
        in_sums = [found for inside in re.findall(r"\(\(.*\)\)", raw, re.DOTALL) for found in COUNTED.finditer(inside)]
        for found in (*DEFAULTED.finditer(raw), *in_sums):
            yield next(filter(None, found.groups())), "=", None
    if raws[0] in DECLARING and not any(re.match(r"-\w*[^agrx]", raw) for raw in raws):
        words = words[1:]
    elif raws[0] in CHANGING | DECLARING:
        for raw in raws[1:]:
            for name in re.findall(r"[A-Za-z_]\w*", raw):
                yield name, "=", None
        return
    elif not all(re.match(r"\w+(\[.*\])?\+?=", raw) for raw in raws):
        return  # those in front of a command are its environment
    for word in words:
        if assigned := ASSIGNED.match(word.raw):
            yield assigned[1], assigned[2], word
        elif element := re.match(r"(\w+)\[", word.raw):
            yield element[1], "=", None


def _after(word: Word, beginning: str) -> Word:
    """The word without a beginning."""
    first = word.parts[0]
    return Word((Part(first.text.removeprefix(beginning)), *word.parts[1:]), word.line, word.raw, word.items)


def _doubted(field: Field) -> Field:
    """The word with an unknown value, if it is a setting; else an unknown one."""
    key, equals, _ = field[0].partition("=")
    return f"{key}{equals}{UNKNOWN}" if equals else UNKNOWN, field[1]


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
