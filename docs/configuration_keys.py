"""The page of a configuration's keys, from the types; and tables in Markdown."""

import json
import re
from collections.abc import Iterator
from typing import Any

from bench import output
from rlplus.train.algorithm import RECIPES
from rlplus.train.config.json_schema import json_schema

FAR = 2**53  # the largest value of a key that has no limit of its own


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return output.lines(header, ([cell.replace("|", "\\|") for cell in row] for row in rows))


def keys() -> str:
    """Every section of a configuration, with its keys."""
    schema = json_schema()
    kinds, parts = schema["$defs"], ["## Top level", section_table(schema["properties"], schema["$defs"], "")]
    for name, key in schema["properties"].items():
        if "$ref" in key:
            parts += list(section(name, kinds[named(key)], kinds))
    return "\n\n".join(parts)


def section(name: str, kind: dict[str, Any], kinds: dict[str, Any]) -> Iterator[str]:
    yield f"## {name}"
    yield markdown(kind["description"])
    yield section_table(kind["properties"], kinds, f"{name}.")
    for key, value in kind["properties"].items():
        if (inner := named(value)) == "DataConfig" or not inner:
            continue
        yield f"### {name}.{key}"
        for each in (options.__name__ for options in RECIPES.values()) if key == "recipe" else [inner]:
            keys = dict(kinds[each]["properties"])
            if own := keys.pop("name", {}).get("const") if key == "recipe" else None:
                yield f"#### {own}"
            yield markdown(kinds[each]["description"])
            if keys:
                yield section_table(keys, kinds, f"{name}.{key}.")


def section_table(properties: dict[str, Any], kinds: dict[str, Any], prefix: str) -> str:
    rows = (
        (f"`{prefix}{name}`", kind(key), default(key), markdown(described(key, kinds)))
        for name, key in properties.items()
    )
    return table(("key", "type", "default", "meaning"), rows)


def named(key: dict[str, Any]) -> str | None:
    """The section that a key holds; None for a value."""
    for choice in (key, *key.get("anyOf", ())):
        if "$ref" in choice:
            return str(choice["$ref"].rpartition("/")[2])
    return None


def described(key: dict[str, Any], kinds: dict[str, Any]) -> str:
    inner = named(key)
    return str(key.get("description") or (kinds[inner]["description"] if inner else ""))


def markdown(text: str) -> str:
    """A documentation's text, with what is markup in Markdown escaped."""
    return re.sub(r"(?<!`)<(?=[/\w])", "&lt;", text).replace("*", "\\*")


def kind(key: dict[str, Any]) -> str:
    """The type of a value, in words."""
    if (inner := named(key)) is not None:
        return "keys of `data`" if inner == "DataConfig" else "section"
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(kind(choice) for choice in key["anyOf"] if choice.get("type") != "null"))
    if key.get("type") == "array":
        return f"list of {kind(key['items'])}" if "items" in key else "list"
    words = {"object": "mapping", "string": "text", "boolean": "true or false"}
    return f"{words.get(key['type'], key['type'])} {' and '.join(limits(key))}".rstrip()


def limits(key: dict[str, Any]) -> Iterator[str]:
    """The range of a number; a limit that no run comes near is left out."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return (f"{sign} {key[name]:,.15g}" for name, sign in signs.items() if abs(key.get(name, FAR)) < FAR)


def default(key: dict[str, Any]) -> str:
    return f"`{show(key['default'])}`" if "default" in key else ""


def show(value: object) -> str:
    """A value as YAML has it."""
    return json.dumps(value, ensure_ascii=False)
