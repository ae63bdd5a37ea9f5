"""A configuration in the making: values, where each comes from, and what is lost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplus.tools.convert.names import LIMIT
from rlplus.train.config.synonyms import ending


@dataclass
class Script:
    """The settings of a script's calls or command. settings, places: values by name, and the line of each.

    unread: lines by the name of what only running the script would tell, whose value is not in `settings`.

    outside: lines of settings that stand behind the command, which does not get them.

    Keys of dictionaries, and keywords of calls around TRL's GRPOConfig, have dotted names.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, value: Any, line: int) -> None:
        """Set a name, in place of what an earlier line says."""
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                self.put(f"{name}.{key}", inner, line)
            return
        self.settings[name] = value
        self.places[name] = line
        self.unread.pop(name, None)

    def doubt(self, name: str, line: int) -> None:
        """Take a name's value, and its keys', for unknown from here on."""
        for known in [name, *(other for other in self.settings if other.startswith(f"{name}."))]:
            self.settings.pop(known, None)
            self.places.pop(known, None)
            self.unread[known] = line


class Draft:
    """values, comments: the configuration's. lost, missing: lines about what is not converted, or must be filled in."""

    def __init__(self, trainer: str, script: Script, defaults: Mapping[str, Any], nothing: Mapping[str, Any]) -> None:
        """nothing: the values that None stands for; elsewhere it is unread, unless it is the default."""
        self.trainer = trainer
        self.script = script
        self.values: dict[str, Any] = {"output_dir": "", "model": {}, "data": {}, "reward": {}}
        self.values |= {"rollout": {}, "algorithm": {}, "train": {}}
        self.comments: dict[str, str] = {}
        self.lost: list[str] = []
        self.missing: list[str] = []
        self._defaults = defaults
        self._asked: set[str] = set()
        self._listed: set[str] = set()
        self._empty = {name for name, value in script.settings.items() if value is None and name in defaults}
        for name in self._empty:
            if name in nothing:
                script.settings[name] = nothing[name]
            else:
                script.doubt(name, script.places[name])

    def get(self, name: str) -> Any:
        """The script's value, or the trainer's default."""
        self._asked.add(name)
        return self.script.settings.get(name, self._defaults.get(name))

    def count(self, name: str, least: int = 1) -> int:
        """`get` of an integer. ValueError for another value, or one below `least`."""
        value = 0 if least < 1 and self.get(name) is False else whole(self.get(name))
        self._check(name, value is not None and least <= value < LIMIT, f"an integer of at least {least}")
        assert value is not None
        return value

    def number(self, name: str, above: float = -math.inf) -> float:
        """`get` of a finite number. ValueError for another value, or one that is not greater than `above`."""
        value = self.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > above and abs(value) < LIMIT
        self._check(name, good, "a number" if above == -math.inf else f"a number greater than {above:g}")
        return float(value)

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"want {self.trainer}'s {name} {wanted}; got {self.get(name)!r} ({self._place(name)})")

    def given(self, name: str) -> bool:
        """Whether the script has a value that can be read, and is not None."""
        self._asked.add(name)
        return self.script.settings.get(name) is not None

    def has(self, name: str) -> bool:
        """Whether the script has a value, read or not."""
        return self.given(name) or name in self.script.unread

    def unread(self, name: str) -> list[str]:
        """The name, if only running the script would tell its value."""
        return [name] if name in self.script.unread else []

    def origin(self, *names: str) -> str:
        """The names, with the line of each or the word default, for a comment."""
        return ", ".join(f"{name} ({self._place(name)})" for name in names)

    def _place(self, name: str) -> str:
        if name in self.script.unread:
            what = "gives no value" if name in self._empty else "could not be read"
            return f"line {self.script.unread[name]} {what}"
        return f"line {self.script.places[name]}" if name in self.script.places else "default"

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of ours. names: the settings that it comes from. note: what else its comment says."""
        *sections, name = key.split(".")
        at = self.values
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
        self.comment(key, f"{value} is by {self.trainer}'s default", *names, note=note)

    def comment(self, key: str, instead: str, *names: str, note: str = "") -> None:
        """Say where a key of ours comes from, and what it is instead where a name could not be read."""
        unread = [self.origin(name) for name in names if name in self.script.unread]
        self.missing += [f"{key}: {place}; {instead}" for place in unread]
        self._listed.update(names)
        self.comments[key] = "; ".join(filter(None, ["FILL IN" if unread else "", self.origin(*names), note]))

    def take(self, key: str, name: str) -> Any:
        """Set a key to a setting's value as it is; -> the value. None sets nothing."""
        value = self.get(name)
        if value is not None:
            self.set(key, value, name)
        return value

    def fill_in(self, key: str, value: Any, note: str, *names: str) -> None:
        """Set a key, which the script does not say, to a guess or a text that no run accepts."""
        self.set(key, value, note=f"FILL IN: {note}")
        given = [name for name in names if self.has(name)]
        self._listed.update(given)
        self.missing.append(f"{key}: {note}" + (f": {self.origin(*given)}" if given else ""))

    def lose(self, name: str, why: str) -> None:
        """List a setting as not converted."""
        self._listed.add(name)
        line = self.script.places.get(name) or self.script.unread.get(name)
        self.lost.append(f"{name} (line {line}): {why}" if line else f"{name}: {why}")

    def drop(self, key: str, why: str) -> None:
        """Leave out a key of ours that would have no effect."""
        *sections, name = key.split(".")
        at = self.values
        for section in sections:
            at = at[section]
        del at[name]
        origin = self.comments.pop(key, key).removeprefix("FILL IN; ")
        self.missing = [line for line in self.missing if not line.startswith(f"{key}:")]
        self.lost.append(f"{origin}: {key} would have no effect, {why}")

    def list_the_rest(self, reasons: Mapping[str, str], unknown: str) -> None:
        """List each setting that no value's comment names, and those that could not be read."""
        for name in self.script.settings:
            if name in self._asked - self._listed:
                self.lose(name, "changes nothing here, given the other settings")
            elif name not in self._listed:
                known = ending(name, reasons)
                self.lose(name, reasons[known] if known else unknown)
        for name in self.script.unread:
            known = ending(name, reasons)
            if name in self._asked - self._listed:
                self.missing.append(f"{name}: {self._place(name)}; {self.trainer}'s default is taken")
            elif name not in self._listed:
                self.lose(name, reasons[known] if known else "only running the script would tell")
        for name, line in self.script.outside.items():
            self.lost.append(f"{name} (line {line}): no part of the command, which ends before that line")


def whole(value: Any) -> int | None:
    """The number as an integer; None if it is none."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if integer or (isinstance(value, float) and value.is_integer()) else None
