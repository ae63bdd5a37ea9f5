"""Stand-ins for packages that are not installed here."""

import sys
from types import ModuleType
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]], user: str) -> dict[str, Any]:
    """Modules with these names and contents, and their parents; `user`, which imports them, is imported anew."""
    modules: dict[str, Any] = {}
    for name in contents:
        parts = name.split(".")
        for path in (".".join(parts[:i]) for i in range(1, len(parts) + 1)):
            if path in modules:
                continue
            modules[path] = ModuleType(path)
            monkeypatch.setitem(sys.modules, path, modules[path])
            home, _, short = path.rpartition(".")
            if home:
                setattr(modules[home], short, modules[path])
        vars(modules[name]).update(contents[name])
    monkeypatch.delitem(sys.modules, user, raising=False)
    return modules
