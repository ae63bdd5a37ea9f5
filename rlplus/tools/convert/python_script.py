"""A GRPOConfig and the calls around it, read from the syntax of a Python file, which is never executed.

A name is known where a plain assignment is the only thing in the file that binds it, and nothing can change its value.
"""

import ast
from types import NoneType

from rlplus.tools.convert.draft import Script
from rlplus.tools.convert.names import READ, SHOWING, Names, Unknown, called
from rlplus.tools.convert.trl_arguments import DEFAULTS
from rlplus.train.config.synonyms import TRL, WITHOUT

PARSERS = ("TrlParser", "HfArgumentParser", "parse_args_into_dataclasses")
POSITIONS = {  # names of positional arguments, by the call
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": (
        "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
        "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config",
    ),
    "load_dataset": ("path", "name"),
}  # fmt: skip

SIMPLE = (str, int, float, NoneType)
MADE = {"args": "GRPOConfig", "peft_config": "LoraConfig"}  # the calls that make them are read, too

Entry = tuple[str, ast.expr | None, int]  # a keyword, its value if that is sure, its line


def read_python(text: str, name: str) -> Script:
    """The keywords of the only call of GRPOConfig; ValueError for another number of them, and for invalid Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno or 1}: not valid Python: {error.msg}") from error
    except (ValueError, MemoryError) as error:
        raise ValueError(f"{name}: not valid Python: {str(error) or 'nested too deeply'}") from error
    names = Names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {kind: [call for call in calls if called(call) == kind] for kind in READ}
    configs = found["GRPOConfig"]
    if len(configs) != 1:
        raise ValueError(f"{name}: want one call of TRL's GRPOConfig; got {_came(configs, calls)}")
    script = Script()
    _put_all(script, names, "", _entries(names, configs[0]))
    _doubt_later(script, names, configs[0], "", {*TRL, *WITHOUT["TRL"], *DEFAULTS})
    sources = [_read_trainer(script, names, trainer, found) for trainer in found["GRPOTrainer"]]
    for lora in found["LoraConfig"]:
        sure = len(found["LoraConfig"]) == 1
        _put_all(script, names, "LoraConfig.", _entries(names, lora), sure)
        _doubt_later(script, names, lora, "LoraConfig.", set())
        script.put("LoraConfig", True, lora.lineno)
    for call in found["load_dataset"]:
        if call not in sources:
            script.doubt(ast.unparse(call)[:80], call.lineno)
    return script


def _came(configs: list[ast.Call], calls: list[ast.Call]) -> str:
    if configs:
        return f"{len(configs)}, in lines {', '.join(str(call.lineno) for call in configs)}"
    for call in calls:
        if called(call) in PARSERS:
            return (
                f"none: {called(call)} (line {call.lineno}) takes the arguments from a command line, which "
                "cannot be read; write them into the script, as GRPOConfig(learning_rate=1e-6, ...)"
            )
    return "none"


def _entries(names: Names, node: ast.Call | ast.Dict) -> list[Entry]:
    """The keywords of a call, or a dictionary's keys, with those that `**` adds."""
    entries: list[Entry] = []
    pairs: list[tuple[str | None, ast.expr]]
    if isinstance(node, ast.Call):
        positions = POSITIONS.get(called(node), ())
        for i, argument in enumerate(node.args):
            plain = i < len(positions) and not any(isinstance(earlier, ast.Starred) for earlier in node.args[: i + 1])
            name = positions[i] if plain else f"the argument {ast.unparse(argument)[:40]}"
            entries.append((name, argument if plain else None, argument.lineno))
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    else:
        pairs = []
        for key, value in zip(node.keys, node.values, strict=True):
            text = key.value if isinstance(key, ast.Constant) else key and f"the key {ast.unparse(key)[:40]}"
            pairs.append((None if text is None else str(text), value))
    for keyword, value in pairs:
        table = names.table(value)
        if keyword is not None:
            entries.append((keyword, value, value.lineno))
        elif table is not None:
            entries += [(key, inner, value.lineno) for key, inner, _ in _entries(names, table)]
        else:  # may have any of the keys before it
            if isinstance(node, ast.Dict):
                entries = [(key, None, line) for key, _, line in entries]
            entries.append((f"**{ast.unparse(value)[:40]}", None, value.lineno))
    return entries


def _put_all(script: Script, names: Names, prefix: str, entries: list[Entry], sure: bool = True) -> None:
    for name, node, line in entries:
        table = names.table(node) if node is not None else None
        if table is not None and (inner := _entries(names, table)):
            _put_all(script, names, f"{prefix}{name}.", [(key, value, line) for key, value, _ in inner], sure)
            continue
        try:
            if node is None or not sure:
                raise Unknown
            script.put(f"{prefix}{name}", names.value(node), line)
        except Unknown:
            script.doubt(f"{prefix}{name}", line)


