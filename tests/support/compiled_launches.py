"""For pytest, `-p support.compiled_launches` after `-p ptxcheck`: says at the end which kernels were launched, and for
which GPU."""

import re
from typing import Any

import pytest

_launched: set[str] = set()


def pytest_configure() -> None:
    from ptxcheck import launcher  # imports Triton, which `-p ptxcheck` prepares

    execute = launcher.execute

    def noted(name: str, kernel: Any, *rest: Any) -> Any:
        _launched.add(f"{name} sm_{kernel.metadata.target.arch}")
        return execute(name, kernel, *rest)

    launcher.execute = noted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"launched: {', '.join(sorted(_launched))}")


def launched(output: str) -> set[str]:
    """The kernels that a run's output names, as `_a_kernel sm_80`."""
    (line,) = re.findall(r"^launched: (.*)$", output, re.MULTILINE)
    return set(line.split(", "))
