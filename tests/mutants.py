"""Show that the tests notice mistakes: apply those of mutants.toml one at a time and run the tests that should fail.

    python tests/mutants.py [--jobs N] [--only WORDS]

It works in copies of the tree; mistakes in csrc/ are compiled there. Exit status 1 if a mistake survives its tests, if
its text does not stand exactly once in its file, or if a test fails without any.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).parent.parent
PARTS = ("rlplus", "kernels", "csrc", "configs", "tests", "pyproject.toml", "setup.py")
TIMEOUT = 300  # seconds; a mistake may make a loop endless


@dataclass(frozen=True)
class Mutant:
    """A mistake: `old` of `file`, which stands there once, becomes `new`. tests: node ids that should notice it."""

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def fault(self) -> str | None:
        """What is wrong with the entry itself."""
        found = (ROOT / self.file).read_text().count(self.old)
        if found != 1:
            return f"{self.file}: want {self.old!r} there once; found {found} times"
        for test in self.tests:
            file, name = test.partition("[")[0].split("::")
            if not re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE):
                return f"want a test {test}; found none"
        return None


def mutants() -> list[Mutant]:
    files = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    return [
        Mutant(file, m["what"], m["old"], m["new"], tuple(f"tests/{t}" for t in m["tests"].split()))
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


def run(root: Path, command: list[str]) -> tuple[int, str]:
    """Exit status and output of a Python command there; no bytecode, whose age would not show a change in a second."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root), "RLPLUS_EXT": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return -1, "FAILED by not ending"
    return done.returncode, done.stdout + done.stderr


def build(root: Path) -> None:
    status, output = run(root, ["setup.py", "build_ext", "--inplace", "--force"])
    assert status == 0, output


def pytest(root: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    return run(root, ["-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *tests])


def killer(root: Path, mutant: Mutant) -> str | None:
    """The test that notices; None if none does. Only a test that fails counts, and the end of the whole process."""
    original = (root / mutant.file).read_text()
    native = mutant.file.startswith("csrc/")
    mutant.apply(root)
    try:
        if native:
            build(root)
        status, output = pytest(root, mutant.tests)
    finally:
        (root / mutant.file).write_text(original)
        if native:
            build(root)
    if status == 0:
        return None
    failed = re.search(r"^FAILED (?:tests/)?(.*?)(?: - |$)", output, re.MULTILINE)
    assert failed is not None or status < 0, output
    return failed[1] if failed else "the process crashed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply known mistakes one at a time; the tests must notice each.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at the same time")
    parser.add_argument("--only", default="", help="only those whose file or description has these words")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in f"{m.file}: {m.what}"]
    faults = [fault for m in chosen if (fault := m.fault())]
    if faults or not chosen:
        print("\n".join(faults) or f"want --only words of an entry; got {options.only!r}", file=sys.stderr)
        return 1
    start, trees = time.monotonic(), SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            trees.put(Path(folder) / str(job))
        for tree in [trees.get() for _ in range(options.jobs)]:
            copy_tree(tree)
            build(tree)
            trees.put(tree)

        def notice(mutant: Mutant | None) -> str | None:
            tree = trees.get()
            try:
                if mutant is not None:
                    return killer(tree, mutant)
                status, output = pytest(tree, tuple(sorted({test for m in chosen for test in m.tests})))
                return output if status else None
            finally:
                trees.put(tree)

        broken, *killers = pool.map(notice, [None, *chosen])
    table = Table("file", "mistake", "noticed by", title=f"{len(chosen)} mistakes, {time.monotonic() - start:.0f} s")
    for mutant, by in zip(chosen, killers, strict=True):
        table.add_row(mutant.file, mutant.what, escape(by) if by else "[bold red]SURVIVED")
    Console(width=max(160, Console().width)).print(table)
    survived = sum(by is None for by in killers)
    print(f"{len(chosen) - survived} noticed, {survived} survived", broken or "", sep="\n" if broken else "")
    return int(survived > 0 or broken is not None)


if __name__ == "__main__":
    sys.exit(main())