def _doubt_later(script: Script, names: Names, made: ast.Call, prefix: str, known: set[str]) -> None:
    """Doubt what may be set of what a call makes: known attributes of anything, and all where it is used otherwise."""
    entries = [name for name in (*script.settings, *script.unread) if name.startswith(prefix)]
    given = {name.removeprefix(prefix).partition(".")[0] for name in entries}
    for name in names.stored.keys() & (given | known):
        script.doubt(f"{prefix}{name}", names.stored[name].lineno)
    uses = names.uses(made)
    escapes: list[ast.AST] = [made] if uses is None else []
    for node in uses or ():
        parent = names.parents[node]
        above = names.parents[parent]
        if isinstance(parent, ast.Attribute):
            name = f"{prefix}{parent.attr}"
            container = parent.attr in given and not isinstance(script.settings.get(name, ()), SIMPLE)
            if not isinstance(parent.ctx, ast.Load):
                script.doubt(name, parent.lineno)
            elif parent.attr not in given | known or getattr(above, "func", None) is parent:
                escapes.append(above)
            elif container:
                script.doubt(name, parent.lineno)
        elif names.is_read_by(node, "setattr"):
            script.doubt(f"{prefix}{getattr(parent.args[1], 'value', '')}", node.lineno)  # type: ignore[attr-defined]
        elif not any(names.is_read_by(node, reader) for reader in ("GRPOTrainer", *SHOWING)):
            escapes.append(parent)
    for place in escapes:
        line = getattr(place, "lineno", made.lineno)
        for name in given:
            script.doubt(f"{prefix}{name}", line)
        script.doubt(f"{ast.unparse(place)[:60]}, where the config may be changed", line)


def _read_trainer(script: Script, names: Names, trainer: ast.Call, found: dict[str, list[ast.Call]]) -> ast.Call | None:
    """Read the keywords of GRPOTrainer; -> the load_dataset that makes its training data, if that is known."""
    rest: list[Entry] = []
    data = None
    for name, node, line in _entries(names, trainer):
        try:
            if len(found["GRPOTrainer"]) > 1 or node is None or names.stored.keys() & {"", name}:
                raise Unknown
            if name == "reward_funcs":
                script.put("GRPOTrainer.reward_funcs", names.functions(node), line)
            elif name == "train_dataset":
                data = _read_data(script, names, node)
            elif name not in MADE or not names.made_by(node, found[MADE[name]]):
                rest.append((name, node, line))
        except Unknown:
            script.doubt(f"GRPOTrainer.{name}", line)
    _put_all(script, names, "GRPOTrainer.", rest)
    return data


def _read_data(script: Script, names: Names, node: ast.expr) -> ast.Call:
    """Read the call of load_dataset from which a data set is made; Unknown where more than one may be, or another."""
    calls: dict[ast.Call, None] = {}
    steps: list[ast.Subscript | ast.Call] = []
    _sources(names, node, calls, steps, set())
    if len(calls) != 1:
        raise Unknown
    call = next(iter(calls))
    _put_all(script, names, "load_dataset.", _entries(names, call))
    parts = [step for step in steps if isinstance(step, ast.Subscript)]
    if parts and not {"load_dataset.split"} & {*script.settings, *script.unread}:
        steps.remove(parts[-1])
        _put_all(script, names, "load_dataset.", [("split", parts[-1].slice, parts[-1].lineno)])
    for step in steps:
        what = called(step) or f"[{ast.unparse(step.slice)}]"  # type: ignore[union-attr]
        script.put(f"GRPOTrainer.train_dataset.{what}", True, step.lineno)
    return call


def _sources(
    names: Names, node: ast.expr, calls: dict[ast.Call, None], steps: list[ast.Subscript | ast.Call], seen: set[str]
) -> None:
    """Follow names, methods and functions that return data, to calls of load_dataset; Unknown for anything else."""
    if isinstance(node, ast.Name):
        if not names.reads_data(node.id):
            raise Unknown
        values = [] if node.id in seen else names.all(node.id)
        seen.add(node.id)
        for value in values:
            _sources(names, value, calls, steps, seen)
    elif isinstance(node, ast.Subscript):
        steps.append(node)
        _sources(names, node.value, calls, steps, seen)
    elif not isinstance(node, ast.Call):
        raise Unknown
    elif called(node) == "load_dataset":
        calls[node] = None
    elif isinstance(node.func, ast.Attribute):
        steps.append(node)
        _sources(names, node.func.value, calls, steps, seen)
    elif called(node) not in seen:
        seen.add(called(node))
        _sources(names, names.returned(node), calls, steps, seen)
