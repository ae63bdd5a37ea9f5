"""The JSON schema of configurations: made from the types, documented throughout; it accepts and refuses as they do."""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from run_files import MINIMAL, write_minimal

from rlplus.loss import Objective
from rlplus.loss.objective.objective import RANGES
from rlplus.tools.compare.comparison_schema import json_schema as comparison_schema
from rlplus.train.algorithm import ALGORITHMS, RECIPES
from rlplus.train.config import load_config
from rlplus.train.config.json_schema import json_schema
from rlplus.train.config.loading import read_yaml

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted([*FOLDER.glob("*.yaml"), *FOLDER.parent.glob("experiments/*.yaml")])
COMPARISONS = sorted([*FOLDER.glob("compare/*.yaml"), *FOLDER.parent.glob("experiments/compare/*.yaml")])
SCHEMA, COMPARISON = json_schema(), comparison_schema()


def header(schema: Path, path: Path) -> str:
    return f"# yaml-language-server: $schema={os.path.relpath(schema, path.parent)}\n"


def problems(values: Any, schema: dict[str, Any] = SCHEMA) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(values)]


@pytest.mark.parametrize(("folder", "schema"), [(".", SCHEMA), ("compare", COMPARISON)], ids=["run", "comparison"])
def test_the_committed_schema_is_that_of_the_types(folder: str, schema: dict[str, Any]) -> None:
    committed = json.loads((FOLDER / folder / "schema.json").read_text())
    assert committed == schema, "want `make schema` after a change of the types"
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid_and_name_the_schema(path: Path) -> None:
    assert problems(read_yaml(path)) == []
    assert path.read_text().startswith(header(FOLDER / "schema.json", path))


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_shipped_comparisons_are_valid_and_name_their_schema(path: Path) -> None:
    assert problems(read_yaml(path), COMPARISON) == []
    assert path.read_text().startswith(header(FOLDER / "compare/schema.json", path))


def test_every_value_that_a_run_writes_is_valid(tmp_path: Path) -> None:
    for preset in ALGORITHMS:
        teacher = ["algorithm.recipe.teacher=a-teacher"] if preset in ("gkd", "opd") else []
        written = load_config(write_minimal(tmp_path), [f"algorithm.preset={preset}", *teacher]).to_yaml()
        assert problems(yaml.safe_load(written)) == []


