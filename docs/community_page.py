"""The tables of community.md, made of the files of `rlplus-bench submit` under bench/results/community/."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from bench import output
from bench.peers import METHODS
from rlplus.common.errors import check_name

FOLDER = Path(__file__).parent.parent / "bench/results/community"
SCHEMA = "submission_schema.json"
NONE = "No file has been sent yet."
Table = Callable[[tuple[str, ...], Iterator[tuple[str, ...]]], str]
Submission = dict[str, Any]


def part(table: Table, folder: Path = FOLDER) -> str:
    """A table of all GPUs, then each one's own tables; or a sentence that there is none."""
    found = submissions(folder)
    if not found:
        return NONE
    header = (
        "GPU",
        "`triton`, ×bare",
        "MB",
        "driver",
        "torch",
        "Triton",
        "clocks after the rounds",
        "date",
        "revision",
    )
    sections = (f"## {heading(each)}\n\n{tables(each['result'])}" for each in found)
    return "\n\n".join([table(header, map(row, found)), *sections])


def submissions(folder: Path) -> list[Submission]:
    """The files by GPU and date, checked. ValueError names a file that is none, and its fault."""
    paths = (path for path in sorted(folder.glob("*.json")) if path.name != SCHEMA)
    return sorted((checked(path) for path in paths), key=lambda each: (each["result"]["device"], each["date"]))


def checked(path: Path) -> Submission:
    """The file's content, with no markup in its texts."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: want JSON; {error}") from None
    if isinstance(found, dict) and found.get("rehearsal") is True:
        raise ValueError(f"{path.name}: want a GPU's result; got a rehearsal on a CPU")
    schema = json.loads((FOLDER / SCHEMA).read_text(encoding="utf-8"))
    if (error := best_match(Draft202012Validator(schema).iter_errors(found))) is not None:
        raise ValueError(f"{path.name}: {'.'.join(map(str, error.absolute_path)) or 'the file'}: {error.message}")
    for case in found["result"]["cases"]:
        for each in case["rows"]:
            check_name(f"{path.name}: as a method", each["method"], METHODS)
    plain: Submission = without_markup(found)
    return plain


def without_markup(value: Any) -> Any:
    """The value with all texts as Markdown shows them literally: they come from strangers."""
    if isinstance(value, dict):
        return {without_markup(name): without_markup(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_markup(each) for each in value]
    if isinstance(value, str):
        text = " ".join(value.split())
        return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("[", "&#91;")
    return value


def heading(submission: Submission) -> str:
    return f"{submission['result']['device']}, {submission['date']}"


def row(submission: Submission) -> tuple[str, ...]:
    """The main numbers of a file: the `triton` backend's, over the bare GEMMs."""
    result = submission["result"]
    case = output.cases_of(result, "main").get("bfloat16", {"rows": []})
    ours = output.row_of(case, "triton")
    versions = (result["versions"][name] for name in ("driver", "torch", "triton"))
    clocks = ", ".join(f"{name} {value:g}" for name, value in (case.get("clocks") or {}).items())
    speed, memory = (output.ratio(ours), output.number(ours.get("extra_mb"), ".0f")) if ours else ("", "")
    return result["device"], speed, memory, *versions, clocks, submission["date"], f"`{result['revision']}`"


def tables(result: output.Result) -> str:
    """All methods side by side, as the manual shows our own results."""
    return f"{output.main_table(result)}\n\n{output.side_table(result)}".strip()
