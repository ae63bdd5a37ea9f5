"""Everything to do on a GPU that is lent for a quarter of an hour: bench/gpu.sh [--cpu] [FOLDER] [STEP...]

Steps, in this order: selfcheck bench training distill tests runs kernels sanitize. A call ends within ten
minutes, all calls together take at most 13 of running time; a call goes on where the last one with this FOLDER
(default: gpu-results) stopped. Exit status: 0 all passed, 1 something failed, 75 not finished: run the same command
again. A refused self-check stops everything. STEPs that are named run again, whatever earlier calls found.

FOLDER gets summary.txt, log.txt, state.json, the results of bench (gpu.json) and training (training.json), and plots.
All but the plots, which can be drawn from the results, are copied to the folder OUT if the environment names one.
--cpu: the same order on small numbers, in Triton's interpreter; what needs a GPU is skipped and says so.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

CALL_S = 570.0  # limit of a call, which may take 600 with the start of Python and the copies of the results
# Limit of all calls; the rest of a quarter of an hour goes into starting the machine and carrying files.
TOTAL_S = 780.0
LEAST_S = 20.0  # no part begins with less left
GRACE_S = 10.0  # a process that is asked to end has this long before it is killed
UNFINISHED = 75
STEPS = ("selfcheck", "bench", "training", "distill", "tests", "runs", "kernels", "sanitize")
LOG, STATE = "log.txt", "state.json"

ENVIRONMENT = """
import sys, numpy, torch, triton
from rlplus.bench.machine import revision
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("revision", revision(), "Python", sys.version.split()[0], "torch", torch.__version__, "triton",
      triton.__version__, "numpy", numpy.__version__, *names or ["no GPU"])
sys.exit(not names)
"""
SELFCHECK = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from rlplus.bench.submit import small_cases
from rlplus.loss import selfcheck
from rlplus.loss.guard.verdicts import verdict_on
if torch.cuda.is_available():
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    with ThreadPoolExecutor() as pool:  # each is a process, which compiles for half a minute
        verdicts = pool.map(partial(verdict_on, torch.device("cuda", 0)), dtypes)
        found = {str(dtype): verdict for dtype, verdict in zip(dtypes, verdicts)}
else:
    selfcheck.check = partial(selfcheck.check, cases=small_cases(), H=8)
    found = {"torch.float32": selfcheck.judge("cpu", "float32")}
for name, verdict in found.items():
    print(f"{name}: {verdict.status} {verdict.reason}")
sys.exit(any(verdict.status != "passed" for verdict in found.values()))
"""


class Part(NamedTuple):
    """A process of a step and the seconds it may take.

    skip: the reason why it does not run here; needs: the part without which it does not run; optional: a failure of its
    own is a skip.
    """

    name: str
    step: str
    seconds: float
    command: Sequence[str] = ()
    skip: str = ""
    needs: str = ""
    optional: bool = False


def parts(folder: Path, cpu: bool) -> list[Part]:
    """The parts in order. No call's end cuts one short, since each starts only where it fits."""
    python, out = sys.executable, str(folder)
    bench, tiny = [python, "-m", "bench", "--output", out], ["--tiny"] if cpu else []
    distill = ["--device", "cuda", "--dtype", "bfloat16"]
    distill += ["--tokens", "8192", "--hidden", "4096", "--vocabulary", "151936"]
    if cpu:
        distill = ["--tokens", "16", "--hidden", "32", "--vocabulary", "300", "--rounds", "1"]
    trainer = "" if find_spec("deepspeed") else "deepspeed is not installed"
    training = [python, "-m", "experiments.measured_run", str(folder / "training.json"), *tiny]
    test_gpu, runs, kernels = tests(cpu, trainer)
    return [
        Part("selfcheck", "selfcheck", 120, [python, "-c", SELFCHECK]),
        Part("bench", "bench", 300, [*bench, "--suite", "gpu", *tiny]),
        Part("training", "training", 240, training, skip=trainer),
        Part("distill", "distill", 60, [python, "-m", "bench.distill", *distill]),
        test_gpu,
        runs,
        kernels,
        *sanitizers(cpu),
    ]


