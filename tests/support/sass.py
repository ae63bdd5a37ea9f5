"""Machine code of a compiled kernel, as nvdisasm prints it, and how many instructions a thread executes."""

import re
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)")
LABEL = re.compile(r"(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")


class Instruction(NamedTuple):
    """`target`: the place of the instruction that a branch leads to; `conditional`: it may be passed over."""

    opcode: str
    conditional: bool
    target: int | None

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]


def parse(sass: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    lines = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := INSTRUCTION.match(line):
            lines.append(found.groups())
    out = []
    for predicate, opcode, operands in lines:
        to = TARGET.search(operands) if opcode.startswith("BRA") else None
        # The condition is an operand where predicates are uniform: BRA.U !UP0, `(.L_x_1)
        conditional = predicate is not None or (to is not None and "P" in operands[: to.start()])
        out.append(Instruction(opcode, conditional, labels[to[1]] if to else None))
    return out


def hot_path(instructions: list[Instruction]) -> int:
    """Instructions of one iteration of the longest loop; without a loop, of the longest way to the end."""
    loops = [i - to + 1 for i, (_, _, to) in enumerate(instructions) if to is not None and to < i]
    if loops:
        return max(loops)
    longest = [0] * (len(instructions) + 1)  # length from an instruction to the end
    for i, instruction in reversed(list(enumerate(instructions))):
        to = instruction.target
        ways = [longest[to]] if to is not None and to > i else []
        if instruction.conditional or instruction.name not in ("BRA", "EXIT", "RET"):
            ways.append(longest[i + 1])
        longest[i] = 1 + max(ways, default=0)
    return longest[0]
