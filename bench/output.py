"""The results: a JSON file that grows with every case, and tables for the manual."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rlplus.common.durable import write_text
from rlplus.loss.guard.verdicts import versions

from .machine import hardware, revision
from .measure import Row, package_version
from .peers import METHODS

Result = dict[str, Any]
LOSSES = {"policy": "RL-PLUS", "other": "RL-PLUS", "grpo": "GRPO", "cross-entropy": "cross-entropy", "forward": ""}
SIZES = ("N", "H", "V")
PACKAGES = ("torch", "triton", "numpy", *sorted({m.package for m in METHODS.values()} - {"torch"}))


class Record:
    """A result that is written after every case; the file is always complete, so an interruption loses one case."""

    def __init__(self, path: Path, suite: str, device: str, threads: int) -> None:
        self.path = path
        cuda, own = device == "cuda", versions()
        self.result: Result = {
            "suite": suite,
            "complete": False,
            "revision": revision(),
            "device": torch.cuda.get_device_name() if cuda else f"{platform.system()} {platform.machine()}",
            "clock": "CUDA events" if cuda else "CPU time of the process, all threads",
            "threads": threads,
            "hardware": hardware(cuda),
            "versions": {name: package_version(name) for name in PACKAGES}
            | {name: own[name] for name in ("driver", "kernels")}
            | {"python": platform.python_version()},
            "cases": [],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def put(self, case: dict[str, Any]) -> None:
        """Add a case, or replace it by a more complete version."""
        cases = self.result["cases"]
        if not any(case is known for known in cases):
            cases.append(case)
        self.save()

    def save(self) -> None:
        write_text(self.path, json.dumps(self.result, indent=1) + "\n")


# ---- tables


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def ratio(row: Row) -> str:
    """The median with minimum and maximum; or the reason why there is none."""
    if row["status"] != "ok":
        return str(row["status"])
    r = row["ratio"]
    return f"{r['median']:.2f} ({r['least']:.2f}–{r['greatest']:.2f})"


def cell(row: Row) -> str:
    """`ratio` with the reason shortened to a few words."""
    text = ratio(row).partition(": a ")[0].partition(": no ")[0].partition("; ")[0]
    return ":".join(text.split(":")[:2]) if text.startswith("failed: ") else text


def lines(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


NONE = 0.05  # a smaller difference of two methods' medians is called none


def alike(one: Row, other: Row) -> bool:
    low, high = sorted(row["ratio"]["median"] for row in (one, other))
    return bool(high < (1 + NONE) * low)


def verdict(case: dict[str, Any]) -> str:
    """The fastest method of a case, and those that do not differ from it."""
    kinds = {"policy", "grpo", "cross-entropy", "forward"}
    rho = case["rows"][0]["rho"]
    compared = [row for row in case["rows"] if row["status"] == "ok" and row["rho"] == rho]
    compared = [row for row in compared if METHODS[row["method"]].kind in kinds]
    if len(compared) < 2:
        return ""
    first, *rest = sorted(compared, key=lambda row: row["ratio"]["median"])
    same = [row["method"] for row in rest if alike(first, row)]
    return f"fastest: {first['method']}" + f"; no difference (below {NONE:.0%}): {', '.join(same)}" * bool(same)


def title(case: dict[str, Any]) -> str:
    return f"{case['name']}: N={case['N']}, H={case['H']}, V={case['V']}, {case['dtype']}, {case['rounds']} rounds"


def case_table(case: dict[str, Any]) -> str:
    """All results of a case, as the program prints them."""
    header = ("method", "rho", "ms", "×bare", "page faults", "MB", "logprob error", "dhidden", "dweight")
    rows = [
        (
            row["method"], f"{row['rho']:.2f}", number(row.get("ms", {}).get("median"), ".4g"), ratio(row),
            number(row.get("page_faults"), ".0f"), number(row.get("extra_mb"), ".0f"),
            number(row.get("logprob_error"), ".1e"), number(row.get("dhidden_error"), ".1e"),
            number(row.get("dweight_error"), ".1e"),
        )
        for row in case["rows"]
    ]  # fmt: skip
    parts = [title(case), lines(header, rows), *filter(None, [verdict(case)])]
    if state := case.get("clocks"):
        parts.append("after the rounds: " + ", ".join(f"{name} {value:g}" for name, value in state.items()))
    return "\n".join([*parts, *kernel_tables(case)]) + "\n"


def kernel_tables(case: dict[str, Any]) -> list[str]:
    """The time of each kernel in one call, of the methods that were profiled."""
    tables = []
    for row in case["rows"]:
        total = sum(kernel["ms"] for kernel in row.get("kernels", ()))
        cells = [
            (kernel["kernel"][:70], str(kernel["launches"]), f"{kernel['ms']:.3f}", f"{kernel['ms'] / total:.1%}")
            for kernel in row.get("kernels", ())
        ]
        if cells:
            tables.append(lines((f"kernels of {row['method']}", "launches", "ms", "share"), cells))
    return tables


def machine(result: Result) -> str:
    parts = [result["device"]]
    if "instructions" in result["hardware"]:
        bf16 = "with" if result["hardware"]["bf16_instructions"] else "without"
        parts += [f"{result['hardware']['instructions']} {bf16} bf16 instructions", threads(result)]
    return ", ".join([*parts, f"torch {result['versions']['torch']}"])


def threads(result: Result) -> str:
    return f"{result['threads']} thread{'s' * (result['threads'] > 1)}"


def row_of(case: dict[str, Any], method: str, rho_at_most: float = 1.0) -> Row | None:
    """The method's row with the largest rho up to the given one."""
    rows = [row for row in case["rows"] if row["method"] == method and row["rho"] <= rho_at_most + 0.02]
    return max(rows, key=lambda row: row["rho"], default=None)


