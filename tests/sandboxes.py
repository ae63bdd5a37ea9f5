"""Sandboxes of every kind for tests, and programs run in them."""

import shutil

import pytest

from rlplus.reward.graders.sandbox import Sandbox

KINDS = ["namespaces", "limits", *(["bubblewrap"] if shutil.which("bwrap") else [])]
MEMORY, SECONDS = 512 << 20, 1.0


def make(kind: str) -> Sandbox:
    try:
        return Sandbox(kind, MEMORY, SECONDS)
    except OSError as error:
        pytest.skip(str(error))


def run(sandbox: Sandbox, code: str, *inputs: str) -> list[tuple[bool, str]]:
    return list(sandbox.run(code, inputs or [""]))