def keys(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, key in schema.get("properties", {}).items():
        yield f"{prefix}{name}", key
    for name, section in schema.get("$defs", {}).items():
        yield from keys(section, f"{name}.")


@pytest.mark.parametrize(("schema", "least"), [(SCHEMA, 100), (COMPARISON, 20)], ids=["run", "comparison"])
def test_every_key_and_section_is_documented(schema: dict[str, Any], least: int) -> None:
    found = dict(keys(schema))
    assert len(found) > least
    for name, key in found.items():
        section = schema["$defs"][key["$ref"].rpartition("/")[2]] if "$ref" in key else key
        assert len(section.get("description", "")) >= 10, name
        assert "\n" not in section["description"], name


def with_value(key: str, value: Any) -> dict[str, Any]:
    """The minimal configuration with one more value, at a dotted key."""
    whole: dict[str, Any] = json.loads(json.dumps(MINIMAL))
    *sections, last = key.split(".")
    place = whole
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return whole


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("trian", None, 3),
        ("train.lrr", None, 3),
        ("train.lr", 1e-6, "fast"),
        ("train.zero_stage", 2, 4),
        ("train.betas", [0.9, 0.95], [0.9]),
        ("data.path", ["a.jsonl", "b.jsonl"], [1]),
        ("evaluation.data.path", "a.jsonl", 1),
        ("evaluation.k", [1, 8], [0]),
        ("evaluation.benchmarks", ["amc", "arc_c"], ["amd"]),
        ("reward.function", "my_module:mine", "my module:mine"),
        ("reward.function", {"choice": 1.0, "my_module:mine": 0.5}, {"choice": "1"}),
        ("model.lora", {"rank": 8}, {"rnk": 8}),
        ("model.overrides", {"rope_theta": 1}, 1),
        ("algorithm.preset", "dapo", "dpao"),
        ("algorithm.objective.gamma", 0.5, "half"),
        ("algorithm.objective.gama", None, 0.5),
        ("algorithm.objective.internal", "clip", "clipped"),
        ("algorithm.objective.internal", "my_module:mine", "my module:mine"),
        ("algorithm.objective.external", "shaped", "shape"),
        ("algorithm.objective.kl_estimator", "k3-unbiased", "k1"),
        ("algorithm.objective.mismatch_mode", "mask", "masks"),
        ("algorithm.recipe", {"name": "gate", "solved": 1}, {"name": "gates"}),
        ("algorithm.recipe.sovled", None, 1),
        ("algorithm.recipe", {"solved": 1}, {"solved": -1}),
        ("algorithm.recipe", {"name": "critic", "gae_lambda": 1}, {"name": "critic", "gae_lambda": 7}),
        ("algorithm.recipe", {"name": "my_file.py:Mine", "mine": 1}, {"name": "gate", "critic_updates": 3}),
        ("algorithm.objective.clip_low", 0.1, -1),
        ("algorithm.objective.dual_clip", 3, 1),
        ("algorithm.refill", None, {"lo": 1}),
        ("algorithm.shaping", {"wrong": -1.0}, {"wrong": "x"}),
        ("stages", [{"algorithm": {"preset": "sft"}}], [{"algorithm": {"preset": "stf"}}]),
        ("stages", [], [{"output_dir": "runs/x"}]),
    ],
)
def test_mistakes_are_found(key: str, right: Any, wrong: Any) -> None:
    """`right` None: there is no such key, or null is a value of it."""
    if right is not None or key == "algorithm.refill":
        assert problems(with_value(key, right)) == []
    assert problems(with_value(key, wrong)) != []


def test_registered_names_are_choices() -> None:
    algorithm = SCHEMA["$defs"]["AlgorithmConfig"]["properties"]
    assert algorithm["preset"]["enum"] == [*ALGORITHMS]
    for name, options in RECIPES.items():
        assert problems(with_value("algorithm.recipe", {"name": name})) == []
        assert problems(with_value("algorithm.recipe", options().model_dump())) == []


def test_the_schema_of_an_objective_has_the_ranges_that_it_checks() -> None:
    for name, key in SCHEMA["$defs"]["Objective"]["properties"].items():
        for value in (-1.0, 0.0, 0.5, 1.0, 1.5) if name in RANGES else ():
            valid = Draft202012Validator(key).is_valid(value)
            with nullcontext() if valid else pytest.raises(ValueError, match=f"want {name} a finite number"):
                Objective(**{name: value})
    assert {*RANGES} == {f.name for f in fields(Objective) if not isinstance(getattr(Objective(), f.name), str)}


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("run", "demo.yaml", 1),
        ("method", None, {}),
        ("methods", {"A": {"preset": "grpo", "after": "B"}}, {"A": {"preset": "grop"}}),
        ("methods", {}, {"A": {"preset": "grpo", "overides": {}}}),
        ("studies", {"T": {"settings": ["x"], "methods": ["A"]}}, {"T": {"settings": ["x"], "methods": []}}),
        ("studies", {"T": {"seeds": 3}}, {"T": {"seeds": 0}}),
        ("search", {"rates": [1e-3, 3e-3]}, {"rates": [1e-3, 0]}),
        ("search", {"seed": 1000}, {"seed": 999}),
        ("settings", {"x": {"prepare": "file:make", "options": {"noise": 0.2}}}, {"x": {"prepare": "file.make"}}),
        ("settings", {"x": {"overrides": {"train.lr": 1}}}, {"x": {"option": {}}}),
    ],
)
def test_mistakes_in_comparisons_are_found(key: str, right: Any, wrong: Any) -> None:
    """`right` None: there is no such key."""
    if right is not None:
        assert problems({key: right}, COMPARISON) == []
    assert problems({key: wrong}, COMPARISON) != []
