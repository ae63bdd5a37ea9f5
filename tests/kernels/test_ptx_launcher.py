"""tests/ptx on kernels that Triton compiles: in a process of its own, since Triton interprets in this one."""

from pathlib import Path

import processes
from ptx import nested


def test_compiled_kernels_compute_what_is_known_and_their_mistakes_are_found(tmp_path: Path) -> None:
    command = nested.command(nested.TESTS / "ptx" / "compiled.py")
    done = processes.run(command, env=nested.environment(tmp_path))
    assert nested.passed(done) > 25
