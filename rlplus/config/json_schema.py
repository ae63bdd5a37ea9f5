"""The JSON schema of configuration files, by which editors complete and check them.

`python -m rlplus.config.json_schema configs/schema.json` writes it (`make schema`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlplus.algorithm import ALGORITHMS, RECIPES, Refill, Shaping
from rlplus.common.durable import write_text
from rlplus.config.benchmarks import BENCHMARKS
from rlplus.config.schema import Config
from rlplus.loss import Objective
from rlplus.loss.objective import KL_ESTIMATORS, MISMATCH_MODES
from rlplus.loss.surrogates import EXTERNAL, INTERNAL


def json_schema() -> dict[str, Any]:
    """The keys of a file, their types and documentation.

    None is required, as the command line or a stage may have it.
    """
    schema = Config.model_json_schema()
    algorithm = schema["$defs"]["AlgorithmConfig"]["properties"]
    algorithm["preset"]["enum"] = [*ALGORITHMS]
    algorithm["objective"] |= options(Objective)
    algorithm["objective"]["properties"] |= {
        "internal": {"anyOf": [{"enum": [*INTERNAL]}, {"type": "string", "pattern": r"^[\w.]+:\w+$"}]},
        "external": {"enum": [*EXTERNAL]},
        "kl_estimator": {"enum": [*KL_ESTIMATORS]},
        "mismatch_mode": {"enum": [*MISMATCH_MODES]},
    }
    algorithm["recipe"] |= options(*RECIPES.values())
    algorithm["recipe"]["properties"] |= {"name": {"enum": [*RECIPES]}}
    for name, kind in (("refill", Refill), ("shaping", Shaping)):
        algorithm[name]["anyOf"] = [{"type": "object"} | options(kind), {"type": "null"}]
    for name in ("EvaluationConfig", "ValidationConfig"):
        schema["$defs"][name]["properties"]["benchmarks"]["items"] = {"enum": [*BENCHMARKS]}
    stage = {key: {"$ref": f"#/properties/{key}"} for key in schema["properties"] if key != "output_dir"}
    schema["properties"]["stages"] = {
        "description": "Runs that follow each other: sections that are laid over the rest of the file, one per run.",
        "type": "array",
        "items": {"type": "object", "properties": stage, "additionalProperties": False},
    }
    return dict(tidy(schema)) | {"title": "A run of rlplus"}


def options(*kinds: type) -> dict[str, Any]:
    """The fields of dataclasses, whose defaults are not those of every preset."""
    fields: dict[str, Any] = {}
    for kind in kinds:
        for name, field in TypeAdapter(kind).json_schema().get("properties", {}).items():
            field.pop("default", None)
            fields.setdefault(name, field)
    return {"properties": fields, "additionalProperties": False}


def tidy(node: Any) -> Any:
    """Without the titles that pydantic makes of names, what is required, and the defaults of whole sections."""
    if isinstance(node, list):
        return [tidy(part) for part in node]
    if not isinstance(node, dict):
        return node
    noise = {"title": str, "required": list, "default": dict}
    kept = {key: tidy(value) for key, value in node.items() if not isinstance(value, noise.get(key, ()))}
    if isinstance(text := kept.get("description"), str):
        kept["description"] = " ".join(text.split())
    return kept


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), json.dumps(json_schema(), indent=1) + "\n")