def tests(cpu: bool, trainer: str) -> tuple[Part, Part, Part]:
    """trainer: the reason why nothing can be trained here."""
    pytest = [sys.executable, "-m", "pytest", "-q", "--durations=10", "-p", "no:cacheprovider"]
    if not cpu:
        pytest += ["-n", "10"] if find_spec("xdist") else []
    files = (
        "test_gemm_kernel",
        "test_kernels",
        "test_row_kernels",
        "test_own_tokens",
        "test_token_kernel",
        "test_scale_kernel",
    )
    kernels = [*(f"tests/kernels/{name}.py" for name in files), "tests/loss/test_exponentials.py"]
    skip, runs = "needs a GPU" if cpu else "", "tests/trainer/test_runs_on_a_gpu.py"
    # The rehearsal imports all of them, including the GPU tests.
    every = ["tests/kernels/test_gpu.py", *([] if trainer else [runs]), *kernels]
    chosen = [*every, "-k", "test_gemm_kernel and same_inputs"] if cpu else kernels
    return (
        Part("test_gpu", "tests", 150, [*pytest, "tests/kernels/test_gpu.py"], skip=skip),
        Part("runs", "runs", 150, [*pytest, runs], skip=skip or trainer),
        Part("kernels", "kernels", 150, [*pytest, *chosen]),
    )


def sanitizers(cpu: bool) -> list[Part]:
    """Small shapes under compute-sanitizer, if it is installed and works on this GPU."""
    reason = "needs a GPU" if cpu else "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not installed"
    # Disable torch's memory cache: each tensor is then a separate allocation, whose end the tool can see.
    tool = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--report-api-errors", "no"]
    small = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_gpu.py"]
    small += ["-k", "test_small"]
    trial = [*tool, "--error-exitcode", "9", sys.executable, "-c", "import torch; torch.ones(1).cuda()"]
    found = [Part("sanitizer", "sanitize", 40, trial, skip=reason, optional=True)]
    for name in ("memcheck", "racecheck"):
        command = [*tool, "--error-exitcode", "9", "--tool", name, *small]
        found.append(Part(name, "sanitize", 190, command, needs="sanitizer"))
    return found


def execute(part: Part, seconds: float, log: Path) -> int | None:
    """Exit status of the part's process; None if it had to be ended."""
    with log.open("ab") as stream:
        stream.write(f"\n==== {part.name}\n".encode())
        stream.flush()
        child = subprocess.Popen(
            part.command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, signal.SIGINT)  # pytest sums up, bench has saved what it has
                child.wait(GRACE_S)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


