"""YAML text -> values, with one clear line for whatever is wrong with it."""

import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

MAX_VALUES = 100_000  # values of a text at most


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-6 as a number, as YAML 1.2 does, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # behind !!map there may be anything
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value = super().construct_scalar(node)
        if wrong := re.search("[\0\ud800-\udfff]", str(value)):  # no file name, process or JSON file can hold these
            problem = f"want characters that UTF-8 text can hold; got {wrong[0]!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # a text that is no date or number; behind a tag PyYAML reads any text as one
            kind = node.tag.rpartition(":")[2]
            problem = str(error) if isinstance(error, ValueError) else f"{node.value[:80]!r} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, place: object) -> Any:
    """The value. ValueError for what is no YAML, is nested too deeply or has aliases that expand to more than
    MAX_VALUES, since readers visit every value. place: the file or setting, in messages.
    """
    try:
        return _parsed(text)
    except RecursionError:  # its traceback would be a thousand lines
        raise ValueError(f"{place}: invalid YAML: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{place}{where}: invalid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{place}: invalid YAML: {' '.join(str(error).split())}") from error


def yaml_value(value: Any) -> str:
    """JSON that `parse_yaml` reads back: characters are escaped that YAML takes for the end of a line, or refuses."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _parsed(text: str) -> Any:
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
    """The number of values below the node with every alias expanded; RecursionError if it contains itself."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]
