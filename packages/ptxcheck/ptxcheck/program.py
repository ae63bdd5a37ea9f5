"""PTX as text to statements, basic blocks and parameters."""

import re
from pathlib import Path
from typing import NamedTuple

Operand = str | tuple[str, ...]  # a tuple: {a, b}
ENDS_BLOCK = ("bra", "ret", "exit", "bar")
_STATEMENT = re.compile(r"^(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"^\s*\.param\s+(\.align 64 )?\.(\w+).*?(\w+)(\[128\])?\s*$")
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)[^\n]*$", re.MULTILINE)
_ASM = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)


class Unsupported(Exception):
    """The program has something that the executor does not model."""


class Statement(NamedTuple):
    """One instruction. `source`: file and line of the kernel's source, empty without debug information."""

    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.source})" if self.source else self.text

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]


class Parameter(NamedTuple):
    """`kind`: a PTX type without its dot, or "map", a tensor map of 128 bytes."""

    name: str
    kind: str


def split_operands(text: str) -> tuple[Operand, ...]:
    """'a, {b, c}, [d+4]' -> ('a', ('b', 'c'), '[d+4]')"""
    out: list[Operand] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text):
        part = part.strip()
        out.append(tuple(x.strip() for x in part[1:-1].split(",")) if part.startswith("{") else part)
    return tuple(out)


class Program:
    """The entry of a module: `statements`; `starts`, the first of each basic block; `labels`, the block of each label.

    Only what Triton writes: one entry, parameters, registers, labels, braces around inline assembly.
    """

    def __init__(self, ptx: str) -> None:
        files = {number: Path(path).name for number, path in _FILE.findall(ptx)}
        head, body = re.sub(r"//[^\n]*", "", _ASM.sub(_in_one_place, ptx)).split(".visible .entry", 1)
        target = re.search(r"\.target\s+sm_(\d+)", head)
        name = re.match(r"\s*(\w+)", body)
        parameters, body = body[body.index("(") + 1 :].split(")", 1)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", body)
        if not (target and name and threads):
            raise Unsupported("a module without a target, an entry or the number of its threads")
        self.target, self.name, self.threads = int(target[1]), name[1], int(threads[1])
        self.parameters = [_parameter(one) for one in parameters.split(",") if one.strip()]
        body = body[body.index("{") + 1 :]
        end = body.find("$L__func_end")
        self._widths: dict[str, int] = {}
        self.statements: list[Statement] = []
        self._at: dict[str, int] = {}
        self._local: dict[str, str] = {}  # labels of inline assembly: the name stands for the latest one
        self._source = ""
        self._read(body[:end] if end >= 0 else body[: body.rindex("}")], files)
        starts = {0, *self._at.values()}
        starts |= {i + 1 for i, s in enumerate(self.statements) if s.kind in ENDS_BLOCK}
        self.starts = sorted(starts)
        index = {start: i for i, start in enumerate(self.starts)}
        self.labels = {label: index[at] for label, at in self._at.items()}

    def width(self, register: str) -> int:
        """Bits of a register; 1 of a predicate."""
        for name in (register, re.sub(r"\d+$", "", register)):
            if name in self._widths:
                return self._widths[name]
        raise Unsupported(f"register {register} is not declared")

    def _read(self, body: str, files: dict[str, str]) -> None:
        body = _LOCATION.sub(r".loc \1 \2;", body)
        body = re.sub(r"^\s*(\$?\w+):\s*$", r"\1:;", body, flags=re.MULTILINE)
        for raw in body.split(";"):
            text = raw.strip()
            while text.startswith(("{", "}")) and not re.match(r"\{[^{}]*\}\s*,", text):
                text = text[1:].strip()
            if text.endswith(":"):
                self._label(text[:-1])
            elif text.startswith(".loc "):
                _, file, line = text.split()
                self._source = f"{files.get(file, f'file {file}')}:{line}" if line != "0" else self._source
            elif text.startswith(".reg"):
                self._declare(text)
            elif text and not text.startswith(".pragma"):
                self._statement(" ".join(text.split()))

    def _label(self, name: str) -> None:
        if not name.startswith("$"):
            self._local[name] = f"{name}#{len(self.statements)}"
            name = self._local[name]
        if name in self._at:
            raise Unsupported(f"label {name} twice")
        self._at[name] = len(self.statements)

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        for one in names.split(","):
            width = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
            self._widths[re.sub(r"<\d+>", "", one.strip())] = width

    def _statement(self, text: str) -> None:
        match = _STATEMENT.match(text)
        if not match:
            raise Unsupported(f"{text} ({self._source})")
        operands = split_operands(match[4])
        if match[3].startswith("bra") and operands[0] in self._local:
            operands = (self._local[str(operands[0])],)
        self.statements.append(Statement(match[2], match[1] == "!", match[3], operands, text, self._source))


def _in_one_place(asm: re.Match[str]) -> str:
    """Inline assembly without the places of its later lines: LLVM counts them on from the first."""
    lines = asm[0].splitlines()
    places = [i for i, line in enumerate(lines) if line.lstrip().startswith(".loc")]
    return "\n".join(line for i, line in enumerate(lines) if i not in places[1:])


def _parameter(text: str) -> Parameter:
    match = _PARAMETER.match(text)
    if not match or bool(match[1]) != bool(match[4]):
        raise Unsupported(f"parameter {text}")
    return Parameter(match[3], "map" if match[4] else match[2])
