"""Start pytest in a process of its own, where Triton compiles and the compiled code is executed."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

TESTS = Path(__file__).parent.parent


def command(*arguments: str | Path, plugin: str = "ptx") -> list[str]:
    options = ["-p", plugin, "-p", "no:cacheprovider", "-q", "--no-header"]
    return [sys.executable, "-m", "pytest", *options, *map(str, arguments)]


def environment(cache: Path, first: Path | None = None, **more: str) -> Mapping[str, str]:
    """`first`: a folder before all others to import from, as of another Triton; `cache`: for what Triton compiles."""
    paths = [str(path) for path in (first, TESTS, TESTS.parent) if path is not None]
    new = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | new | more


def passed(done: CompletedProcess[str]) -> int:
    """The number of tests that passed; AssertionError, with the output, if one failed or none ran."""
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) passed", done.stdout)
    return int(count[1]) if count else 0