def cases_of(result: Result, name: str) -> dict[str, dict[str, Any]]:
    """The cases of that name by dtype."""
    return {case["dtype"]: case for case in result["cases"] if case["name"] == name}


def sweep_of(result: Result) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The sweep's cases by (dtype, N, H, V)."""
    cases = [case for case in result["cases"] if case["name"].startswith("sweep")]
    return {(case["dtype"], *(case[size] for size in SIZES)): case for case in cases}


def bars_table(results: dict[str, Result]) -> str:
    """CPU time over the bare GEMMs, by dtype, method and share of rows with a gradient, for each number of threads."""
    columns = {threads(r): cases for r in results.values() if (cases := cases_of(r, "bars"))}
    first = next(iter(columns.values()), {})
    rows = []
    for dtype, case in first.items():
        accumulator = 0.0 if dtype == "float32" else 4e-6 * case["V"] * case["H"]
        for method, share in (("cpp", 1.0), ("cpp", 0.25), ("cpp logprob", 1.0), ("cpp logprob frozen", 1.0)):
            found = [row_of(c[dtype], method, share) if dtype in c else None for c in columns.values()]
            if not any(found):
                continue
            sums = 0.0 if "frozen" in method else accumulator
            mb = None if not found[0] or found[0].get("extra_mb") is None else found[0]["extra_mb"] - sums
            cells = (ratio(row) if row else "" for row in found)
            rows.append([dtype, method, f"{share:g}", *cells, number(mb, ".0f")])
    shape = next(iter(first.values()), None)
    if shape is None:
        return ""
    head = f"N={shape['N']}, H={shape['H']}, V={shape['V']}, half of the rows demonstrated:"
    header = ("dtype", "method", "rows with a gradient", *(f"×bare, {name}" for name in columns), "MB")
    foot = "MB: peak beyond inputs, dhidden, dW and, for bfloat16, an fp32 accumulator of dW."
    return f"{head}\n\n{lines(header, rows)}\n\n{foot}\n"


def sweep_table(results: dict[str, Result]) -> str:
    """The method of the sweeps at every shape, for each number of threads, and the range of its ratios by dtype."""
    columns = {threads(r): cases for r in results.values() if (cases := sweep_of(r))}
    shapes = sorted({shape for cases in columns.values() for shape in cases})
    if not shapes:
        return ""
    rows: list[list[str]] = []
    medians: dict[str, list[float]] = {}
    for shape in shapes:
        found = [cases[shape]["rows"][-1] for cases in columns.values() if shape in cases]
        cells = [ratio(cases[shape]["rows"][-1]) if shape in cases else "" for cases in columns.values()]
        rows.append([*map(str, shape), *cells, number(found[0].get("extra_mb"), ".0f")])
        medians.setdefault(shape[0], []).extend(row["ratio"]["median"] for row in found if row["status"] == "ok")
    method = next(iter(next(iter(columns.values())).values()))["rows"][-1]["method"]
    ranges = [
        f"{min(found):.2f} to {max(found):.2f} × the bare GEMMs in {dtype}" for dtype, found in medians.items() if found
    ]
    head = f"`{method}` by shape: {'; '.join(ranges)}."
    header = ("dtype", *SIZES, *(f"×bare, {name}" for name in columns), "MB")
    foot = "MB: peak beyond inputs, dhidden and dW. In bf16 it includes an fp32 accumulator of dW, 4 V H bytes."
    return f"{head}\n\n{lines(header, rows)}\n\n{foot}\n"


