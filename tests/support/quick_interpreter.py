"""Triton's interpreter without what it does again at every call of a function."""

import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
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


@cache
def languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules of Triton's language that the function's own module names, as the interpreter looks for them."""
    values = function.__globals__.values()  # type: ignore[attr-defined]
    return [lang for lang in (tl, tl.core) if any(value is lang for value in values)]


def make_quick() -> None:
    """Have the interpreter do three things once that it does at every call, for two fifths of its time.

    It lists the language's builtins, replaces them by its own although the caller's call has done so, and makes a
    table of numpy's dtypes.
    """
    interpreter.inspect = Inspect()
    replace, make_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def replace_once(function: Callable[..., Any]) -> Any:
        langs = languages(function)
        if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return interpreter._LangPatchScope()
        return replace(function)

    def known_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = make_dtype(scalar)
        return dtypes[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, known_dtype
