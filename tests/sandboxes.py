"""Sandboxes of every kind for tests, and programs run in them."""

import os
import shutil

import processes
import pytest

from rlplus.reward.graders.sandbox import Sandbox

KINDS = ["namespaces", "limits", *(["bubblewrap"] if shutil.which("bwrap") else [])]
MEMORY, SECONDS = 512 << 20, 1.0


def make(kind: str) -> Sandbox:
    """The sandbox; the test is skipped where the machine has no namespaces, which unshare(1) tells."""
    try:
        return Sandbox(kind, MEMORY, SECONDS)
    except OSError as error:
        ours = ["--mount"] if os.getuid() == 0 else ["--user", "--map-root-user", "--mount"]
        if kind == "limits" or processes.run(["unshare", *ours, "true"]).returncode == 0:
            raise
        pytest.skip(str(error))


def run(sandbox: Sandbox, code: str, *inputs: str) -> list[tuple[bool, str]]:
    return list(sandbox.run(code, inputs or [""]))
