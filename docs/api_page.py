"""The signatures and docstrings of docs/api.md, read from the sources: nothing is imported, TRL least of all."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from griffe import Attribute, Class, Function, GriffeLoader, Object

# The public names by the section of the page.
SECTIONS = {
    "loss": ("linear_policy_loss", "PolicyLoss", "linear_logprob", "policy_loss", "RLPlusLoss"),
    "objectives": ("Objective", "OBJECTIVES", "register_token_loss"),
    "inputs": ("head_of", "token_weights", "group_advantages", "batch_advantages"),
    "distillation": ("linear_divergence", "DivergenceLoss"),
    "drop-ins": (
        "integrations.transformers.fuse_head", "integrations.transformers.unfuse_head",
        "integrations.transformers.FusedOutput", "integrations.trl.patch", "integrations.trl.RLPlusGRPOTrainer",
        "integrations.openrlhf.patch", "integrations.prime_rl.loss",
    ),
}  # fmt: skip
SHOWN = {"RLPlusLoss": ("forward",), "Objective": ("preset",)}  # methods with a docstring of their own on the page
WIDTH = 96  # characters of a signature in one line


@cache
def sources(root: Path) -> Object:
    return GriffeLoader(search_paths=[root]).load("rlplus")


def section(name: str, root: Path) -> str:
    """The entries of a section."""
    found: list[str] = []
    for public in SECTIONS[name]:
        item = sources(root)[public]
        found += entry(f"rlplus.{public}", item.final_target if item.is_alias else item)
    return "\n\n".join(found)


def entry(name: str, item: Class | Function | Attribute) -> Iterator[str]:
    """The heading, signature and docstring of a name, then its fields or methods."""
    yield f"### `{name}`"
    short = name.rpartition(".")[2]
    documented = isinstance(item, Class) and any(each.docstring for each in item.attributes.values())
    if isinstance(item, Attribute):
        yield f"```py\n{short}: {item.annotation}\n```"
    elif isinstance(item, Function):
        yield signature(item, short)
    elif "__init__" in item.members and not documented:
        yield signature(item.members["__init__"], short)
    if item.docstring:
        yield item.docstring.value
    if isinstance(item, Class):
        if documented or "__init__" not in item.members:
            yield "\n".join(field(each) for each in item.attributes.values() if not each.name.startswith("_"))
        for method in SHOWN.get(short, ()):
            yield signature(item.members[method], f"{short}.{method}")
            yield item.members[method].docstring.value


def field(item: Attribute) -> str:
    """A list's item: name, type, default and meaning."""
    default = "" if item.value is None else f" = {item.value}"
    meaning = "" if item.docstring is None else ": " + " ".join(item.docstring.value.split())
    return f"- `{item.name}: {item.annotation}{default}`{meaning}"


def signature(function: Function, name: str) -> str:
    """A block of code: in one line where it fits, else a line for each parameter."""
    words, marked = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value if parameter.kind else ""
        if kind == "keyword-only" and not marked:
            words.append("*")
            marked = True
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        marked = marked or stars == "*"
        default = "" if parameter.default is None or stars else f" = {parameter.default}"
        words.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    result = "" if function.name == "__init__" else f" -> {function.returns}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"
    return f"```py\n{line}\n```"
