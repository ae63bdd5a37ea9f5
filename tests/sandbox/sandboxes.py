"""Sandboxes of every kind for tests, and programs run in them."""

import os
import shutil
import sys

import processes
import pytest

from rlplus.sandbox import Sandbox

EVERY = os.environ.get("RLPLUS_SANDBOX") == "1"  # skip none: a workflow has what each kind needs
KINDS = ["namespaces", "limits", *(["bubblewrap"] if EVERY or shutil.which("bwrap") else [])]
MEMORY, SECONDS = 512 << 20, 1.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")


def make(kind: str) -> Sandbox:
    """The sandbox; the test is skipped where the machine has no namespaces, which unshare(1) tells."""
    try:
        return Sandbox(kind, MEMORY, SECONDS)
    except OSError as error:
        ours = ["--mount"] if os.getuid() == 0 else ["--user", "--map-root-user", "--mount"]
        if EVERY or kind == "limits" or processes.run(["unshare", *ours, "true"]).returncode == 0:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox of each kind."""
    return make(request.param)


@pytest.fixture(scope="module")
def closed() -> Sandbox:
    """A sandbox that keeps files and network from programs."""
    return make("auto")


def run(sandbox: Sandbox, code: str, *inputs: str) -> list[tuple[bool, str]]:
    return list(sandbox.run(code, inputs or [""]))
