"""Answers of the command line that need none of the slow libraries."""

import json
import sys
from collections.abc import Mapping, Sequence

import processes
from trainer_runs import environment

QUICK = """
import contextlib, io, json, sys
from rlplus.tools.cli import main
for arguments, status, message in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            came = main(arguments)
        except SystemExit as end:
            came = end.code
    text = said.getvalue()
    assert came == status and message in text and "Traceback" not in text, (arguments, came, message, text)
    assert not {"torch", "numpy", "transformers", "pyarrow", "matplotlib"} & set(sys.modules), arguments
"""


def answered_without_torch(cases: Sequence[tuple[list[str], int, str]], more: Mapping[str, str] | None = None) -> None:
    """Each case: arguments, the exit status, and a part of the text. One process answers all."""
    done = processes.run([sys.executable, "-c", QUICK, json.dumps(cases)], env=environment() | (more or {}))
    assert done.returncode == 0, done.stderr
