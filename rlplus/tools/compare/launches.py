"""The runs of a comparison: which there are, and each one made, or found finished."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from rlplus.common.commands import ending_with_this_process
from rlplus.common.durable import UNSEALED, flush, make_folder, write_text
from rlplus.common.errors import RunFailed, ending
from rlplus.common.textfiles import file_name
from rlplus.common.yaml_text import yaml_value
from rlplus.tools.compare.config import BASE, Comparison, Overrides, best_rate
from rlplus.tools.compare.prepared import MODEL, TEST, TRAIN, VALIDATION, Preparation, checked_options, find_function
from rlplus.tools.compare.run_identity import ASKED, read_asked, trained_part, without_own
from rlplus.train.config import Config, load_config
from rlplus.train.evaluation.results import Evaluation, load_results
from rlplus.train.reward.supervisor import end_with_parent

FINISHED = "finished"  # written into a run's folder at its end
TAIL = 20  # lines of a failed command's log that are shown
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One training, or with method BASE none, and its evaluation.

    rate: tried in a search; None for a reported run, whose rate is the configuration's or the best one found.
    before: the run from whose model it starts; None = the setting's base model.
    """

    setting: str
    seed: int
    method: str
    rate: float | None = None
    before: "Run | None" = field(default=None, compare=False)

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f", lr {self.rate:g}"
        return ", ".join(filter(None, (self.setting, self.method, f"seed {self.seed}"))) + rate


