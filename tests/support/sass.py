"""Machine code of a compiled kernel, as nvdisasm prints it: its loops, and how many instructions a thread executes.

Loops come from the flow of control: an edge to a block that dominates its source closes one.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)")
LABEL = re.compile(r"(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")
MMA = ("HMMA", "HGMMA", "UTCHMMA")  # instructions of the tensor cores
WAITS = {"SYNCS", "NANOSLEEP", "BRA"}  # a loop of these alone waits for a copy


class Instruction(NamedTuple):
    """`target`: the place of the instruction that a branch leads to; `conditional`: it may be passed over."""

    opcode: str
    conditional: bool
    target: int | None

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def follows(self) -> bool:
        """Whether the next instruction may be executed after this one."""
        return self.conditional or (self.target is None and self.name not in ("EXIT", "RET"))


class Counts(NamedTuple):
    """Amounts of a thread: in one iteration of each innermost loop, in the order of the code, on the way with the most;
    and on the way with the most through all that is outside of these, where outer loops turn once, or through both. A
    loop that only waits is none. A call counts as one instruction."""

    loops: list[float]
    once: float
    both: float


Flow = dict[int, tuple[int, list[int]]]  # by the first instruction of a block: the end of it, and what may follow


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
        to = TARGET.search(operands) if opcode.startswith(("BRA", "CALL")) else None
        # The condition is an operand where predicates are uniform: BRA.U !UP0, `(.L_x_1)
        conditional = predicate is not None or (to is not None and "P" in operands[: to.start()])
        out.append(Instruction(opcode, conditional, labels[to[1]] if to else None))
    called = [
        i for i, instruction in enumerate(out) if instruction.name == "CALL" and _returns(out, instruction.target)
    ]
    for i in called:
        out[i] = out[i]._replace(target=None)
    return out


def _returns(instructions: list[Instruction], start: int | None) -> bool:
    """Whether what a call leads to comes back. Calls that do not are branches, which compilers use for far ones."""
    seen: set[int] = set()
    waiting = [] if start is None else [start]
    while waiting:
        at = waiting.pop()
        if at in seen or at == len(instructions):
            continue
        seen.add(at)
        instruction = instructions[at]
        if instruction.name == "RET":
            return True
        if instruction.target is not None:
            waiting.append(instruction.target)
        if instruction.follows:
            waiting.append(at + 1)
    return start is None


def counts(instructions: list[Instruction], amount: Callable[[Instruction], float] = lambda instruction: 1) -> Counts:
    """Sums of that amount, by default 1. ValueError for a loop with two entries; structured programs have none."""
    flow = _flow(instructions)
    order = _order(flow)
    place = {block: i for i, block in enumerate(order)}
    dominators = _dominators(flow, order)
    loops: dict[int, set[int]] = {}  # the blocks of each, by its entry
    for block in order:
        for to in flow[block][1]:
            if place[to] > place[block]:
                continue
            if to not in dominators[block]:
                raise ValueError(f"want loops with one entry; instruction {to} is another one, reached from {block}")
            loops.setdefault(to, {to}).update(_body(flow, order, block, to))
    names = {block: {instruction.name for instruction in instructions[block:end]} for block, (end, _) in flow.items()}
    loops = {entry: body for entry, body in sorted(loops.items()) if not set().union(*map(names.get, body)) <= WAITS}
    inner = [body for entry, body in loops.items() if not body & (loops.keys() - {entry})]
    weight = {block: sum(map(amount, instructions[block:end])) for block, (end, _) in flow.items()}
    each = [_longest(flow, [block for block in order if block in body], weight) for body in inner]
    outside = {block: 0 if any(block in body for body in inner) else n for block, n in weight.items()}
    entries = {min(body, key=place.get): n for body, n in zip(inner, each, strict=True)}
    return Counts(each, _longest(flow, order, outside), _longest(flow, order, outside | entries))


def after_mma(instructions: list[Instruction]) -> int | None:
    """Instructions of a thread after the last one of the tensor cores in the code; None if there is none. On the way
    that computes the most exponentials and stores the most, and of these ways the one with the fewest instructions."""
    last = max((at for at, instruction in enumerate(instructions) if instruction.name in MMA), default=None)
    if last is None:
        return None
    flow, first = _flow(instructions), last + 1
    order = _order(flow)
    order = order[order.index(max(block for block in order if block <= first)) :]
    work = len(instructions)  # more than any way has
    weight = {}
    for block, (end, _) in flow.items():
        names = [x.name for x in instructions[max(block, first) if block == order[0] else block : end]]
        weight[block] = work * sum(name in ("MUFU", "STG") for name in names) - len(names)
    return -_longest(flow, order, weight) % work


def bytes_of(instruction: Instruction) -> int:
    """Bytes that a thread reads from global memory into registers, or writes there, 16 at a time. Less at a time are
    taken for numbers that a row has once, which all of its threads read."""
    return 16 * (instruction.name in ("LDG", "STG") and "128" in instruction.opcode.split("."))


def flop_of(instruction: Instruction) -> float:
    """A thread's share of the multiplications and additions of an instruction of the tensor cores."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", instruction.opcode):
        return 2 * math.prod(map(int, found.groups())) / 128  # four warps share it
    if found := re.match(r"HMMA\.(16)(8)(\d+)", instruction.opcode):
        return 2 * math.prod(map(int, found.groups())) / 32
    return 0


def _flow(instructions: list[Instruction]) -> Flow:
    firsts = {0} | {i.target for i in instructions if i.target is not None}
    firsts |= {at + 1 for at, i in enumerate(instructions[:-1]) if i.target is not None or not i.follows}
    starts = sorted(firsts)
    flow = {}
    for start, after in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last = instructions[after - 1]
        following = [] if last.target is None else [last.target]
        if after < len(instructions) and last.follows:
            following.append(after)
        flow[start] = (after, following)
    return flow


def _order(flow: Flow) -> list[int]:
    """Blocks that can be reached, each before what follows it but by the end of a loop."""
    seen, out, stack = {0}, [], [(0, iter(flow[0][1]))]
    while stack:
        block, following = stack[-1]
        to = next((x for x in following if x not in seen), None)
        if to is None:
            out.append(block)
            stack.pop()
        else:
            seen.add(to)
            stack.append((to, iter(flow[to][1])))
    return out[::-1]


def _dominators(flow: Flow, order: list[int]) -> dict[int, set[int]]:
    """By block, those that every way to it passes."""
    before = _before(flow, order)
    out = {block: set(order) for block in order} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = {block} | set.intersection(*(out[x] for x in before[block]))
            changed |= new != out[block]
            out[block] = new
    return out


def _before(flow: Flow, order: list[int]) -> dict[int, list[int]]:
    return {block: [x for x in order if block in flow[x][1]] for block in order}


def _body(flow: Flow, order: list[int], end: int, entry: int) -> set[int]:
    """Blocks from which the end of the loop is reached without its entry, and both."""
    before, body, waiting = _before(flow, order), {entry}, [end]
    while waiting:
        block = waiting.pop()
        if block not in body:
            body.add(block)
            waiting += before[block]
    return body


def _longest(flow: Flow, blocks: list[int], weight: dict[int, float]) -> float:
    """The heaviest way from the first of these blocks on that goes back nowhere and leaves them nowhere."""
    place = {block: i for i, block in enumerate(blocks)}
    longest: dict[int, float] = {}
    for block in reversed(blocks):
        ways = [longest[to] for to in flow[block][1] if place.get(to, -1) > place[block]]
        longest[block] = weight[block] + max(ways, default=0)
    return longest[blocks[0]]
