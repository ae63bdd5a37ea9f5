"""YAML file and dotted overrides -> a Config per stage, with one clear line per problem."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from difflib import SequenceMatcher
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rlplus.common.errors import hint, without_passwords
from rlplus.common.textfiles import read_text
from rlplus.common.yaml_text import parse_yaml
from rlplus.loss.objective.objective import Objective
from rlplus.train.algorithm import RecipeOptions
from rlplus.train.config.folders import DATA_SUFFIXES
from rlplus.train.config.schema import Config
from rlplus.train.config.synonyms import synonym

_NAMED = 4  # problems of a recorded one in a message


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's configuration: the last stage's, if the file has stages. See `load_stages`."""
    return load_stages(path, overrides)[-1]


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> list[Config]:
    """Read the configurations of consecutive runs; a file without `stages` has one.

    stages: a list of sections, each laid over the rest of the file; a mapping's keys are merged, all else is replaced.
    Stage k, from 1 on, writes into output_dir/stage-k and starts from the model of the one before it.
    overrides: "train.lr=1e-6", "stages.2.train.lr=1e-6"; a dotted key, "=", and a value typed as in YAML. For a key
    that holds text, everything after the first "=" is the text (quotes around all of it are taken off; nothing, or
    null, is None where allowed).
    Raises ValueError, one line for each problem: missing file, invalid YAML, unknown key, wrong type, contradiction.
    """
    data = read_yaml(Path(path).expanduser())
    if "stages" in data:
        _check_stages(path, data["stages"])
    for override in overrides:
        apply_override(data, override)
    stages = list(enumerate(data.pop("stages"), 1)) if "stages" in data else [(0, {})]
    problems = [_unknown_line(key) for key in _unknown_keys(data, Config)]
    configs = []
    for number, stage in stages:
        name = f"stages.{number}."
        problems += [_unknown_line(key, name) for key in _unknown_keys(stage, Config)]
        problems += [f"{name}{key}: leave it out, {why}" for key, why in _derived_keys(stage, number)]
        try:
            configs.append(Config.model_validate(_whole(data, stage, number)))
        except ValidationError as error:
            problems += [
                _in_stage(line, detail["loc"], stage, number)
                for detail in error.errors()
                for line in problem_lines(detail)
            ]
    if problems:
        raise ValueError("\n".join([f"{path} does not describe a run:", *dict.fromkeys(problems)]))
    return configs


def config_from(values: dict[str, Any], what: str) -> Config:
    """The configuration of one run in these sections; ValueError as `load_stages`. what: the sections, in messages."""
    problems = [_unknown_line(key) for key in _unknown_keys(values, Config)]
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += [line for detail in error.errors() for line in problem_lines(detail)]
    if problems:
        raise ValueError("\n".join([f"{what} does not describe a run:", *dict.fromkeys(problems)]))
    return config


def recorded_config(values: Any) -> Config:
    """The configuration that a version of rlplus wrote down; ValueError, one line, for what this one does not read."""
    if not isinstance(values, dict):
        raise ValueError(f"want sections of keys and values; got {str(values)[:80]!r}")
    values = as_of_now(values)
    problems = [f"{key}: unknown key" for key in _unknown_keys(values, Config)]
    try:
        return Config.model_validate(values)  # a key that did not exist then has its default
    except ValidationError as error:
        problems += [line for detail in error.errors() for line in problem_lines(detail)]
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    raise ValueError("; ".join(problems[:_NAMED]) + more)


def as_of_now(values: dict[str, Any]) -> dict[str, Any]:
    """The sections that an older version wrote down, with what they meant there."""
    rollout = values.get("rollout")
    reward = values.get("reward")
    train = values.get("train")
    if isinstance(rollout, dict):  # weights had a folder in 0.3.0; no sample differs
        values = values | {"rollout": {key: value for key, value in rollout.items() if key != "push_folder"}}
    if isinstance(reward, dict):  # and every response was graded as it was
        values = values | {"reward": {"cut_off": "grade", "box": "optional"} | reward}
    if isinstance(train, dict):  # 0.3.0's memory was another order of the same sums; without a tuning no bit differs
        gone = {"memory"} | ({"tuning"} if train.get("tuning") is None else set())
        values = values | {"train": {key: value for key, value in train.items() if key not in gone}}
    return values


