"""Show that the tests notice mistakes: apply each one of mutants.toml and run the tests that should fail.

    python tests/mutants.py [--jobs N] [--only WORDS]

It works in copies of the tree; mistakes in csrc/ are compiled there. The tests run in forks of this process, which has
imported what takes long, but nothing of the package. Exit status 1 if a mistake survives its tests, if its text does
not stand exactly once in its file, or if a test fails without any.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent
PARTS = ("rlplus", "src", "kernels", "csrc", "bench", "configs", "examples", "experiments", "hub", "packages", "tests")
PARTS += (".github", "docs", "pyproject.toml", "setup.py", "mkdocs.yml", "Makefile", "LICENSE")
PARTS += tuple(sorted(path.name for path in ROOT.glob("*.md")))
TESTS = (*ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/*.py"))
FOLDERS = {path.name: path.parent.relative_to(ROOT) for path in TESTS}
TIMEOUT = 300  # seconds; a mistake may make a loop endless


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` of `file`, which stands there once, becomes `new`. tests: node ids that should notice it."""

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def native(self) -> bool:
        return self.file.startswith("csrc/")

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def fault(self) -> str | None:
        """The error in the entry itself; None without one."""
        found = (ROOT / self.file).read_text().count(self.old)
        if found != 1:
            return f"{self.file}: want {self.old!r} there once; found {found} times"
        for test in self.tests:
            file, name = test.partition("[")[0].split("::")
            if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE):
                return f"want a test {test}; found none"
        return None


def place(test: str) -> str:
    """The node id of test_x.py::test_y; a file's name is only one's."""
    return str(FOLDERS.get(test.partition("::")[0], Path("tests")) / test)


def mutants() -> list[Mutant]:
    files = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    return [
        Mutant(file, m["what"], m["old"], m["new"], tuple(map(place, m["tests"].split())))
        for file, entries in files.items()
        for m in entries
    ]


def copy_tree(to: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, to / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / part)


def build(tree: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--force"]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"RLPLUS_EXT": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def start(tree: Path, tests: Sequence[str], limit: int) -> int:
    """Run the tests there in a process of its own, up to the first that fails; -> its number. Output in output.txt.

    limit: seconds; 0 for none.
    """
    import pytest

    process = os.fork()
    if process == 0:
        adopt()
        signal.alarm(limit)
        output = os.open(tree / "output.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
        status = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={tree}", *tests])
        sys.stdout.flush()
        os._exit(int(status))
    return process


def adopt() -> None:
    """Have Linux make this process the parent of its descendants whose own parent ends (PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):
        raise OSError("prctl failed")


def end_others(running: Container[int]) -> None:
    """Kill this process's children but those: what a mistake has let live. Some have only their group to be caught by,
    since each process starts the next one and ends."""
    children = Path("/proc/thread-self/children")
    while others := [pid for pid in map(int, children.read_text().split()) if pid not in running]:
        for pid in others:
            group = os.getpgid(pid)
            os.kill(pid if group == os.getpgrp() else -group, signal.SIGKILL)
            os.waitpid(pid, 0)


def failure(tree: Path, status: int) -> str | None:
    """The test that failed, or what became of the process; None if every test passed."""
    output = (tree / "output.txt").read_text()
    if os.WIFSIGNALED(status):
        return f"the process ended by {signal.Signals(os.WTERMSIG(status)).name}"
    # An ERROR in a test is its fixture's; one in a file is a mistake that cannot be compiled or imported.
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+::.*?)(?: - |$)", output, re.MULTILINE)
    code = os.waitstatus_to_exitcode(status)
    if failed is None and code == 2:
        return "the tests were interrupted, as by a signal"
    assert (failed is None) == (code == 0), output  # no test at all is no success
    return failed and failed[1]


def try_all(chosen: Sequence[Mutant | None], folder: Path, jobs: int) -> Iterator[tuple[Mutant | None, str | None]]:
    """Each with the test that noticed it; None stands for the tree as it is, with the tests of all."""
    every_test = sorted({test for m in chosen if m is not None for test in m.tests})
    adopt()
    free, running, waiting = [folder / str(job) for job in range(jobs)], {}, list(chosen)
    for tree in free:
        copy_tree(tree)
        build(tree)
    while waiting or running:
        while waiting and free:
            mutant, tree = waiting.pop(0), free.pop()
            if mutant is not None:
                mutant.apply(tree)
                if mutant.native:
                    build(tree)
            running[start(tree, *((every_test, 0) if mutant is None else (mutant.tests, TIMEOUT)))] = mutant, tree
        process, status = os.wait()
        if process not in running:  # adopted
            continue
        mutant, tree = running.pop(process)
        end_others(running)
        yield mutant, failure(tree, status)
        if mutant is not None:
            shutil.copy(ROOT / mutant.file, tree / mutant.file)
            if mutant.native:
                build(tree)
        free.append(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make known mistakes one at a time; the tests must notice each.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at the same time")
    parser.add_argument("--only", default="", help="only those whose file or description has these words")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in f"{m.file}: {m.what}"]
    faults = [fault for m in chosen if (fault := m.fault())]
    if faults or not chosen:
        print("\n".join(faults) or f"want --only words of an entry; got {options.only!r}", file=sys.stderr)
        return 1
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    sys.dont_write_bytecode = True  # its age would not show a change within a second
    import deepspeed  # noqa: F401
    import hypothesis  # noqa: F401
    import triton.language  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for mutant, by in try_all([None, *chosen], Path(folder), options.jobs):
            found[mutant] = by
            if mutant is not None:
                print(f"{len(found) - 1}/{len(chosen)} {mutant.file}: {mutant.what}: {by or 'SURVIVED'}", flush=True)
    broken = found.pop(None)
    table = Table("file", "mistake", "noticed by", title=f"{len(chosen)} mistakes, {time.monotonic() - began:.0f} s")
    for mutant in chosen:
        by = found[mutant]
        table.add_row(mutant.file, mutant.what, escape(by) if by else "[bold red]SURVIVED")
    Console(width=max(160, Console().width)).print(table)
    survived = sum(by is None for by in found.values())
    print(
        f"{len(chosen) - survived} noticed, {survived} survived" + (f"; fails without any: {broken}" if broken else "")
    )
    return int(survived > 0 or broken is not None)


if __name__ == "__main__":
    sys.exit(main())
