"""The JSON schema of the files of comparisons, by which editors complete and check them.

`python -m rlplus.compare.comparison_schema configs/compare/schema.json` writes it (`make schema`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from rlplus.algorithm import ALGORITHMS
from rlplus.compare.config import Comparison
from rlplus.config.json_schema import options, tidy
from rlplus.demo.base import Recipe
from rlplus.demo.task import Demonstrator, Task
from rlplus.durable import write_text


def json_schema() -> dict[str, Any]:
    """The keys of a comparison, their types and documentation. None is required, as in that of a run."""
    schema = Comparison.model_json_schema()
    sections = schema["$defs"]
    sections["Method"]["properties"]["preset"]["enum"] = [*ALGORITHMS]
    setting = sections["Setting"]["properties"]
    base = options(Recipe)
    base["properties"].pop("seed")  # those of the studies
    base["properties"]["task"] = {"type": "object"} | options(Task)
    setting["base"]["anyOf"] = [{"type": "object"} | base, {"type": "null"}]
    setting["demonstrator"] |= options(Demonstrator)
    return dict(tidy(schema)) | {"title": "A comparison of rlplus"}


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), json.dumps(json_schema(), indent=1) + "\n")
