"""Start pytest in a process of its own, where Triton compiles and the compiled code is executed.

For tests in a process in which Triton interprets: `subprocess.run(command("my_tests.py"), env=environment(cache))`.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess


def command(*arguments: str | Path, plugin: str = "ptxcheck") -> list[str]:
    options = ["-p", plugin, "-p", "no:cacheprovider", "-q", "--no-header"]
    return [sys.executable, "-m", "pytest", *options, *map(str, arguments)]


def environment(cache: Path, *paths: str | Path, **more: str) -> Mapping[str, str]:
    """cache: a folder for what Triton compiles; paths: to import from before all others, as of another Triton."""
    places = [*map(str, paths), str(Path(__file__).parents[1])]
    new = {"PYTHONPATH": os.pathsep.join(places), "TRITON_CACHE_DIR": str(cache)}
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | new | more


def passed(done: CompletedProcess[str]) -> int:
    """The number of tests that passed; AssertionError, with the output, if one failed or none ran."""
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) passed", done.stdout)
    return int(count[1]) if count else 0
