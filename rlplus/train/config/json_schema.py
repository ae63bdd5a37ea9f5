"""The JSON schema of configuration files, by which editors complete and check them.

`python -m rlplus.train.config.json_schema configs/schema.json` writes it (`make schema`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlplus.common.durable import write_text
from rlplus.common.section import REFERENCE
from rlplus.loss import Objective
from rlplus.loss.objective.objective import KL_ESTIMATORS, MISMATCH_MODES, RANGES
from rlplus.loss.objective.surrogates import EXTERNAL, INTERNAL
from rlplus.train.algorithm import ALGORITHMS, RECIPES
from rlplus.train.config.benchmarks import BENCHMARKS
from rlplus.train.config.schema import Config

_REFERENCE = f"^{REFERENCE}$"


def json_schema() -> dict[str, Any]:
    """The keys of a file, their types and documentation.

    None is required, as the command line or a stage may have it.
    """
    schema = Config.model_json_schema()
    algorithm = schema["$defs"]["AlgorithmConfig"]["properties"]
    algorithm["preset"]["enum"] = [*ALGORITHMS]
    schema["$defs"]["Objective"] = _objective()
    algorithm["objective"] = {"$ref": "#/$defs/Objective", "description": algorithm["objective"]["description"]}
    for name, options in RECIPES.items():
        schema["$defs"][options.__name__]["properties"]["name"] |= {"description": f"The recipe is {name}."}
    for name in ("EvaluationConfig", "ValidationConfig"):
        schema["$defs"][name]["properties"]["benchmarks"]["items"] = {"enum": [*BENCHMARKS]}
    stage = {key: {"$ref": f"#/properties/{key}"} for key in schema["properties"] if key != "output_dir"}
    schema["properties"]["stages"] = {
        "description": "Runs that follow each other: sections that are laid over the rest of the file, one per run.",
        "type": "array",
        "items": {"type": "object", "properties": stage, "additionalProperties": False},
    }
    schema = tidy(schema)
    named = {"type": "string", "pattern": _REFERENCE, "description": "A recipe of your own, see docs/extending.md."}
    schema["$defs"]["AlgorithmConfig"]["properties"]["recipe"]["anyOf"].append(
        {"type": "object", "properties": {"name": named}, "required": ["name"]}
    )
    return schema | {"title": "A run of rlplus"}


def _objective() -> dict[str, Any]:
    """The fields of an objective, their choices and ranges."""
    schema = TypeAdapter(Objective).json_schema() | {"additionalProperties": False}
    choices: dict[str, dict[str, Any]] = {
        "internal": {"anyOf": [{"enum": [*INTERNAL]}, {"type": "string", "pattern": _REFERENCE}]},
        "external": {"enum": [*EXTERNAL]},
        "kl_estimator": {"enum": [*KL_ESTIMATORS]},
        "mismatch_mode": {"enum": [*MISMATCH_MODES]},
    }
    for name, limits in (choices | RANGES).items():
        key = schema["properties"][name]
        key.get("anyOf", [key])[0].update(limits)  # the number, where null is allowed too
    return schema


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
