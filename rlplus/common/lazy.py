"""Imports by name: a package's names on first use (PEP 562), which keeps imports fast, and users' functions."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the module `package`.

    homes: modules below the package and the names that each defines; the package's own submodules are attributes, too.
    A name becomes an ordinary attribute on first use. AttributeError for any other name.
    """
    submodules = {home.partition(".")[0] for home in homes}
    home_of = {name: home for home, names in homes.items() for name in names}
    module = sys.modules[package]

    def lookup(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(module, name, value)
        return value

    return lookup, lambda: sorted({*vars(module), *submodules, *home_of})


@contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Import modules of the folder first."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def import_function(reference: str) -> Any:
    """Import "module:name", also from the current folder, or "folder/file.py:name". ImportError or AttributeError."""
    module, _, name = reference.rpartition(":")
    folder = os.getcwd()
    file = ""
    if module.endswith(".py"):
        file = os.path.abspath(module)
        if not os.path.isfile(file):
            raise ImportError(f"there is no file {file}")
        folder = os.path.dirname(file)
        module = os.path.basename(file).removesuffix(".py")
    with importing_from(folder):
        found = import_module(module)
    if file and getattr(found, "__file__", None) != file:
        raise ImportError(f"{file} has the name of another module: {found}")
    return getattr(found, name)
