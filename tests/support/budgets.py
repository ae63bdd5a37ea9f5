"""The table of what kernels and operations take, tests/kernels/budgets.toml: read, compared and written.

Its numbers are exact for the Triton and, for operations, the torch that it names: more or less of anything is a
difference, so that an improvement is kept. With other releases its numbers of operations are upper limits, and of
kernels the section `limits` holds alone. A number that grew is written with the reason for it.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton

PATH = Path(__file__).parents[1] / "kernels" / "budgets.toml"
COMMAND = 'make kernels WRITE="the reason"'
EXACT = (80, 90)  # compute capabilities that the table has numbers for
NUMBERS = {
    "kernels": ("registers", "spills", "shared", "loops", "once", "end", "estimate"),
    "operations": ("launches", "operations", "waits", "scratch"),
}
# Operations of the table, and the registered ones that each calls.
_LOSS, _LOGPROB = "linear_policy_loss attach_gradients", "linear_logprob"
_GRADIENTS, _DIVERGENCE = "linear_logprob linear_logprob_backward", "linear_divergence attach_gradients"
OPERATIONS = {
    "logprobs": _LOGPROB,
    "logprobs, the vendor's GEMM": _LOGPROB,
    "logprobs, kept tokens": _LOGPROB,
    "logprobs, split head": _LOGPROB,
    "logprobs and gradients": _GRADIENTS,
    "logprobs and gradients, kept tokens": _GRADIENTS,
    "logprobs and gradients, split head": _GRADIENTS,
    "logprobs and gradients, sampled": "sampled_logprob sampled_logprob_backward",
    "loss and gradients": _LOSS,
    "loss and gradients, the vendor's GEMM": _LOSS,
    "loss and gradients, entropy bonus": _LOSS,
    "loss and gradients, chunks": _LOSS,
    "loss and gradients, chunks, the vendor's GEMM": _LOSS,
    "loss and gradients, sampled": _LOSS,
    "loss and gradients, kept tokens": _LOSS,
    "loss and gradients, split head": _LOSS,
    "divergence": _DIVERGENCE,
    "divergence and gradients": _DIVERGENCE,
    "divergence and gradients, chunks": _DIVERGENCE,
    "divergence from the teacher's likeliest tokens, and gradients": "linear_topk_divergence attach_gradients",
}
LIMITED = ("registers", "spills", "instructions", "end")
HEAD = f"""# What every kernel and operation takes. Written by `{COMMAND}`; decision 069.
#
# kernels: registers of a thread; instructions that spill registers; bytes of shared memory; SASS instructions of a
# thread per element of its block (a logit, where the kernel has logits), in an iteration of each innermost loop, and
# once, outside of loops; end: of those, the ones after our GEMM, in a tile that holds none of its rows' targets;
# estimate: milliseconds at the shape of `python -m bench --model`, on an A100 or H200.
# operations: launches of our kernels; operations of torch; waits of the host; bytes of scratch.
# limits: the most of any kernel, by a pattern of what it is; the last that fits counts.
# reason: why a number is as large as it is, where it grew.
"""

Row = dict[str, Any]
Table = dict[str, Any]


def read(path: Path = PATH) -> Table:
    return tomllib.loads(path.read_text())


def place(row: Row) -> tuple[str, str, str]:
    """Section of the table, and names in it: GPU and kernel, variant; or GPU, operation."""
    arch = f"sm_{row['arch']}"
    return ("kernels", f"{arch} {row['kernel']}", row["variant"]) if "kernel" in row else (
        "operations", arch, row["operation"])  # fmt: skip


def committed(row: Row, table: Table) -> Row | None:
    """The table's entry of a row."""
    section, group, name = place(row)
    return table[section].get(group, {}).get(name)


def exact(table: Table, section: str) -> bool:
    """Whether the installed compilers made the numbers."""
    same = triton.__version__ == table["triton"]
    return same and (section == "kernels" or torch.__version__.partition("+")[0] == table["torch"])


def limits(row: Row, table: Table) -> Row:
    """The most that this kernel may take of each number that is limited."""
    aligned = ", aligned" if row["aligned"] else ""
    what = f"Triton {triton.__version__}, sm_{row['arch']}, {row['kernel']}, {row['variant']}{aligned}"
    found = {name: math.inf for name in LIMITED}
    for limit in table["limits"]:
        if re.search(limit["of"], what):
            found |= {name: limit[name] for name in LIMITED if name in limit}
    return found


def differences(rows: Iterable[Row], table: Table, whole: bool = False) -> list[str]:
    """Every number that is not as the table says, and with `whole` every entry that no row is of."""
    out, seen = [], set()
    for row in rows:
        section, group, name = place(row)
        seen.add((section, group, name))
        if row["arch"] not in EXACT or (section == "kernels" and not exact(table, section)):
            continue
        entry, here = committed(row, table), f"{group}, {name}"
        if entry is None:
            out.append(f"{here}: want an entry in {PATH.name}; got none")
            continue
        for number in NUMBERS[section]:
            want, got = entry.get(number), row.get(number)
            if want != got and (exact(table, section) or grew(want, got)):
                out.append(f"{here}, {number}: want {want}; got {got}")
    entries = {(s, g, n) for s in NUMBERS for g in table[s] for n in table[s][g]}
    out += [
        f"{g}, {n}: want it compiled or run; it is in {PATH.name} alone" for _, g, n in sorted(entries - seen) if whole
    ]
    return out


def grew(before: Any, now: Any) -> bool:
    """Whether a number, or one of a list, is larger, or there are more."""
    old, new = (x if isinstance(x, list) else [x] for x in (before, now))
    if None in old + new:
        return None not in new
    return len(new) > len(old) or any(b > a for a, b in zip(old, new, strict=False))


def updated(rows: Iterable[Row], table: Table, reason: str) -> Table:
    """The table with the rows' numbers in the place of its own. An entry of which a number grew gets the reason; of
    another the reason stays if its numbers do. An entry that is new needs none."""
    new = {"triton": triton.__version__, "torch": torch.__version__.partition("+")[0], "limits": table["limits"]}
    new |= {section: {} for section in NUMBERS}
    for row in rows:
        section, group, name = place(row)
        numbers = {number: row[number] for number in NUMBERS[section] if row.get(number) is not None}
        before = committed(row, table)
        if before is not None and any(grew(before.get(x), numbers.get(x)) for x in NUMBERS[section]):
            numbers["reason"] = reason
        elif before is not None and before.items() >= numbers.items() and "reason" in before:
            numbers["reason"] = before["reason"]
        new[section].setdefault(group, {})[name] = numbers
    return new


def write(table: Table, path: Path = PATH) -> None:
    lines = [HEAD, *(f"{name} = {_toml(table[name])}" for name in ("triton", "torch")), "", "limits = ["]
    lines += [*(f"    {_toml(limit)}," for limit in table["limits"]), "]"]
    for section in NUMBERS:
        for group, entries in sorted(table[section].items()):
            lines += ["", f"[{section}.{_toml(group)}]"]
            lines += [f"{_toml(name)} = {_toml(entry)}" for name, entry in sorted(entries.items())]
    path.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(x)}" for name, x in value.items()) + " }"
    return json.dumps(value)