class Session:
    """The calls that share a folder.

    State, in its file: outcomes by part; running seconds of all calls; the part that runs, and since when.
    """

    def __init__(
        self,
        folder: Path,
        wanted: Sequence[Part],
        run: Callable[[Part, float, Path], int | None] = execute,
        clock: Callable[[], float] = time.time,
        times: float = 1.0,
    ) -> None:
        """times: a factor of every limit."""
        self.folder, self.parts, self.run, self.clock, self.began = folder, wanted, run, clock, clock()
        self.call_s, self.total_s, self.times = times * CALL_S, times * TOTAL_S, times
        self.state: dict[str, Any] = {"outcomes": {}, "spent": 0.0, "running": None, "interrupted": []}
        if (folder / STATE).is_file():
            self.state |= json.loads((folder / STATE).read_text())
        if running := self.state["running"]:  # the last call was ended within it
            part = next((part for part in wanted if part.name == running["part"]), None)
            took = self.clock() - running["since"]
            self.state["spent"] += min(took, running["limit"] + GRACE_S) if part else 0.0
            if running["part"] in self.state["interrupted"]:
                self.note(running["part"], "FAILED: interrupted twice")
            self.state["interrupted"].append(running["part"])
            self.state["running"] = None

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.state["outcomes"].pop(name, None)

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.folder / "summary.txt").open("a") as stream:
            stream.write(text + "\n")

    def note(self, name: str, outcome: str) -> None:
        self.state["outcomes"][name] = outcome
        self.say(f"{name}: {outcome}")
        self.save()

    def save(self) -> None:
        new = self.folder / f"{STATE}.new"
        new.write_text(json.dumps(self.state, indent=1) + "\n")
        new.replace(self.folder / STATE)

    def go_on(self) -> int:
        """Run what is left; returns the exit status."""
        outcomes = self.state["outcomes"]
        for part in self.parts:
            if part.name not in outcomes:
                left = self.total_s - self.state["spent"]
                limit = min(self.times * part.seconds, left)
                needed = outcomes.get(part.needs, "passed")
                if part.skip or not needed.startswith("passed"):
                    self.note(part.name, f"skipped, {part.skip or f'{part.needs} did not pass'}")
                elif left < LEAST_S:
                    self.note(
                        part.name, f"FAILED: left out, the {self.total_s / 60:.0f} minutes of all calls are spent"
                    )
                elif self.clock() - self.began + limit + GRACE_S > self.call_s:
                    self.say(f"{part.name} is next: run the same command again; {left:.0f} s are left")
                    return UNFINISHED
                else:
                    self.take(part, limit)
            if part.name == "selfcheck" and not outcomes[part.name].startswith("passed"):
                self.say("stopped: without the self-check no result would count. `selfcheck` as STEP checks again")
                return 1
        failed = any(outcomes[part.name].startswith("FAILED") for part in self.parts)
        spent = f"{self.state['spent']:.0f} s in all calls, results in {self.folder}"
        self.say(f"{'something failed' if failed else 'all passed'}; {spent}")
        return int(failed)

    def take(self, part: Part, limit: float) -> None:
        since = self.clock()
        self.state["running"] = {"part": part.name, "since": since, "limit": limit}
        self.save()
        log = self.folder / LOG
        begin = log.stat().st_size if log.exists() else 0
        status = self.run(part, limit, log)
        took = self.clock() - since
        self.state["running"] = None
        self.state["spent"] += took
        said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines() if log.exists() else []
        if status == 0:
            self.note(part.name, f"passed in {took:.0f} s")
        elif part.optional:
            self.note(part.name, f"skipped, it does not run here: {said[-1] if said else 'no output'}")
        else:
            ended = f"stopped after {limit:.0f} s" if status is None else f"status {status} after {took:.0f} s"
            self.note(part.name, f"FAILED: {ended}")
            self.say("\n".join(f"    {line}" for line in said[-25:]))


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cpu = arguments[:1] == ["--cpu"]
    place, *steps = arguments[cpu:] or ["gpu-results"]
    if unknown := [step for step in steps if step not in STEPS]:
        print(f"want steps among {', '.join(STEPS)}; got {unknown[0]!r}", file=sys.stderr)
        return 2
    folder = Path(place).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(RLPLUS_CACHE=str(folder / "cache"), PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    wanted = [part for part in parts(folder, cpu) if not steps or part.step in steps]
    session = Session(folder, wanted, times=10.0 if cpu else 1.0)  # an interpreter on a busy machine is slow
    try:
        there = subprocess.run([sys.executable, "-c", ENVIRONMENT], capture_output=True, text=True)
        session.say(time.strftime("%FT%TZ ", time.gmtime()) + (there.stdout.strip() or there.stderr.strip()[-2000:]))
        if there.returncode and not cpu:
            session.say("want torch, triton, numpy and a CUDA device, or --cpu")
            return 1
        if steps:
            session.forget([part.name for part in wanted])
        if "selfcheck" not in session.state["outcomes"]:
            shutil.rmtree(folder / "cache", ignore_errors=True)  # a check of its own, whatever earlier ones found
        return session.go_on()
    finally:
        if (copies := os.environ.get("OUT")) and Path(copies).resolve() != folder:
            for file in (path for path in folder.iterdir() if path.is_file() and path.suffix != ".png"):
                shutil.copy2(file, copies)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
