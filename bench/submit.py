"""rlplus-bench submit: measures this machine's GPU into one file, for the manual's page of measurements by others.

The kernels are checked against float64 first; one that fails ends the program, and no file is written. Then the suite
`gpu` is measured.
"""

import argparse
import datetime
import json
import os
import platform
import re
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplus.loss.guard.verdicts import Verdict
    from rlplus.loss.selfcheck import Case

# Imports that need torch are in functions: --help and wrong arguments are answered without it.

FORMAT = 1  # the file's; bench/results/community/submission_schema.json describes it
DTYPES = ("bfloat16", "float16", "float32")
Say = Callable[[str], None]


def parse(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="rlplus-bench submit", description=__doc__)
    output = parser.add_argument("--output", type=Path, metavar="DIR", default=Path("runs/bench"))
    output.help = "folder for the file; default: %(default)s"
    parser.add_argument("--cpu", action="store_true", help="rehearse on small numbers, without a GPU; no result")
    return parser, parser.parse_args(arguments)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace, say: Say) -> None:
    """Check, measure and write the file. Ends the program where there is no GPU, or where the check fails."""
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"argument --output: want a folder; got the file {options.output}")
    if options.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    import torch

    if not options.cpu and not (torch.cuda.is_available() and torch.version.cuda):
        parser.error(f"want an NVIDIA GPU; torch {torch.__version__} sees none (--cpu rehearses without one)")
    from rlplus.common.durable import write_text

    say("checking the kernels against float64")
    verdicts = self_check(options.cpu)
    for name, verdict in verdicts.items():
        say(f"{name}: {verdict.status} {verdict.reason}".rstrip())
    if any(verdict.status != "passed" for verdict in verdicts.values()):
        parser.exit(1, "nothing was measured: the self-check did not pass\n")
    submission = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "rehearsal": options.cpu,
        "selfcheck": {name: verdict._asdict() for name, verdict in verdicts.items()},
        "platform": platform.platform(),
        "result": measured(options.cpu, say),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / file_name(submission)
    write_text(path, json.dumps(submission, indent=1) + "\n")
    say(f"a rehearsal, not a result: {path}" if options.cpu else f"{path}: docs/community.md says how to send it")


def self_check(cpu: bool) -> "dict[str, Verdict]":
    """Fresh verdicts on the kernels by dtype, whatever earlier ones on this device model were."""
    import torch

    from rlplus.loss import selfcheck
    from rlplus.loss.guard.verdicts import COMMAND, Verdict, run_check

    if cpu:
        fault = selfcheck.check(torch.device("cpu"), torch.float32, small_cases(), H=8)
        return {"float32": Verdict("refused" if fault else "passed", fault)}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return {name: run_check([*COMMAND, uuid, name]) for name in DTYPES}


def small_cases() -> "list[Case]":
    """The self-check's cases in a size for Triton's interpreter."""
    from rlplus.loss import selfcheck

    return [case._replace(N=14, V=70, max_scratch_mb=0.005) for case in selfcheck.CASES]


def measured(cpu: bool, say: Say) -> dict[str, Any]:
    """The suite's result."""
    from .session import measure

    with tempfile.TemporaryDirectory() as folder:
        options = {"suite": "gpu", "output": Path(folder), "threads": 1, "repeats": None, "only": None, "rows": None}
        measure(argparse.Namespace(**options, tiny=cpu), partial(without_folder, say, folder))
        result: dict[str, Any] = json.loads((Path(folder) / "gpu.json").read_text())
    return result


def without_folder(say: Say, folder: str, text: str) -> None:
    """Say it, unless it names a file that is gone at the end."""
    if folder not in text:
        say(text)


def file_name(submission: dict[str, Any]) -> str:
    device = re.sub(r"[^a-z0-9]+", "-", submission["result"]["device"].lower()).strip("-")
    content = zlib.crc32(json.dumps(submission).encode())  # two machines may have the same GPU on one day
    return f"{'rehearsal-' * submission['rehearsal']}{device}-{submission['date']}-{content:08x}.json"