def bf16_note(results: dict[str, Result]) -> str:
    """A note on the ratios in bf16 on a processor that has no instructions for it."""
    if all(result["hardware"].get("bf16_instructions", True) for result in results.values()):
        return ""
    return (
        "This processor has no bf16 instructions. torch imitates them, which makes its bf16 GEMMs several times slower "
        "than those in fp32, while `cpp` multiplies in fp32: read the ratios in float32.\n"
    )


def faults_note(results: dict[str, Result]) -> str:
    """A note on the page faults of the timed calls, which show whether their memory was there before."""
    rows = [row for result in results.values() for case in result["cases"] for row in case["rows"]]
    found = [(row["page_faults"], row["method"]) for row in rows if row["status"] == "ok" and "page_faults" in row]
    if not found:
        return ""
    bare = max((faults for faults, name in found if METHODS[name].kind == "bare"), default=0)
    most, method = max(found)
    return (
        "Every call is timed on memory that the process has already. Page faults of a call, the median: at most "
        f"{bare:.0f} for the bare GEMMs, {most:.0f} for any method (`{method}`).\n"
    )


def main_table(result: Result) -> str:
    """All methods side by side: speed and memory by dtype, accuracy of bf16."""
    separate = cases_of(result, "apart")  # cases of the same shape
    cases = {
        dtype: case | {"rows": case["rows"] + separate.get(dtype, {"rows": []})["rows"]}
        for dtype, case in cases_of(result, "main").items()
    }
    if not cases:
        return ""
    any_case = next(iter(cases.values()))
    low = cases.get("bfloat16", any_case)
    weighed = {dtype for dtype, case in cases.items() if any("extra_mb" in row for row in case["rows"])}
    header = ["method", "loss"]
    for dtype in cases:
        header += [f"{dtype} ×bare", *["MB"] * (dtype in weighed)]
    header += [f"logprob error, {low['dtype']}", "dW error"]
    rows = []
    for name in dict.fromkeys(row["method"] for case in cases.values() for row in case["rows"]):
        if METHODS[name].kind == "bare":
            continue
        cells = [f"`{name}`" if METHODS[name].package == "rlplus" else name, LOSSES[METHODS[name].kind]]
        for dtype, case in cases.items():
            row = row_of(case, name) or {"status": ""}
            cells += [cell(row), *[number(row.get("extra_mb"), ".0f")] * (dtype in weighed)]
        row = row_of(low, name) or {}
        rows.append([*cells, number(row.get("logprob_error"), ".0e"), number(row.get("dweight_error"), ".1e")])
    accumulator = any_case["V"] * any_case["H"] * 4 / 1e6
    head = f"{machine(result)}, N={any_case['N']}, H={any_case['H']}, V={any_case['V']}:"
    foot = (
        f"MB: peak beyond inputs, dhidden and dW; an fp32 accumulator of dW alone would be {accumulator:.0f}. "
        "Errors are those against fp64: the greatest of a logprob; dW's relative to its norm. `cpp` with `into` adds "
        "dW to a given fp32 buffer, `entropy` has an entropy bonus; `none` is a cross-entropy without reduction, "
        "under the RL-PLUS loss. The range is that of all rounds; a difference of two medians below 5 % is called none."
    )
    return f"{head}\n\n{lines(header, rows)}\n\n{foot}\n"


