"""verl's overrides, read from a shell script, which is never executed.

A variable is known where plain assignments, each executed once and in its place, are all that sets it. Whatever else
may set it makes it unknown.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplus.common.yaml_text import parse_yaml
from rlplus.tools.convert.draft import Script
from rlplus.tools.convert.expressions import Unknown, calculate, number
from rlplus.tools.convert.shell_changes import ASSIGNED, DECLARING, HARMLESS, NAME, Change, changes, counted, evaluated
from rlplus.tools.convert.shell_words import Command, Part, Scanner, Word
from rlplus.tools.convert.verl_overrides import OPTIONS

PROGRAM = re.compile(r"(?:.*[./])?(?:async_)?main_(?:ppo|dapo)(?:_\w+)?(?:\.py)?")
OTHERS = re.compile(r"\b(?:verl\.[\w.]*|recipe\.[\w.]*|openrlhf\.cli\.)\w+")
OWN = re.compile(  # variables that bash itself sets, most of them without an assignment in the script
    r"|0|_|BASH\w*|COLUMNS|COMP_\w*|COPROC|DIRSTACK|EPOCH\w*|EUID|FUNCNAME|GROUPS|HISTCMD|HOST\w+|IFS|LINENO|LINES|MACHTYPE"
    r"|MAPFILE|OLDPWD|OPT\w+|OSTYPE|PATH|PIPESTATUS|PPID|PS\d|PWD|S?RANDOM|REPLY|SECONDS|SHELL|SHELLOPTS|SHLVL|TERM|UID"
)
TERMS = re.compile(rf"(?:(?!\+\+|--)(?:(?:0|[1-9]\d*|{NAME})(?!\w)|[-+*/%()\s]))*", re.A)
OPTION = re.compile(r"[-+][A-Za-z]+|pipefail|errexit|nounset|xtrace")
BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
# Tags, anchors, times, octal numbers and other booleans are YAML's; Hydra takes them for text.
YAML_ONLY = re.compile(r"(?:^|[\s,:\[{])[!&*]|^(?:[\d:.-]*\d[:-]\d[\d:.-]*|0\d+|yes|no|on|off)$", re.I)
EXPANSION = re.compile(r"(\w*)(:?[-?]|\[(?:@|\*|\d+)\]|)(.*)", re.A | re.DOTALL)
DEEPEST = 10_000  # characters of an expansion, which may contain others
LONGEST = 100_000  # characters of a value, and words of an array: doubled ones have no end
UNKNOWN = "\0"  # stands for what only running the script would tell

Field = tuple[str, int]  # a word after the expansions, and its line
Piece = tuple[str | None, bool, int]  # a part of fields, whether it is split at blanks, its line; None ends a field


def read_shell(text: str, path: Path) -> Script:
    """The overrides of the only command of verl; ValueError for another number of them."""
    commands = list(Scanner(text.replace("\r\n", "\n"), str(path)).commands())
    found = [i for i, command in enumerate(commands) if any(PROGRAM.fullmatch(word.raw) for word in command.words)]
    if len(found) != 1:
        lines = ", ".join(str(commands[i].words[0].line) for i in found)
        raise ValueError(f"{path}: want one command of verl.trainer.main_ppo; got {_came(lines, text)}")
    target = commands[found[0]]
    variables = _Variables(text, commands[: found[0]], commands[found[0] :] if target.inside else [])
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
    """before, behind: the commands that stand there, and may be executed before verl's."""

    def __init__(self, text: str, before: list[Command], behind: list[Command]) -> None:
        self._values: dict[str, str | list[Field]] = {"HOME": "~"}
        defaulted = [change.name for command in before + behind if command.words[0].raw == ":"
                     for group in changes(command) for change in group]  # fmt: skip
        names = {*(Counter(counted(text)) - Counter(defaulted)), *evaluated(text, before + behind)}
        self._unsure: dict[str, list[Word | None]] = {name: [None] for name in names}  # "" is any variable
        self._added: set[str] = set()  # arrays to which unsure commands only add
        self._fixed: set[str] = set()
        self._open: set[str] = set()
        self._unseen = False  # whether a command has run that may set any variable
        self._arguments = not behind  # whether $1 is the script's
        self._blanks = True  # whether words are split at blanks
        for i, command in enumerate(before + behind):
            raws = [word.raw for word in command.words]
            self._arguments &= raws[0] != "set" or all(map(OPTION.fullmatch, raws[1:]))
            for change in (change for group in changes(command) for change in group):
                self._blanks &= change.name != "IFS"
                if not command.sure or i >= len(before) or (change.name and not change.word) or "trap" in raws:
                    self._doubt(change)

    def _doubt(self, change: Change) -> None:
        """Take a variable for unknown in the whole script."""
        name, sign, word, _ = change
        adds = sign == "+=" and word is not None and word.items is not None
        if adds and name not in self._unsure:
            self._added.add(name)
        elif not adds:
            self._added.discard(name)
        self._unsure.setdefault(name, []).append(word and _after(word, f"{name}{sign}"))

    def follow(self, command: Command) -> None:
        """Take over what a command changes, in the order of the script."""
        first = command.words[0].raw
        if self._unseen and not ASSIGNED.match(first) and first not in HARMLESS | DECLARING:
            self._forget_all()  # it may be a function that is not seen
        for group in changes(command) if command.sure else ():
            for change, value in [(change, self._assigned(change)) for change in group]:
                self._set(change, value)

    def _assigned(self, change: Change) -> str | list[Field]:
        if change.word is None:
            return UNKNOWN
        if change.word.items is not None:
            return [field for item in change.word.items for field in self.fields(item)]
        return self._text(_after(change.word, f"{change.name}{change.sign}"))

    def _set(self, change: Change, value: str | list[Field]) -> None:
        name = change.name
        if not name:
            self._forget_all()
            return
        old = self._values.get(name, UNKNOWN if self._unseen else None)
        if change.sign == "+=" and old is not None:
            value = old + value if type(old) is type(value) else UNKNOWN  # type: ignore[operator]
        element = isinstance(old, list) and isinstance(value, str)  # the first one's new value
        if not element:
            self._values[name] = value
        if element or name in self._fixed or len(value) > LONGEST:
            self._forget(name)
        if change.fixes:
            self._fixed.add(name)

    def _forget_all(self) -> None:
        self._unseen = True
        for name in self._values.keys() - {"HOME"}:
            self._forget(name)

    def _forget(self, name: str) -> None:
        old = self._values.get(name)
        doubted = [_doubted(field) for field in old] if isinstance(old, list) and len(old) <= LONGEST else []
        self._values[name] = [*doubted, (UNKNOWN, 0)] if isinstance(old, list) else UNKNOWN

    def _is_unsure(self, name: str) -> bool:
        return name in self._unsure or ("" in self._unsure and name != "HOME")

    def _possible(self, name: str) -> list[Field]:
        """The settings that an unsure variable may contain, each with an unknown value, and an unknown word."""
        if name in self._open:
            return []
        self._open.add(name)
        value = self._values.get(name, "")
        found = [(text, 0) for text in value.split()] if isinstance(value, str) else list(value)
        for word in self._unsure.get(name, [None]):
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

    def _value(self, name: str) -> str | list[Field] | None:
        """None for a variable that the script does not set."""
        if OWN.fullmatch(name):
            return UNKNOWN
        unset = UNKNOWN if self._unseen or (name.isdigit() and not self._arguments) else None
        value = self._values.get(name, unset)
        if not self._is_unsure(name):
            return value
        if name in self._added and isinstance(value, list):
            return value + self._possible(name)[len(value) :]
        arrays = any(word is not None and word.items is not None for word in self._unsure.get(name, ()))
        return self._possible(name) if arrays or isinstance(value, list) else UNKNOWN

    def fields(self, word: Word) -> list[Field]:
        """The words that a word of a command becomes, with their lines."""
        parts = word.parts
        if len(parts) == 1 and parts[0].kind == "name" and not parts[0].quoted and parts[0].text in self._unsure:
            return [(text, line or word.line) for text, line in self._possible(parts[0].text)]
        if any(part.kind == "name" and part.text.endswith("[@]") for part in parts):  # an empty array is no word
            parts = tuple(part for part in parts if part != Part("", quoted=True))
        fields: list[Field] = []
        possible: list[Field] = []
        joins = False
        for text, splits, line in self._pieces(parts):
            if text is None:
                joins = False
                continue
            if splits and not self._blanks:
                possible += [_doubted((piece, line or word.line)) for piece in text.split() if "=" in piece]
                text = UNKNOWN
            for i, piece in enumerate(re.split(r"[ \t\n]+", text) if splits else [text]):
                joins = joins and i == 0
                if piece or not splits:
                    before, at = fields.pop() if joins else ("", line or word.line)
                    fields.append((before + piece, at))
                    joins = True
        shape = "".join("_" if part.quoted or part.kind != "text" else part.text for part in word.parts)
        return [(field + UNKNOWN * bool(BRACES.search(shape)), line) for field, line in fields + possible]

    def _text(self, word: Word) -> str:
        return "".join(" " if text is None else text for text, _, _ in self._pieces(word.parts))

    def _pieces(self, parts: tuple[Part, ...]) -> Iterator[Piece]:
        for part in parts:
            if part.kind == "text":
                yield part.text, False, 0
            elif part.kind == "sum":
                yield self._sum(part.text), False, 0
            elif part.kind == "name":
                yield from self._expanded(part.text, part.quoted)
            else:
                yield UNKNOWN, False, 0

    def _expanded(self, inside: str, quoted: bool) -> Iterator[Piece]:
        found = EXPANSION.fullmatch(inside)
        if found is None or len(inside) > DEEPEST:
            yield UNKNOWN, False, 0
            return
        name, operation, rest = found.groups()
        value = self._value(name)
        if operation in ("-", ":-") and (value is None or (value == "" and operation == ":-")):
            for part in Scanner(rest).parts(quoted):
                bare = part.kind == "text" and not part.quoted
                for text, splits, line in self._pieces((part,)):
                    yield text, (splits or bare) and not quoted, line
            return
        index = operation.strip("[]") if operation.startswith("[") else "0"
        if value is None or (rest and operation not in ("-", ":-", "?", ":?")):
            value = UNKNOWN
        elif isinstance(value, str):
            value = value if index in "@*0" else UNKNOWN
        elif index == "@" or (index == "*" and not quoted):
            for i, (text, line) in enumerate(value):
                if i:
                    yield None, False, 0
                yield text, not quoted, line
            return
        elif index == "*":
            value = " ".join(text for text, _ in value) if self._blanks else UNKNOWN
        else:
            doubtful = self._is_unsure(name) or any(UNKNOWN in text for text, _ in value)
            value = UNKNOWN if doubtful or int(index) >= len(value) else value[int(index)][0]
        yield value, not quoted, 0

    def _sum(self, terms: str) -> str:
        """The value of an integer expression; only what Python computes as a shell does is computed."""
        terms = self._text(Word(Scanner(terms).parts(quoted=True), 0, "")).strip()
        if not TERMS.fullmatch(terms) or len(terms) > 1000:
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
        left = self._integer(node.left)
        right = self._integer(node.right)
        if not isinstance(node.op, ast.Div | ast.Mod):
            result = calculate(node.op, left, right)
            if not isinstance(result, int):  # a shell has no powers below 1
                raise Unknown
            return result
        quotient = calculate(ast.FloorDiv(), abs(left), abs(right)) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if isinstance(node.op, ast.Div) else left - quotient * right


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
