"""A GRPOConfig and what surrounds it, read from the syntax of a Python file, which is never executed."""

import ast
import operator
from collections.abc import Iterator
from typing import Any

from rlplus.convert.draft import Script

ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
PARSERS = ("TrlParser", "HfArgumentParser", "parse_args_into_dataclasses")


class NotLiteral(ValueError):
    """A value that only running the script would tell."""


def read_python(text: str, name: str) -> Script:
    """The keywords of the only call of GRPOConfig; ValueError for another number of them, and for invalid Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno or 1}: not valid Python: {error.msg}") from error
    except ValueError as error:
        raise ValueError(f"{name}: not valid Python: {error}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _name(call) == "GRPOConfig"]
    if len(configs) != 1:
        lines = ", ".join(str(call.lineno) for call in configs)
        came = f"{len(configs)}, in lines {lines}" if configs else "none"
        parsers = [call for call in calls if _name(call) in PARSERS]
        if parsers and not configs:
            came += (
                f": {_name(parsers[0])} (line {parsers[0].lineno}) takes the arguments from a command line, which "
                "cannot be read; write them into the script, as GRPOConfig(learning_rate=1e-6, ...)"
            )
        raise ValueError(f"{name}: want one call of TRL's GRPOConfig; got {came}")
    names = dict(_constants(tree))
    script = Script()
    _read_call(configs[0], names, script)
    script.unread |= _later(tree, configs[0])
    for call in calls:
        if _name(call) == "GRPOTrainer":
            _read_trainer(call, names, script)
        elif _name(call) == "LoraConfig":
            script.lora = {k.arg: _value(k.value, names, None) for k in call.keywords if k.arg}
        elif _name(call) == "load_dataset" and script.data is None:
            script.data = _data_set(call, names)
    return script


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _constants(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that are assigned once."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
    targets = [node.targets[0].id for node in assigned if isinstance(node.targets[0], ast.Name)]
    for node in assigned:
        if isinstance(target := node.targets[0], ast.Name) and targets.count(target.id) == 1:
            yield target.id, node.value


def _literal(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """The value of literals, names of literals, arithmetic and f-strings of these; NotLiteral for others."""
    if depth > 20:
        raise NotLiteral
    if isinstance(node, ast.Name) and node.id in names:
        return _literal(names[node.id], names, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = (_literal(side, names, depth + 1) for side in (node.left, node.right))
        if isinstance(left, int | float) and isinstance(right, int | float) and (right or type(node.op) is not ast.Div):
            return ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_literal(part, names, depth + 1)) for part in node.values)
    if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
        return _literal(node.value, names, depth + 1)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise NotLiteral from error


def _later(tree: ast.AST, config: ast.Call) -> dict[str, int]:
    """The config's attributes that are assigned to behind its call, with the line of each."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    pairs = [
        (target, node) for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])
    ]
    called = {target.id for target, node in pairs if node.value is config and isinstance(target, ast.Name)}
    return {
        target.attr: node.lineno
        for target, node in pairs
        if isinstance(target, ast.Attribute)
        and (getattr(target.value, "id", "") in called or getattr(target.value, "attr", "") == "args")
    }


def _value(node: ast.expr | None, names: dict[str, ast.expr], otherwise: Any) -> Any:
    try:
        return otherwise if node is None else _literal(node, names)
    except NotLiteral:
        return otherwise


def _read_call(call: ast.Call, names: dict[str, ast.expr], script: Script) -> None:
    arguments = [("output_dir", node) for node in call.args[:1]]
    arguments += [(keyword.arg or "**", keyword.value) for keyword in call.keywords]
    for name, node in arguments:
        try:
            script.settings[name] = _literal(node, names)
            script.places[name] = node.lineno
        except NotLiteral:
            script.unread[name] = node.lineno
    for node in call.args[1:]:
        script.unread["a positional argument"] = node.lineno
    if isinstance(inner := script.settings.pop("**", None), dict):
        script.settings |= inner
        script.places |= dict.fromkeys(inner, script.places.pop("**"))


def _read_trainer(call: ast.Call, names: dict[str, ast.expr], script: Script) -> None:
    """The model and the rewards of GRPOTrainer, by keyword or as its first two arguments."""
    given = dict(zip(("model", "reward_funcs"), call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
    model = _value(given.get("model"), names, None)
    script.model = model if isinstance(model, str) else None
    rewards = given.get("reward_funcs")
    rewards = names.get(rewards.id, rewards) if isinstance(rewards, ast.Name) else rewards
    for node in rewards.elts if isinstance(rewards, ast.List) else [rewards]:
        if isinstance(node, ast.Name | ast.Attribute):
            script.rewards.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant):
            script.rewards.append(str(node.value))


def _data_set(call: ast.Call, names: dict[str, ast.expr]) -> str | None:
    """A file, or a split of the hub; None if it is neither."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    words = [_value(node, names, None) for node in call.args]
    split = _value(keywords.get("split"), names, "train")
    if words[:1] in (["json"], ["parquet"]):
        files = _value(keywords.get("data_files"), names, None)
        return files if isinstance(files, str) else None
    parts = [*words, *([_value(keywords["name"], names, None)] if "name" in keywords else []), split]
    if not all(isinstance(part, str) for part in parts) or str(parts[0]).count("/") != 1 or "[" in str(split):
        return None
    return f"hf://{'/'.join(parts)}"