def side_table(result: Result) -> str:
    """Logprobs without gradients, and the methods that were measured with fewer rows with a gradient."""
    forward, low = cases_of(result, "forward"), cases_of(result, "main").get("bfloat16")
    parts = []
    if low is not None and len(shares := sorted({round(row["rho"], 2) for row in low["rows"]}, reverse=True)) > 1:
        names = dict.fromkeys(row["method"] for row in low["rows"] if row["rho"] < shares[0] - 0.02)
        rows = [[name, *(cell(row) if (row := row_of(low, name, s)) else "" for s in shares)] for name in names]
        parts.append(lines(("share of rows with a gradient", *(f"{share:g}" for share in shares)), rows))
    for case in forward.values():
        rows = [
            [row["method"].removesuffix(" forward"), cell(row), number(row.get("extra_mb"), ".0f"),
             number(row.get("logprob_error"), ".0e")]
            for row in case["rows"] if METHODS[row["method"]].kind != "bare"
        ]  # fmt: skip
        parts.append(lines((f"forward only, {case['dtype']}", "×bare (1u)", "MB", "logprob error"), rows))
    return "\n\n".join(parts) + "\n"


ON_GPU = (
    "triton", "triton into", "Liger linear CE", "naive torch", "TRL", "verl triton", "torch", "verl torch", "CCE none",
    "Liger GRPO tuned",
)  # fmt: skip


def gpu_table(result: Result) -> str:
    """Some methods side by side on a GPU: speed, memory and accuracy in bf16."""
    case = cases_of(result, "main")["bfloat16"]
    case = case | {"rows": [row for found in result["cases"] if same_sizes(found, case) for row in found["rows"]]}
    rows = []
    for name in ON_GPU:
        row = row_of(case, name) or {"status": ""}
        method = f"rlplus, `{name}`" if METHODS[name].package == "rlplus" else name
        errors = number(row.get("logprob_error"), ".0e"), number(row.get("dweight_error"), ".1e")
        rows.append([method, LOSSES[METHODS[name].kind], cell(row), number(row.get("extra_mb"), ".0f"), *errors])
    header = ("method", "loss", "×bare", "MB", "error of a logprob", "error of dW")
    used = result["versions"]
    versions = f"revision {result['revision']}, torch {used['torch']}, Triton {used['triton']}"
    sizes = f"N={case['N']}, H={case['H']}, V={case['V']}, bf16"
    return f"{lines(header, rows)}\n\n{result['device']}, {versions}, {sizes}.\n"


def other_sizes_table(result: Result) -> str:
    """`triton` and the fastest other method at every size but the main case's, forward and backward."""
    rows, seen = [], set()
    for case in result["cases"]:
        sizes = (case["dtype"], *(case[size] for size in SIZES))
        own = row_of(case, "triton")
        if case["name"] not in ("sweep", "small") or own is None or sizes in seen:
            continue
        seen.add(sizes)
        measured = [row for row in case["rows"] if row["status"] == "ok" and row["method"] not in NOT_PEERS]
        peer = min(measured, key=lambda row: row["ratio"]["median"], default=None)
        beside = f"{peer['method']} {peer['ratio']['median']:.2f}" if peer else ""
        beside += " (no difference)" * bool(peer and own["status"] == "ok" and alike(own, peer))
        rows.append([*map(str, sizes), ratio(own), beside, number(own.get("extra_mb"), ".0f")])
    if not rows:
        return ""
    return "Other sizes:\n\n" + lines(("dtype", *SIZES, "`triton`, ×bare", "fastest other method", "MB"), rows) + "\n"


NOT_PEERS = {name for name, method in METHODS.items() if method.kind == "bare" or method.package == "rlplus"}


def same_sizes(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return not one["forward"] and all(one[name] == other[name] for name in (*SIZES, "dtype"))


def manual_part(results: dict[str, Result]) -> str:
    """The manual's text about measurements."""
    processors = {name: r for name, r in results.items() if name.startswith("cpu")}
    parts = [bars_table(processors), sweep_table(processors)]
    if processors:
        parts += [main_table(next(iter(processors.values()))), faults_note(processors), bf16_note(processors)]
    if "gpu" in results:
        sizes = results.get("gpu-sizes", results["gpu"])
        parts += [main_table(results["gpu"]), side_table(results["gpu"]), other_sizes_table(sizes)]
    else:
        parts.append("GPU: not measured yet.\n")
    return "\n".join(part for part in parts if part)


def load(folder: Path) -> dict[str, Result]:
    """The results that the manual shows, by the name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "quick"}