def with_first_model(stages: Sequence[Config]) -> list[Config]:
    """The stages as if each started from the first one's model, which has the same shape and is there beforehand."""
    first = stages[0].model
    start = {"path": first.path, "scratch": first.scratch}
    return [stage.model_copy(update={"model": stage.model.model_copy(update=start)}) for stage in stages]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, merged recursively."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both else value
    return result


def _check_stages(path: str | Path, stages: Any) -> None:
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError(f"{path}: stages: want a list of sections of keys and values; got {str(stages)[:80]!r}")


def _derived_keys(stage: dict[str, Any], number: int) -> Iterator[tuple[str, str]]:
    """Keys that a stage must not have, with the reasons."""
    if "output_dir" in stage:
        yield "output_dir", f"it is stage-{number} in that of the file"
    for key in ("path", "scratch"):
        if number > 1 and _has(stage, ["model", key]):
            yield f"model.{key}", f"the stage starts from the model of stage {number - 1}"


def _whole(data: dict[str, Any], stage: dict[str, Any], number: int) -> dict[str, Any]:
    """The rest of the file, overridden by a stage; number 0: there are no stages."""
    output = data.get("output_dir")
    if number == 0 or not isinstance(output, str):
        return merged(data, stage)
    derived: dict[str, Any] = {"output_dir": f"{output}/stage-{number}"}
    if number > 1:
        derived["model"] = {"path": f"{output}/stage-{number - 1}/model", "scratch": None}
    return merged(merged(data, stage), derived)


def _has(data: Any, parts: Sequence[Any]) -> bool:
    """Whether there is a value at this key or at one of its parents."""
    for part in parts:
        if not isinstance(data, dict):
            return True
        if part not in data:
            return False
        data = data[part]
    return True


def _in_stage(line: str, place: Sequence[Any], stage: dict[str, Any], number: int) -> str:
    """A problem of a stage, with the stage's name if the value was set there."""
    if number == 0 or (place and not _has(stage, place)):
        return line
    return f"stages.{number}.{line}" if place else f"stages.{number}: {line}"


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file; ValueError if it is none, or has no sections."""
    if path.suffix in DATA_SUFFIXES:
        raise ValueError(f"want a YAML file; got {path}, a file of data: name it in one, as data.path")
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
        raise ValueError(f"want a YAML file; got {path}: {what}")
    data = parse_yaml(read_text(path), path)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: want sections (model, data, train, ...); got {type(data).__name__}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set a value of the sections in `data` as the command line does; ValueError for another form."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ValueError(f"want an override as section.key=value; got {override!r}")
    stages = data.get("stages", [])
    if stages and parts[0] == "stages":
        numbers = [str(number) for number in range(1, len(stages) + 1)]
        if len(parts) < 3 or parts[1] not in numbers:
            raise ValueError(
                f"want an override of stage {' or '.join(numbers)} as stages.1.key=value; got {override!r}"
            )
        data = stages[int(parts[1]) - 1]
        parts = parts[2:]
    elif stages and all(_has(stage, parts) for stage in stages):
        raise ValueError(f"override {override!r} would have no effect: every stage has a value, want stages.1.{key}=")
    for depth, part in enumerate(parts[:-1], 1):
        if data.get(part) is None:
            data[part] = {}
        if not isinstance(data[part], dict):
            section = ".".join(parts[:depth])
            raise ValueError(f"override {override!r}: {section} is not a section, it is {data[part]!r}")
        data = data[part]
    data[parts[-1]] = _value(parts, text, override)


def _value(parts: Sequence[str], text: str, override: str) -> Any:
    """Text for a key that holds text (a pattern such as `#### (.+)` is a comment in YAML), else YAML."""
    kinds = _kinds(parts)
    quoted = text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1
    structured = any(kind in kinds and text.startswith(sign) for kind, sign in ((list, "["), (dict, "{")))
    if str in kinds and not quoted and not structured:
        return None if NoneType in kinds and text in ("", "null") else text
    try:
        return parse_yaml(text, "the value")
    except ValueError as error:
        raise ValueError(f"override {without_passwords(override)[:80]!r}: the value is not valid YAML") from error


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also when it is optional; not a recipe's options, which name unknown keys."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not RecipeOptions:
            return kind
    return None


def _kinds(parts: Sequence[str]) -> set[Any]:
    """The plain types that a key accepts; empty for an unknown key and inside free-form mappings."""
    section: type[BaseModel] | None = Config
    for depth, part in enumerate(parts):
        if section is None or part not in section.model_fields:
            return set()
        annotation = section.model_fields[part].annotation
        if depth == len(parts) - 1:
            return _flatten(annotation)
        section = _section(annotation)
    return set()


def _flatten(annotation: Any) -> set[Any]:
    """Types of a union, without Annotated's metadata; list[str] -> list."""
    if hasattr(annotation, "__metadata__"):
        return _flatten(annotation.__origin__)
    origin = getattr(annotation, "__origin__", annotation)
    if isinstance(origin, type) and origin.__module__ not in ("typing", "types"):
        return {origin}
    return set().union(*(_flatten(kind) for kind in get_args(annotation) if not isinstance(kind, str)))


