"""Runs that exist, taken for a comparison: methods and seeds follow from their configurations, nothing is trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplus.common.errors import check_name
from rlplus.common.yaml_text import parse_yaml
from rlplus.tools.compare.config import BASE, Comparison
from rlplus.tools.compare.outcomes import Results, outcome_of
from rlplus.tools.report import RunData, load_run
from rlplus.train.config import check_report_folder, is_run, recorded_config
from rlplus.train.evaluation.results import Evaluation, load_results

TITLE = "Runs"
SAME = ("problems", "k", "temperature", "grader")  # fields in which the evaluations of a test set must agree
RULES = ("reward.cut_off", "reward.box")  # and what their `asked` must agree in, where it is known
_FREE = ("train.seed", "output_dir", "reward.workers")  # keys that do not make another method, nor do these sections
_FREE_SECTIONS = ("log.", "checkpoint.", "evaluation.")


@dataclass(frozen=True)
class PastRun:
    """A folder with results of an evaluation. settings: of its training, by dotted keys; empty for a base model."""

    folder: Path
    name: str
    results: dict[str, Evaluation]
    settings: dict[str, Any]

    @property
    def preset(self) -> str:
        return str(self.settings["algorithm.preset"])

    @property
    def seed(self) -> int:
        return int(self.settings["train.seed"])

    @property
    def kind(self) -> dict[str, Any]:
        """The settings that make a method."""
        return {k: v for k, v in self.settings.items() if k not in _FREE and not k.startswith(_FREE_SECTIONS)}


def split_name(text: str) -> tuple[str, Path] | None:
    """A method's name, which may be empty, and a folder, of "NAME=FOLDER" or "FOLDER"; None if there is no folder."""
    name, equals, folder = text.partition("=")
    if Path(text).is_dir():
        return "", Path(text)
    return (name, Path(folder)) if equals and Path(folder).is_dir() else None


def results_of(arguments: Sequence[str], reference: str | None, provenance: Mapping[str, str]) -> Results:
    """The runs in the folders as a comparison. reference: see `Study`; None = the last method.

    A folder with the results of `rlplus eval` alone is the base model's. Seeds are numbered by their order: what they
    are is in the provenance, and so is what the methods differ in. ValueError for runs that cannot be compared.
    """
    past = [_read(text) for text in arguments]
    bases = [one for one in past if not one.settings]
    runs = [one for one in past if one.settings]
    if not runs:
        raise ValueError(f"want runs that were trained; {past[0].folder} has only results of an evaluation")
    if len(bases) > 1:
        folders = ", ".join(str(one.folder) for one in bases)
        raise ValueError(f"want the results of one base model at most; got {folders}")
    _check_tests(past)
    methods = _methods(runs)
    if reference is not None:
        check_name("--reference", reference, (*methods, BASE))
    seeds = _seeds(methods)
    outcomes = [
        outcome_of(one.folder, "", number, name, float(one.settings["train.lr"]), one.results)
        for name, each in methods.items()
        for number, one in enumerate(each[seed] for seed in seeds)
    ]
    outcomes += [outcome_of(one.folder, "", i, BASE, 0.0, one.results) for one in bases for i in range(len(seeds))]
    study = {"settings": [""], "methods": [*methods], "seeds": len(seeds), "reference": reference}
    data = {
        "run": f"{runs[0].folder.resolve().name}/config.yaml",
        "methods": {name: {"preset": each[seeds[0]].preset} for name, each in methods.items()},
        "studies": {TITLE: study},
    }
    known = {"seeds": ", ".join(map(str, seeds)), "methods differ in": ", ".join(_differing(runs)) or "nothing"}
    return Results(Comparison.model_validate(data), dict(provenance) | known, {}, {}, outcomes)


def _read(text: str) -> PastRun:
    found = split_name(text)
    if found is None:
        raise ValueError(f"want folders of runs, as FOLDER or NAME=FOLDER; got {text}, which is no folder")
    name, folder = found
    check_report_folder(folder)
    results = load_results(folder)
    if not results:
        raise ValueError(f"want runs that were evaluated; {folder} has no evaluation-BENCHMARK.json: run `rlplus eval`")
    if not is_run(folder):
        return PastRun(folder, name, results, {})
    place = folder / "config.yaml"
    text = load_run(folder).config
    try:
        config = recorded_config(parse_yaml(text, place))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    config = config.model_copy(update={"reward": config.reward.stated})
    return PastRun(folder, name, results, RunData(config.to_yaml(), ()).settings)


def _check_tests(past: Sequence[PastRun]) -> None:
    """ValueError unless all have been evaluated on the same problems in the same way."""
    first = past[0]
    for one in past[1:]:
        if one.results.keys() != first.results.keys():
            have = "; ".join(f"{each.folder} has {', '.join(each.results)}" for each in (first, one))
            raise ValueError(f"want runs evaluated on the same benchmarks; {have}")
        for name, result in one.results.items():
            wanted = _facts(first.results[name])
            wrong = [key for key, value in _facts(result).items() if wanted.get(key, value) != value]
            if wrong:
                raise ValueError(
                    f"want one evaluation of {name} for all runs; {one.folder} and {first.folder} differ in "
                    f"{', '.join(wrong)}"
                )


def _facts(result: Evaluation) -> dict[str, Any]:
    """The properties that evaluations of a test set must agree in, as far as they are known."""
    facts = {name: getattr(result, name) for name in SAME}
    if result.asked:
        facts |= {key: result.asked.get(key, "none") for key in RULES}
    _, _, rows = result.asked.get("data", "").rpartition("@")
    return facts | ({"rows of the data": rows} if rows else {})


def _methods(runs: Sequence[PastRun]) -> dict[str, dict[int, PastRun]]:
    """The runs by method and seed, in the order of the arguments."""
    methods: dict[str, dict[int, PastRun]] = {}
    names = _automatic_names([one for one in runs if not one.name])
    for one in runs:
        name = one.name or next(names)
        if (other := methods.setdefault(name, {}).setdefault(one.seed, one)) is not one:
            raise ValueError(
                f"want one run per method and seed; {other.folder} and {one.folder} are both {name}, seed {one.seed}. "
                "Runs of one method differ in nothing but seed and logs; NAME=FOLDER names a method"
            )
    return methods


def _automatic_names(runs: Sequence[PastRun]) -> Iterator[str]:
    """The preset of each run, with its values of the keys in which runs of this preset differ."""
    for one in runs:
        keys = _differing([other for other in runs if other.preset == one.preset])
        values = (f"{key.rpartition('.')[2]}={one.settings.get(key)}" for key in keys)
        yield " ".join([one.preset, *values]).replace(",", ";")


def _differing(runs: Sequence[PastRun]) -> list[str]:
    """The keys that make a method of which the runs have several values."""
    keys = dict.fromkeys(key for one in runs for key in one.kind)
    return [key for key in keys if any(one.kind.get(key) != runs[0].kind.get(key) for one in runs)]


def _seeds(methods: Mapping[str, Mapping[int, PastRun]]) -> list[int]:
    """The seeds that every method has. ValueError if one has others."""
    found = {name: sorted(each) for name, each in methods.items()}
    first, *others = found.items()
    for name, seeds in others:
        if seeds != first[1]:
            have = "; ".join(f"{which} has {', '.join(map(str, each))}" for which, each in (first, (name, seeds)))
            raise ValueError(f"want the same seeds of every method, which are compared seed by seed; {have}")
    return first[1]
