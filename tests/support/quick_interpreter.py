"""Triton's interpreter without what it does again at every call of a function."""

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)


class Inspect:
    """The module `inspect`, of whose `getmembers` the interpreter wants the builtins of Triton's language only."""

    def __init__(self) -> None:
        listed = {owner: inspect.getmembers(owner, tl.core.is_builtin) for owner in PATCHED}
        self.names = {owner: [name for name, _ in members] for owner, members in listed.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, owner: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(owner, name)) for name in self.names[owner]]


def list_builtins_once() -> None:
    """Have the interpreter look for the language's builtins now; it does so at every call, for a third of its time."""
    interpreter.inspect = Inspect()
