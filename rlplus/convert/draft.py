"""A configuration in the making: values, where each comes from, and what is lost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplus.config.synonyms import WITHOUT, ending


@dataclass
class Script:
    """The settings in a script. settings, places: values by name, and the line of each.

    unread: lines by name, also where a later line replaces a value that was read.

    model, rewards, data, lora: what surrounds TRL's GRPOConfig; rewards are names of functions.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    rewards: list[str] = field(default_factory=list)
    data: str | None = None
    lora: dict[str, Any] | None = None


class Draft:
    """values, comments: the configuration's. lost, missing: lines about what is not converted, or must be filled in."""

    def __init__(self, trainer: str, script: Script, defaults: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self.script = script
        self.values: dict[str, Any] = {"output_dir": "", "model": {}, "data": {}, "reward": {}}
        self.values |= {"rollout": {}, "algorithm": {}, "train": {}}
        self.comments: dict[str, str] = {}
        self.lost: list[str] = []
        self.missing: list[str] = []
        self._defaults = defaults
        self._used: set[str] = set()

    def get(self, name: str) -> Any:
        """The script's value, or the trainer's default."""
        self._used.add(name)
        value = self.script.settings.get(name)
        return self._defaults.get(name) if value is None else value

    def count(self, name: str, least: int = 1) -> int:
        """`get` of an integer. ValueError for another value, or one below `least`."""
        value = whole(self.get(name))
        self._check(name, value is not None and value >= least, f"an integer of at least {least}")
        assert value is not None
        return value

    def number(self, name: str, above: float = -math.inf) -> float:
        """`get` of a finite number. ValueError for another value, or one that is not greater than `above`."""
        value = self.get(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf
        self._check(name, good, "a number" if above == -math.inf else f"a number greater than {above:g}")
        return float(value)

    def table(self, name: str) -> dict[str, Any]:
        """`get` of a dictionary, which is empty if it is not given. ValueError for another value."""
        value = self.get(name)
        self._check(name, value is None or isinstance(value, dict), "a dictionary")
        return value or {}

    def _check(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise ValueError(f"want {self.trainer}'s {name} {wanted}; got {self.get(name)!r} ({self._place(name)})")

    def given(self, name: str) -> bool:
        return self.script.settings.get(name) is not None

    def origin(self, *names: str) -> str:
        """The names, with the line of each or the word default, for a comment."""
        return ", ".join(f"{name} ({self._place(name)})" for name in names)

    def _place(self, name: str) -> str:
        place = f"line {self.script.places[name]}" if self.given(name) else "default"
        line = self.script.unread.get(name)
        return place if line is None else f"{place}: line {line} could not be read"

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of ours. names: the settings that it comes from. note: what else its comment says."""
        *sections, name = key.split(".")
        at = self.values
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
        comment = "; ".join(filter(None, [self.origin(*names), note]))
        for unread in set(names) & self.script.unread.keys():
            line = self.script.unread.pop(unread)
            by = f"line {self.script.places[unread]}" if self.given(unread) else f"{self.trainer}'s default"
            self.missing.append(f"{key}: {unread} could not be read, line {line}; {value} is by {by}")
        self.comments[key] = comment

    def take(self, key: str, name: str) -> Any:
        """Set a key to a setting's value as it is; -> the value. None sets nothing."""
        value = self.get(name)
        if value is not None:
            self.set(key, value, name)
        return value

    def fill_in(self, key: str, value: Any, note: str) -> None:
        """Set a key, which the script does not say, to a guess or a text that no run accepts."""
        self.set(key, value, note=f"FILL IN: {note}")
        self.missing.append(f"{key}: {note}")

    def lose(self, name: str, why: str) -> None:
        """List a setting as not converted."""
        self._used.add(name)
        place = f" (line {self.script.places[name]})" if name in self.script.places else ""
        self.lost.append(f"{name}{place}: {why}")

    def drop(self, key: str, why: str) -> None:
        """Leave out a key of ours that would have no effect."""
        *sections, name = key.split(".")
        at = self.values
        for section in sections:
            at = at[section]
        del at[name]
        self.lost.append(f"{self.comments.pop(key, key)}: {key} would have no effect, {why}")

    def list_the_rest(self) -> None:
        """List each setting that nothing has asked for, and those that could not be read."""
        reasons = WITHOUT[self.trainer]
        unknown = "no argument of TRL's GRPOConfig" if self.trainer == "TRL" else "no counterpart"
        for name in self.script.settings:
            if name not in self._used:
                known = ending(name, reasons)
                self.lose(name, reasons[known] if known else unknown)
        for name, line in self.script.unread.items():
            self.lost.append(f"{name}: could not be read, line {line}")


def whole(value: Any) -> int | None:
    """The number as an integer; None if it is none."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if integer or (isinstance(value, float) and value.is_integer()) else None
