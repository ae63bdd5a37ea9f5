"""Base models and data that a function makes for each setting and seed of a comparison."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlplus.common.durable import flush_all, make_folder, write_text
from rlplus.common.errors import RunFailed
from rlplus.common.lazy import import_function
from rlplus.common.textfiles import read_text
from rlplus.train.config import problem_lines

MODEL = "model"
TRAIN = "train.jsonl"
VALIDATION = "validation.jsonl"
TEST = "test.jsonl"
NOTE = "prepared.json"  # marks a finished folder and says how it was made


@dataclass(frozen=True)
class Preparation:
    """A base model and data of one seed. prepare: "module:function". folder: where they are, or will be."""

    setting: str
    prepare: str
    options: Mapping[str, Any]
    seed: int
    folder: Path = field(compare=False)

    @property
    def title(self) -> str:
        return f"base model and data of {self.setting}, seed {self.seed}"

    def is_made(self) -> bool:
        """Whether the folder has them, made by the same function with the same options."""
        note = self.folder / NOTE
        return note.is_file() and read_text(note) == self._note()

    def make(self) -> None:
        """Call the function on an empty folder. RunFailed if it leaves a file out.

        Its OSError is raised again with setting, function and folder.
        """
        function = find_function(self.prepare)
        shutil.rmtree(self.folder, ignore_errors=True)
        make_folder(self.folder)
        options = checked_options(function, self.options)
        try:
            function(self.folder, self.seed, **options)
        except OSError as error:  # Python's own for a full disk names no file
            placed = OSError(f"{self.title}: {self.prepare} failed in {self.folder}: {error}")
            placed.errno = error.errno
            raise placed from error
        if missing := [name for name in (MODEL, TRAIN, VALIDATION, TEST) if not (self.folder / name).exists()]:
            raise RunFailed(f"{self.title}: {self.prepare} has not written {', '.join(missing)} into {self.folder}")
        flush_all(self.folder)
        write_text(self.folder / NOTE, self._note())  # last: without it the files are incomplete

    def _note(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if key != "folder"}, indent=1) + "\n"


def find_function(reference: str) -> Callable[..., None]:
    """The function "module:name", also of the current folder. ValueError if there is none."""
    try:
        function = import_function(reference)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {reference}, not from the current folder either: {error}") from error
    if not callable(function):
        raise ValueError(f"want a function; {reference} is a {type(function).__name__}")
    return function


def checked_options(function: Callable[..., None], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the function's annotations want them: a mapping may become a dataclass. ValueError otherwise."""
    called = signature(function, eval_str=True)
    try:
        called.bind(Path(), 0, **options)
    except TypeError as error:
        raise ValueError(f"options: {error}; want {called}") from error
    found = {}
    for name, value in options.items():
        wanted = called.parameters[name].annotation if name in called.parameters else Parameter.empty
        try:
            kind = TypeAdapter(Any if wanted is Parameter.empty else wanted)
            found[name] = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            detail = error.errors()[0]
            detail["loc"] = ("options", name, *detail["loc"])
            (line, *_) = problem_lines(detail) or [f"{'.'.join(map(str, detail['loc']))}: unknown key"]
            raise ValueError(line) from error
    return found
