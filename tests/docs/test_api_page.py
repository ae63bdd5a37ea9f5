"""The page of the public names: each is there once, with its docstring and its parameters."""

import inspect
import re

import pytest
from manual import ROOT

import rlplus
from docs.api_page import SECTIONS

PAGE = (ROOT / "docs/api.md").read_text()
NAMES = [name for names in SECTIONS.values() for name in names]


def test_every_public_name_has_one_place() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {name for name in NAMES if "." not in name} == set(rlplus.__all__)
    assert re.findall(r"^### `rlplus\.([\w.]+)`$", PAGE, re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if "." not in name])
def test_an_entry_has_the_parameters_and_the_docstring(name: str) -> None:
    public = getattr(rlplus, name)
    text = PAGE.partition(f"### `rlplus.{name}`\n")[2].partition("\n### ")[0]
    if not callable(public):
        assert f"{name}: dict[str, Objective]" in text
        return
    assert inspect.getdoc(public) in text
    for parameter in inspect.signature(public).parameters:
        assert re.search(rf"\b{parameter}: ", text), parameter
