"""Runs the cells of code of a notebook in this process, in order, as a kernel would: notebook_cells.py FILE."""

import json
import sys
from pathlib import Path
from typing import Any


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    """The notebook's cells of a kind."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def execute(path: Path) -> None:
    """Run the cells with one namespace; a traceback names the cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for i, cell in enumerate(cells(path)):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), names)


if __name__ == "__main__":
    execute(Path(sys.argv[1]))
