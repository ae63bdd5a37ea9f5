"""The JSON schema of the files of comparisons, by which editors complete and check them.

`python -m rlplus.tools.compare.comparison_schema configs/compare/schema.json` writes it (`make schema`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from rlplus.common.durable import write_text
from rlplus.tools.compare.config import Comparison
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config.json_schema import tidy


def json_schema() -> dict[str, Any]:
    """The keys of a comparison, their types and documentation. None is required, as in a run's schema."""
    schema = Comparison.model_json_schema()
    schema["$defs"]["Method"]["properties"]["preset"]["enum"] = [*ALGORITHMS]
    return dict(tidy(schema)) | {"title": "A comparison of rlplus"}


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), json.dumps(json_schema(), indent=1) + "\n")
