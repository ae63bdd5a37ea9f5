"""bench/gpu.sh with stand-ins for Python and compute-sanitizer: what it runs, in which order, and how it ends."""

import os
import re
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parent.parent
PYTHON = '#!/bin/sh\nset -f -- $*\nprintf "%s|%s\\n" "$PYTHONPATH" "$*" >> "$CALLS"\n'  # a call a line


class Script:
    """Runs bench/gpu.sh; `calls` is what it asked of Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.put("python", PYTHON)

    def put(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, *arguments: str) -> tuple[int, str]:
        """-> exit status, summary."""
        self.calls.write_text("")
        environment = os.environ | {
            "PYTHON": str(self.folder / "python"), "CALLS": str(self.calls), "PYTHONPATH": "wheels:more",
            "PATH": f"{self.folder}:{os.environ['PATH']}",
        }  # fmt: skip
        done = processes.run(["bash", ROOT / "bench/gpu.sh", self.folder / "out", *arguments], env=environment)
        return done.returncode, (self.folder / "out" / "summary.txt").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def steps_of(summary: str) -> list[str]:
    return re.findall(r"^(\w+): (?:passed|skipped|FAILED)", summary, flags=re.MULTILINE)


@pytest.mark.parametrize("arguments", [(), ("all",)])
def test_all_steps_run_in_order_and_find_packages_that_travel_along(script: Script, arguments: tuple[str, ...]) -> None:
    script.put("compute-sanitizer", "#!/bin/sh\nexit 0\n")
    status, summary = script.run(*arguments)
    assert status == 0, summary
    assert steps_of(summary) == ["selfcheck", "tests", "memcheck", "racecheck", "tune", "bench"]
    calls = script.calls.read_text().splitlines()
    assert all(call.startswith(".:wheels:more|") for call in calls)
    assert any("-m bench --suite gpu" in call for call in calls)
    assert any("-m bench tune --head 151936 3584" in call for call in calls)


def test_a_sanitizer_that_cannot_run_is_skipped_and_one_that_finds_something_fails(script: Script) -> None:
    script.put("compute-sanitizer", "#!/bin/sh\necho Error: Device not supported.\nexit 1\n")
    status, summary = script.run("sanitize")
    assert status == 0, summary
    assert "memcheck: skipped, it does not run here: Error: Device not supported." in summary
    script.put("compute-sanitizer", '#!/bin/sh\ncase "$*" in *test_small*) exit 9 ;; esac\n')
    status, summary = script.run("sanitize")
    assert status == 1
    assert "racecheck: FAILED with status 9" in summary


def test_a_step_that_fails_leaves_the_others_and_is_told(script: Script) -> None:
    script.put("python", PYTHON + 'case "$*" in *junitxml*) exit 3 ;; esac\n')
    status, summary = script.run("tests", "bench")
    assert status == 1
    assert "tests: FAILED with status 3" in summary
    assert "bench: passed" in summary
    assert script.run("test")[0] == 1


def test_every_step_ends_within_nine_minutes() -> None:
    """The sum of the limits of what runs in each, with the time to kill it."""
    text = (ROOT / "bench/gpu.sh").read_text()
    limits = {name: int(seconds) for name, seconds in re.findall(r"\bstep (\w+) (\d+) ", text)}
    assert set(limits) == {"selfcheck", "tests", "tune", "bench"}
    assert max(limits.values()) + 10 <= 540
    one = int(re.findall(r'step "\$tool" (\d+) sanitizer.log "\$\{run', text)[0])
    probe = int(re.findall(r"timeout --kill-after=10 (\d+)", text)[0])
    assert 2 * (one + probe + 20) <= 540
