"""The file of a comparison: settings, methods, studies, and the search for learning rates."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from rlplus.common.errors import check_name, hint
from rlplus.common.section import Fraction, PathText, Positive, Section, Text
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import problem_lines, read_yaml

BASE = "Base"  # the model before training, a row of every table
FIRST_SEARCHED = 1000  # the least seed of a search, which no study reports
Overrides = dict[str, Any]  # dotted keys of the training configuration
# Keys of the training configuration of which the comparison gives each run its own value.
OWNED = ("train.seed", "output_dir", "model.path", "algorithm.preset")


class Setting(Section):
    """A base model with its data."""

    prepare: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """A function, as "module:name", that makes the base model and the data of each seed; see docs/comparing.md. None =
    the training configuration's."""
    options: dict[str, JsonValue] = {}
    """Further arguments of that function, by name."""
    overrides: Overrides = {}
    """Values of the training configuration, by dotted keys."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prepare is None and self.options:
            raise ValueError("options are those of a function: want prepare, too")
        return self


class Method(Section):
    """A way of training."""

    preset: str
    """algorithm.preset."""
    after: Text | None = None
    """Another method, from whose model this one starts; None = the base model."""
    searched_as: Text | None = None
    """Another method, whose learning rate this one takes; None = one of its own."""
    overrides: Overrides = {}
    """Values of the training configuration, by dotted keys."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preset not in ALGORITHMS:
            near = hint(self.preset, ALGORITHMS, otherwise=f"; want one of {', '.join(ALGORITHMS)}")
            raise ValueError(f"preset: got {self.preset!r}{near}")
        return self


class Study(Section):
    """A table and its figures: methods in settings, over seeds."""

    settings: Annotated[list[str], Field(min_length=1)]
    """Names of settings of the file."""
    methods: Annotated[list[Text], Field(min_length=1)]
    """Names of methods of the file, or Base: the model before training."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of seeds; studies with the same first seed share their runs."""
    first_seed: Annotated[int, Field(ge=0)] = 0
    """The others follow it."""
    reference: Text | None = None
    """The method that the others are compared with, seed by seed on the same problems; None = the last one."""

    @property
    def compared_with(self) -> str:
        return self.reference or self.methods[-1]

    @property
    def seed_numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seed_numbers[-1] >= FIRST_SEARCHED:
            wanted = f"want seeds below {FIRST_SEARCHED}, where those of searches begin"
            raise ValueError(f"{wanted}; got {self.seed_numbers[-1]}")
        return self


class Search(Section):
    """The learning rate of each method in each setting: the best by mean pass@1 over the problems of all seeds."""

    rates: Annotated[list[Positive], Field(min_length=2)]
    """The learning rates to try, all different."""
    further: Annotated[int, Field(ge=0)] = 0
    """Number of further rates at most: as long as the best is the least or the greatest that was tried, one beyond it,
    as far away as its neighbour."""
    seed: Annotated[int, Field(ge=FIRST_SEARCHED)] = FIRST_SEARCHED
    """The first seed. No study reports it."""
    seeds: Annotated[int, Field(ge=1)] = 1
    """Number of seeds that each rate is tried on."""
    share: Annotated[Fraction, Field(gt=0)] = 1 / 3
    """Share of the steps, and of the generated tokens, that a search trains."""
    overrides: Overrides = {}
    """Values of the training configuration for its evaluations, by dotted keys: evaluation.data.path of problems that
    no test has. Data that are prepared have some of their own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"want rates that differ; got {self.rates}")
        return self

    @property
    def seed_numbers(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    def next_rate(self, scores: Mapping[float, float]) -> float | None:
        """The rate to try after these, which have scores: beyond the best one; None if the search ends."""
        rates = sorted(scores)
        chosen = best_rate(scores)
        if len(rates) - len(self.rates) == self.further or chosen not in (rates[0], rates[-1]):
            return None
        neighbour = rates[1] if chosen == rates[0] else rates[-2]
        further = float(f"{chosen * chosen / neighbour:.2g}")
        beyond = further < rates[0] or further > rates[-1]  # neighbours may be nearer than two digits show
        return further if beyond and scores[neighbour] < scores[chosen] else None


def best_rate(scores: Mapping[float, float]) -> float:
    """The rate with the highest score, of several the least."""
    return max(sorted(scores), key=lambda rate: scores[rate])


class Comparison(Section):
    """A comparison of methods."""

    run: PathText
    """The training configuration that all share, relative to this file."""
    overrides: Overrides = {}
    """Values of the training configuration for all runs, by dotted keys."""
    settings: dict[str, Setting] = {"": Setting()}
    """Settings by name; without any the training configuration has model and data, and the name is empty."""
    methods: dict[Text, Method] = {}
    """Methods by name, which has no commas."""
    studies: Annotated[dict[Text, Study], Field(min_length=1)]
    """Tables and figures of the page, by title."""
    search: Search | None = None
    """None = train.lr of the training configuration, or of the method's overrides."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        for name in self.methods:
            self.chain(name)
        return self

    def _problems(self) -> Iterator[str]:
        yield from _unknown("methods", self._named_methods(), self.methods)
        named = ((f"studies.{title}.settings", name) for title, each in self.studies.items() for name in each.settings)
        yield from _unknown("settings", named, self.settings)
        yield from self._odd_names()
        yield from self._owned_keys()
        for title, study in self.studies.items():
            if study.reference not in (None, BASE, *study.methods):
                yield f"studies.{title}.reference: want one of its methods, or {BASE}; got {study.reference!r}"
        for name, method in self.methods.items():
            other = self.methods.get(method.searched_as or "")
            if other is not None and other.searched_as is not None:
                yield f"methods.{name}.searched_as: {method.searched_as} itself takes its rate from another method"
        without = [name for name, setting in self.settings.items() if setting.prepare is None]
        if self.search is not None and without and "evaluation.data.path" not in self.search.overrides:
            yield (
                "search.overrides: want evaluation.data.path, problems that no test has; the settings "
                f"{', '.join(map(repr, without))} have no prepare, which would make them"
            )

    def _odd_names(self) -> Iterator[str]:
        for what, names in (("methods", self.methods), ("settings", self.settings)):
            yield from (f"{what}.{name}: want a name without a comma" for name in names if "," in name)
        if BASE in self.methods:
            yield f"methods.{BASE}: this name is the base model's, which is in every table"

    def _owned_keys(self) -> Iterator[str]:
        sections = [("overrides", self.overrides)]
        sections += [(f"settings.{name}.overrides", each.overrides) for name, each in self.settings.items()]
        sections += [(f"methods.{name}.overrides", each.overrides) for name, each in self.methods.items()]
        for place, overrides in sections:
            for key in owned(overrides, self):
                yield f"{place}: {key} is the comparison's, which gives each run its own: leave it out"

    def _named_methods(self) -> Iterator[tuple[str, str]]:
        for title, study in self.studies.items():
            yield from ((f"studies.{title}.methods", name) for name in study.methods if name != BASE)
        for name, method in self.methods.items():
            yield from ((f"methods.{name}", other) for other in (method.after, method.searched_as) if other)

    def chain(self, name: str) -> list[str]:
        """The methods that are trained one after the other, `name` last. ValueError for a circle."""
        names = [name]
        while (before := self.methods[names[0]].after) is not None:
            if before in names:
                raise ValueError(f"methods.{name}: it comes after itself: {' after '.join([*names[::-1], before])}")
            names.insert(0, before)
        return names