def _unknown_keys(data: dict[Any, Any], section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if key not in section.model_fields:
            yield from _leaves(f"{prefix}{key}", value)
        elif isinstance(value, dict) and (inner := _section(section.model_fields[key].annotation)):
            yield from _unknown_keys(value, inner, f"{prefix}{key}.")


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """All keys of a configuration, dotted; each section before its keys."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if inner := _section(field.annotation):
            yield from valid_keys(inner, f"{prefix}{name}.")
        if f"{prefix}{name}" == "algorithm.objective":
            yield from (f"algorithm.objective.{option.name}" for option in fields(Objective))


def _unknown_line(key: str, stage: str = "") -> str:
    """A message with what other trainers mean by it, or the nearest valid key among those with similar last parts."""

    if meant := synonym(key):
        return f"{stage}{key}: unknown key; {meant}"

    def ratio(one: str, other: str) -> float:
        return SequenceMatcher(None, one.lower(), other.lower()).ratio()

    def last(text: str) -> str:
        return text.rpartition(".")[2]

    alike = {valid: ratio(last(key), last(valid)) for valid in (*valid_keys(), "stages")}
    near = [valid for valid, likeness in alike.items() if likeness >= 0.6]
    if not near:
        return f"{stage}{key}: unknown key"
    # The whole key and its last part count alike: both `trian.lr` and a bare `lr` are near `train.lr`.
    most_alike = max(near, key=lambda valid: ratio(key, valid) + alike[valid])
    return f"{stage}{key}: unknown key; nearest: {stage}{most_alike}"


def problem_lines(detail: Any) -> list[str]:
    """Lines for one pydantic error: the dotted key, what was wanted and what came, without an address's password."""
    return [without_passwords(line) for line in _problem_lines(detail)]


def _problem_lines(detail: Any) -> list[str]:
    key = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    kind = detail["type"]
    value = detail["input"]
    prefix = f"{key}: " if key else ""
    if kind == "extra_forbidden":
        return []  # reported by name already
    if kind == "missing":
        return [f"{key}: want a value; the key is missing"]
    if kind == "value_error":
        return [f"{prefix}{line}" for line in str(detail["ctx"]["error"]).splitlines()]
    if kind in ("model_type", "dict_type"):
        wanted = "want a section of keys and values"
    else:
        wanted = re.sub(r"^\w+ should (be |have )?", "want ", detail["msg"])
    near = ""
    if kind == "literal_error" and isinstance(value, str):
        near = hint(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    shown = without_passwords(repr(value))  # hidden first: the cut may take the @
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return [f"{prefix}{wanted}; got {shown} ({type(value).__name__}){near}"]
