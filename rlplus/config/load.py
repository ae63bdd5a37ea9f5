"""YAML file and dotted overrides -> Config, with one clear line for each problem."""

import re
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rlplus.config.schema import Config
from rlplus.textfiles import read_text

MAX_VALUES = 100_000  # of a configuration


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-6 as a number, as YAML 1.2 does, and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # what looks like a date or a number and is none
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's configuration.

    overrides: "train.lr=1e-6"; a dotted key, "=", and a value typed as in YAML. For a key that holds text, everything
    after the first "=" is the text (quotes around all of it are taken off; nothing, or null, is None where allowed).
    Raises ValueError, one line for each problem: missing file, invalid YAML, unknown key, wrong type, contradiction.
    """
    data = _read(Path(path).expanduser())
    for override in overrides:
        _apply(data, override)
    problems = [_unknown_line(key) for key in _unknown_keys(data, Config)]
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += [line for detail in error.errors() for line in _problem_lines(detail)]
    if problems:
        raise ValueError("\n".join([f"{path} does not describe a run:", *problems]))
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
        raise ValueError(f"want a YAML file; got {path}: {what}")
    try:
        data = _parse(read_text(path))
    except RecursionError:  # its traceback would be a thousand lines
        raise ValueError(f"{path}: invalid YAML: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{where}: invalid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: invalid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: want sections (model, data, train, ...); got {type(data).__name__}")
    return data


def _parse(text: str) -> Any:
    """The value; YAMLError also where aliases stand for more than MAX_VALUES: checks and messages visit every value."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below the node with every alias written out; RecursionError where it contains itself."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ValueError(f"want an override as section.key=value; got {override!r}")
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
    if str in kinds and not quoted and not (list in kinds and text.startswith("[")):
        return None if NoneType in kinds and text in ("", "null") else text
    try:
        return _parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"override {override[:80]!r}: the value is not valid YAML") from error


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also when it is optional."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
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


def _valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if inner := _section(field.annotation):
            yield from _valid_keys(inner, f"{prefix}{name}.")


def _unknown_line(key: str) -> str:
    """With the nearest valid key, if there is one: of keys whose last parts are alike, the one that is most alike."""

    def ratio(one: str, other: str) -> float:
        return SequenceMatcher(None, one.lower(), other.lower()).ratio()

    def last(text: str) -> str:
        return text.rpartition(".")[2]

    alike = {valid: ratio(last(key), last(valid)) for valid in _valid_keys()}
    near = [valid for valid, likeness in alike.items() if likeness >= 0.6]
    if not near:
        return f"{key}: unknown key"
    # The whole key and its last part count alike: both `trian.lr` and a bare `lr` are near `train.lr`.
    return f"{key}: unknown key; nearest: {max(near, key=lambda valid: ratio(key, valid) + alike[valid])}"


def _problem_lines(detail: Any) -> list[str]:
    """Lines for one pydantic error: the dotted key, what was wanted and what came."""
    key = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    kind, value = detail["type"], detail["input"]
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
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    return [f"{prefix}{wanted}; got {shown} ({type(value).__name__})"]