class Runner:
    """Makes the runs of a comparison in `folder`, `jobs` at a time.

    folder/runs/<setting>/seed-<N>/ has a folder for each method; folder/prepared/<setting>/seed-<N>/ what its
    function has made for it.
    launcher: the beginning of the commands, such as torchrun, --nproc_per_node, 8, -m. overrides: changes to the
    training configuration, for all runs.
    """

    def __init__(
        self,
        comparison: Comparison,
        config: Path,
        folder: Path,
        *,
        overrides: Sequence[str] = (),
        jobs: int = 1,
        launcher: Sequence[str] = (sys.executable, "-m"),
        say: Say = print,
    ) -> None:
        self.comparison = comparison
        self.config = config
        self.folder = folder
        self.given = list(overrides)
        self.jobs = jobs
        self.say = say
        self.launcher = [*launcher]
        self._children: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._starting = Lock()  # held while a child starts or all are stopped
        self._rates: dict[tuple[str, str], float] = {}  # found, by setting and method
        self.searched: dict[str, dict[str, dict[str, float]]] = {}  # mean pass@1 by setting, method and rate

    def path(self, run: Run, root: Path | None = None) -> Path:
        """The run's folder; root: in place of the comparison's."""
        name = run.method if run.rate is None else f"{run.method}-lr-{run.rate:g}"
        return (root or self.folder) / "runs" / file_name(run.setting) / f"seed-{run.seed}" / file_name(name)

    def preparation(self, setting: str, seed: int, root: Path | None = None) -> Preparation | None:
        """The base model and data that are made for a setting and seed; None = the training configuration's."""
        wanted = self.comparison.settings[setting]
        if wanted.prepare is None:
            return None
        folder = (root or self.folder) / "prepared" / file_name(setting) / f"seed-{seed}"
        return Preparation(setting, wanted.prepare, wanted.options, seed, folder)

    def all(self) -> list[Run]:
        """The reported runs, in an order in which each follows what it starts from."""
        found: dict[Run, None] = {}
        for study in self.comparison.studies.values():
            for setting in study.settings:
                for seed in study.seed_numbers:
                    for method in (BASE, *study.methods):
                        found |= dict.fromkeys(self.chain(setting, seed, method))
        return list(found)

    def chain(self, setting: str, seed: int, method: str, rates: Sequence[float | None] = (None,)) -> list[Run]:
        """The method's run for each rate, after the run that it starts from."""
        before: list[Run] = []
        if method != BASE and (first := self.comparison.methods[method].after) is not None:
            rate = None if rates == (None,) else self._rates.get((setting, self._searched(first)))
            before = self.chain(setting, seed, first, (rate,))
        start = before[-1] if before else None
        return [*before, *(Run(setting, seed, method, rate, start) for rate in rates)]

    def check(self) -> None:
        """ValueError for a run without a valid configuration and for a setting whose function cannot be called.

        Of a search, its first rate stands for all.
        """
        reported = self.all()
        for name in dict.fromkeys(run.setting for run in reported):
            wanted = self.comparison.settings[name]
            try:
                if wanted.prepare is not None:
                    checked_options(find_function(wanted.prepare), wanted.options)
            except ValueError as error:
                raise ValueError(f"settings.{name}: {error}") from error
        for run in reported:
            config = self.config_of(run)
            if config.evaluation.data is None:
                problems = "evaluation.data or evaluation.benchmarks, the problems to evaluate on"
                raise ValueError(f"{run.title}: want {problems}; got neither")
            if config.model.path is None:
                raise ValueError(
                    "want model.path, the base model that is evaluated and that every method starts from; "
                    "got model.scratch, whose random weights would be others for each seed"
                )
        if (search := self.comparison.search) is not None:
            for setting, method in self._searches(reported):
                self.config_of(self.chain(setting, search.seed, method, search.rates[:1])[-1])

    def make(self) -> None:
        """Make what is not finished yet, searches first; RunFailed if a run fails. Call `check` before."""
        reported = self.all()
        self._search(reported, self._make_all)
        self._make_all(reported)

    def searches(self) -> dict[tuple[str, str], list[Run]]:
        """The runs with which a search begins, by setting and method; empty without a search."""
        if (search := self.comparison.search) is None:
            return {}
        found: dict[tuple[str, str], dict[Run, None]] = {}
        for setting, part in self._searches(self.all()):
            method = self._searched(part)
            for run in self._tries(setting, method, search.rates):
                if run.method == method:
                    found.setdefault((setting, method), {})[run] = None
                elif self._searched(run.method) != run.method:  # another's rate: no try of its own starts the method
                    found.setdefault((setting, run.method), {})[replace(run, rate=search.rates[0])] = None
        return {each: [*runs] for each, runs in found.items()}

    def finished(self) -> dict[Run, dict[str, Evaluation]]:
        """The evaluations, by the name of the test set, of the reported runs that are finished."""
        reported = self.all()
        self._search(reported, lambda runs: None)
        known = [run for run in reported if self.comparison.search is None or run.method == BASE or self._rate(run)]
        return {run: load_results(self.path(run)) for run in known if self._is_finished(run)}

    def _search(self, reported: Sequence[Run], make: Callable[[Sequence[Run]], None]) -> None:
        """Find the best rate of each method that has one of its own, those that others start from first."""
        if (search := self.comparison.search) is None:
            return
        depth = {
            (setting, self._searched(part)): len(self.comparison.chain(part))
            for setting, part in self._searches(reported)
        }
        for level in sorted(set(depth.values())):
            going = {each: search.rates for each in depth if depth[each] == level}
            while going:
                make(list(dict.fromkeys(run for each, rates in going.items() for run in self._tries(*each, rates))))
                tried = {each: self._scores(*each, rates) for each, rates in going.items()}
                going = {}
                for (setting, method), scores in tried.items():
                    if not scores:
                        continue  # some of its runs are not finished
                    self.searched.setdefault(setting, {})[method] = {f"{rate:g}": each for rate, each in scores.items()}
                    self._rates[setting, method] = best_rate(scores)
                    if (further := search.next_rate(scores)) is not None:
                        going[setting, method] = [*scores, further]

    def _tries(self, setting: str, method: str, rates: Sequence[float]) -> list[Run]:
        """The runs of a search for the method's rate, each after the run that it starts from."""
        assert self.comparison.search is not None
        seeds = self.comparison.search.seed_numbers
        return [run for seed in seeds for run in self.chain(setting, seed, method, rates)]

    def _scores(self, setting: str, method: str, rates: Sequence[float]) -> dict[float, float]:
        """Mean pass@1 over the seeds of a search by rate, ascending; empty if a run is not finished."""
        runs = [run for run in self._tries(setting, method, rates) if run.method == method]
        if not all(map(self._is_finished, runs)):
            return {}
        return {
            rate: fmean(solved(load_results(self.path(run))) for run in runs if run.rate == rate)
            for rate in sorted(rates)
        }

    def _searches(self, reported: Sequence[Run]) -> list[tuple[str, str]]:
        """The setting and method of what the search trains: methods with a rate of their own after their chains."""
        searched = dict.fromkeys((run.setting, self._searched(run.method)) for run in reported if run.method != BASE)
        parts = ((setting, part) for setting, method in searched for part in self.comparison.chain(method))
        return list(dict.fromkeys(parts))

    def _searched(self, method: str) -> str:
        return method if method == BASE else self.comparison.methods[method].searched_as or method

    def _rate(self, run: Run) -> float | None:
        """The run's learning rate, if it is not the configuration's."""
        return run.rate or self._rates.get((run.setting, self._searched(run.method)))

    def _make_all(self, runs: Sequence[Run]) -> None:
        """Make the runs, `jobs` at a time, each after the one that it starts from. The first failure ends all."""
        self._prepare(runs)
        made: set[Run] = set()
        while wave := [run for run in runs if run not in made and (run.before is None or run.before in made)]:
            with ThreadPoolExecutor(self.jobs) as pool:
                work = {pool.submit(self._make, run): run for run in wave}
                try:
                    for done in as_completed(work):
                        made.add(work[done])
                        if done.result():
                            self.say(f"{len(made)} of {len(runs)}: {work[done].title}")
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._stop()
                    raise

    def _prepare(self, runs: Sequence[Run]) -> None:
        """Make the base models and the data of these runs."""
        each = (self.preparation(*key) for key in dict.fromkeys((run.setting, run.seed) for run in runs))
        missing = [one for one in each if one is not None and not one.is_made()]
        with_this = (signal.SIGKILL, os.getpid())
        with ProcessPoolExecutor(self.jobs, get_context("spawn"), end_with_parent, with_this) as pool:
            try:
                for number, made in enumerate(pool.map(_make, missing), 1):
                    self.say(f"{number} of {len(missing)}: {made.title}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in active_children():
                    child.terminate()
                raise

    def _make(self, run: Run) -> bool:
        """Train and evaluate; False if that was done before.

        A run with another configuration is deleted; if only its evaluation differs, this is made again.
        """
        if self._is_finished(run):
            return False
        folder = self.path(run)
        asked = self._asked(run)
        if folder.exists() and ((was := read_asked(folder)) is None or trained_part(was) != trained_part(asked)):
            self.say(f"{run.title}: made again, since its configuration has changed")
            shutil.rmtree(folder)
        make_folder(folder)
        (folder / FINISHED).unlink(missing_ok=True)
        flush(folder)  # or the new identity might reach the disk beside it
        text = json.dumps(asked | {"checksum": UNSEALED}, indent=1, default=lambda config: config.model_dump())
        write_text(folder / ASKED, text + "\n", sealed=True)
        overrides = self.overrides(run)
        if run.method != BASE:
            self._command(run, "train", ["--resume=auto"], overrides)
        model = folder / MODEL if run.method != BASE else self._start(run) or self.config_of(run).model.path
        self._command(run, "eval", ["--model", str(model), "--output", str(folder), "--overwrite"], overrides)
        (folder / FINISHED).touch()
        flush(folder)
        return True

    def _is_finished(self, run: Run) -> bool:
        folder = self.path(run)
        return (folder / FINISHED).is_file() and read_asked(folder) == self._asked(run)

    def config_of(self, run: Run) -> Config:
        """The run's training configuration. ValueError, with the run's name, if it is none."""
        try:
            return load_config(self.config, self.overrides(run))
        except ValueError as error:
            raise ValueError(f"{run.title}: {error}") from error

    def _asked(self, run: Run) -> dict[str, Any]:
        """The run's identity: its configuration, preset, data and predecessors, wherever the folder is."""
        setting = self.comparison.settings[run.setting]
        config = without_own(load_config(self.config, self.overrides(run, Path("comparison"))))
        return {
            "config": config,
            "algorithm": repr(config.algorithm.resolve()),  # another version's preset may have other values
            "prepare": setting.prepare,
            "options": setting.options,
            "before": None if run.before is None else self._asked(run.before),
        }

    def overrides(self, run: Run, root: Path | None = None) -> list[str]:
        """Changes to the training configuration; later ones win. root: in place of the comparison's folder."""
        prepared = self.preparation(run.setting, run.seed, root)
        values: Overrides = {}
        if prepared is not None:
            values |= {"data.path": str(prepared.folder / TRAIN), "evaluation.data.path": str(prepared.folder / TEST)}
        values |= self.comparison.overrides | self.comparison.settings[run.setting].overrides
        own: Overrides = {"train.seed": run.seed, "output_dir": str(self.path(run, root))}
        if run.method != BASE:
            method = self.comparison.methods[run.method]
            values |= method.overrides
            own["algorithm.preset"] = method.preset
        if (start := self._start(run, root)) is not None:
            own["model.path"] = str(start)
        if (rate := self._rate(run)) is not None:
            own["train.lr"] = rate
        if run.rate is not None:
            own |= self._search_overrides(run, [*_settings(values), *self.given, *_settings(own)], prepared)
        return [*_settings(values), *self.given, *_settings(own)]

    def _start(self, run: Run, root: Path | None = None) -> Path | None:
        """The model that the run starts from; None = the training configuration's."""
        if run.before is not None:
            return self.path(run.before, root) / MODEL
        prepared = self.preparation(run.setting, run.seed, root)
        return None if prepared is None else prepared.folder / MODEL

    def _search_overrides(self, run: Run, overrides: Sequence[str], prepared: Preparation | None) -> Overrides:
        """A share of the steps that `overrides` ask for, and other problems to evaluate on."""
        assert self.comparison.search is not None
        search = self.comparison.search
        train = load_config(self.config, overrides).train
        if train.steps is None:
            raise ValueError("a search trains a share of train.steps: want these, not epochs")
        shorter = {"train.steps": train.steps, "train.generated_tokens": train.generated_tokens}
        found: Overrides = {key: math.ceil(search.share * value) for key, value in shorter.items() if value is not None}
        if prepared is not None:
            found["evaluation.data.path"] = str(prepared.folder / VALIDATION)
        return found | search.overrides

    def _command(self, run: Run, command: str, options: Sequence[str], overrides: Sequence[str]) -> None:
        """Run an rlplus command with its output in a file; RunFailed with the end of it."""
        log = self.path(run) / f"{command}.log"
        asked = [*self.launcher, "rlplus", command, *options, str(self.config), *overrides]
        arguments = ending_with_this_process(asked)
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs)), **os.environ}
        with log.open("wb") as file:
            with self._starting:
                if self._stopped:
                    raise RunFailed(f"{run.title}: stopped with another run")
                child = subprocess.Popen(arguments, stdout=file, stderr=file, env=environment)
                self._children.add(child)
            status = child.wait()
            self._children.discard(child)
        if status:
            what = f"rlplus {command} failed with {ending(status)}"
            raise RunFailed(f"{run.title}: {what}; from {log}:\n{_tail(log, what)}")

    def _stop(self) -> None:
        """End the children, and start no further ones."""
        with self._starting:
            self._stopped = True
            for child in list(self._children):
                child.terminate()


def _make(wanted: Preparation) -> Preparation:
    """Make the files, in a separate process."""
    wanted.make()
    return wanted


def _tail(log: Path, what: str) -> str:
    """The end of a failed command's log, and a note if the log could not be written, as on a full disk.

    what: how the command ended, for the log.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    try:
        with log.open("ab") as file:
            file.write(f"{what}\n".encode())
    except OSError as error:
        lines.append(f"could not write {log}: {error.strerror}; what it said last may be lost")
    return "\n".join(lines) or "the log is empty"


def _settings(values: Overrides) -> list[str]:
    """The values as overrides of the command line."""
    return [f"{key}={yaml_value(value)}" for key, value in values.items()]


def solved(results: Mapping[str, Evaluation]) -> float:
    """Mean pass@1 over the problems of all test sets."""
    return fmean(value for one in results.values() for value in one.values(1).tolist())
