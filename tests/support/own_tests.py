"""Other projects' own tests with our code in the place of theirs, in a checkout that an environment variable names."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import processes
import pytest


class Outcome(NamedTuple):
    """result: "passed", "failed" or "skipped"; reason: the message of the latter two."""

    result: str
    reason: str


def checkout(variable: str) -> Path:
    """The folder that the environment variable names; without it the module that asks is skipped."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no checkout", allow_module_level=True)
    folder = Path(os.environ[variable]).resolve()
    if not folder.is_dir():
        raise ValueError(f"want {variable} a folder, a checkout or an unpacked sdist; got {os.environ[variable]}")
    return folder


def outcomes(folder: Path, file: str, plugin: str, report: Path, **variables: str) -> dict[str, Outcome]:
    """Run a file of tests in its checkout, with a plugin from this folder -> the outcome of each test."""
    path = os.pathsep.join(filter(None, [str(processes.SUPPORT), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        plugin,
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        file,
    ]
    environment = os.environ | {"PYTHONPATH": path} | variables
    done = processes.run(command, processes.LONG_S, cwd=folder, env=environment)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        marks = [mark for mark in case if mark.tag in ("failure", "error", "skipped")]
        result = "passed" if not marks else "skipped" if marks[-1].tag == "skipped" else "failed"
        found[f"{case.get('classname')}::{case.get('name')}"] = Outcome(
            result, marks[-1].get("message", "") if marks else ""
        )
    return found


def counts(found: dict[str, Outcome]) -> dict[str, int]:
    """The number of tests for each result, and for each reason of a skip."""
    return dict(Counter(o.reason if o.result == "skipped" else o.result for o in found.values()))