SECTIONS: dict[str, type[Section]] = {"settings": Setting, "methods": Method, "studies": Study, "search": Search}


def owned(keys: Collection[str], comparison: Comparison) -> list[str]:
    """Those keys that an override must not have, since each run has its own."""
    made = any(setting.prepare is not None for setting in comparison.settings.values())
    found = [key for key in keys if key in OWNED and (key != "model.path" or made)]
    return [*found, *(key for key in keys if key == "train.lr" and comparison.search is not None)]


def _unknown(what: str, named: Iterator[tuple[str, str]], known: Mapping[str, object]) -> Iterator[str]:
    for place, name in named:
        if name not in known:
            near = hint(name, known, otherwise=f"; there are {', '.join(known) or 'none'}")
            yield f"{place}: no such name in {what}: {name!r}{near}"


def load_comparison(
    path: Path,
    presets: Sequence[str] = (),
    seeds: int | None = None,
    settings: Sequence[str] = (),
    first_seed: int | None = None,
) -> Comparison:
    """The comparison of a file, which may also be a training configuration: then `presets` are its methods.

    presets: the methods of a comparison to keep; further presets become methods of its first study. seeds,
    first_seed: in place of each study's. settings: the ones to keep. Raises ValueError, one line for each problem.
    """
    data = read_yaml(path)
    if "run" not in data:
        if not presets:
            raise ValueError(f"{path} is a training configuration: want --presets, the methods to compare")
        for name in presets:
            check_name("--presets", name, ALGORITHMS)
        data = {"run": path.name, "studies": {"Methods": {"settings": [""], "methods": list(presets)}}}
        data["methods"] = {name: {"preset": name} for name in presets}
    try:
        comparison = Comparison.model_validate(data)
        given = {key: value for key, value in (("seeds", seeds), ("first_seed", first_seed)) if value is not None}
        if presets or settings or given:
            comparison = Comparison.model_validate(_among(data, presets, settings, given))
    except ValidationError as error:
        lines = [line for detail in error.errors() for line in _lines(detail)]
        raise ValueError("\n".join([f"{path} does not describe a comparison:", *dict.fromkeys(lines)])) from error
    return comparison


def _among(
    data: dict[str, Any], names: Sequence[str], settings: Sequence[str], given: Mapping[str, int]
) -> dict[str, Any]:
    """The file's content with only these methods and settings; given: keys of all studies.

    A preset that is no method becomes one of the first study. Studies that compare nothing any more are left out.
    """
    methods = data.get("methods", {})
    new = [name for name in names if name not in methods]
    problems = [
        *_unknown("methods and presets", (("--presets", name) for name in new), {**methods, **ALGORITHMS}),
        *_unknown("settings", (("--settings", name) for name in settings), data.get("settings", {})),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    studies = {}
    for title, study in data["studies"].items():
        kept = {**study, **given}
        if settings:
            kept["settings"] = [name for name in study["settings"] if name in settings]
        if names:
            first = title == next(iter(data["studies"]))
            kept["methods"] = [*(new if first else []), *(name for name in study["methods"] if name in names)]
            if kept.get("reference") not in kept["methods"]:
                kept.pop("reference", None)
        if kept["settings"] and len(kept["methods"]) >= (min(2, len(names)) if names else 1):
            studies[title] = kept
    if not studies:
        raise ValueError("want methods and settings that one study of the file has; no study has these together")
    return {**data, "methods": {**{name: {"preset": name} for name in new}, **methods}, "studies": studies}


def _lines(detail: Any) -> list[str]:
    if detail["type"] != "extra_forbidden":
        return problem_lines(detail)
    *parents, key = map(str, detail["loc"])
    section = SECTIONS[parents[0]] if parents else Comparison
    prefix = "".join(f"{parent}." for parent in parents)
    return [f"{prefix}{key}: unknown key{hint(key, section.model_fields, prefix)}"]
