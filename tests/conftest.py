"""Set-up for all tests: one thread, no network, no launcher's variables, and poisoned uninitialised memory."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Must precede the import of torch, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1", MPLBACKEND="Agg")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for name in (*LAUNCHER, "RLPLUS_BACKEND"):
    os.environ.pop(name, None)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if TYPE_CHECKING:
    from rlplus.train.reward import Scorer


def end(number: int, _: object) -> None:
    """End through the tests' own clean-up, so that no process that they started survives."""
    pytest.exit(f"ended by signal {number}", returncode=128 + number)


signal.signal(signal.SIGTERM, end)
freeze, thaw = gc.freeze, gc.unfreeze
spared = 0  # how many modules the collection of garbage passes over

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # decides at the import of a kernel's module how the kernel will run
    from quick_interpreter import make_quick

    make_quick()

with torch.device("meta"):
    torch.empty(0)  # fills torch's list of constructors that heed the line above, before any of them is replaced

hypothesis.settings.register_profile("rlplus", deadline=None, derandomize=True)
hypothesis.settings.load_profile("rlplus")


def pytest_report_header() -> str:
    return f"instructions of torch: {torch.backends.cpu.get_cpu_capability()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "benchmark" not in config.option.markexpr:
        measured = [item for item in items if item.get_closest_marker("benchmark")]
        items[:] = [item for item in items if item not in measured]
        config.hook.pytest_deselected(items=measured)
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_vllm = pytest.mark.skip(reason="vLLM is not installed")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(no_vllm)


def pytest_collection_finish() -> None:
    """Every run begins and ends with a full collection of garbage: spare it all modules and tests, which stay.

    A run freezes what it has built, and thaws everything at its end: here it does neither.
    """
    spare_what_stays()
    gc.freeze = gc.unfreeze = lambda: None


def spare_what_stays() -> None:
    """Have collections of garbage pass over all that there is now."""
    global spared
    gc.collect()
    freeze()
    spared = len(sys.modules)


def pytest_runtest_logfinish() -> None:
    """Modules that a test has imported stay as well; collections that pass over them take a tenth of the time."""
    if len(sys.modules) > spared + 50:
        spare_what_stays()


def flush_nothing(descriptor: Any) -> None:
    """For `os.fsync` in this process: waiting for a disk shows nothing. What is flushed when, file_calls.py sees."""
    os.fstat(descriptor)  # an error without such a file


os.fsync = flush_nothing


@pytest.fixture
def thawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run does both."""
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", thaw)
    yield
    freeze()


def pytest_sessionfinish() -> None:
    """Libraries report what an interpreter that ends does not free."""
    thaw()


@pytest.fixture(scope="module", autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """Training joins a process group and stays in it; the next test file starts without one."""
    yield
    if torch.distributed.is_initialized():
        deepspeed_comm = sys.modules.get("deepspeed.comm.comm")
        if deepspeed_comm is not None and deepspeed_comm.cdb is not None:
            deepspeed_comm.destroy_process_group()
            deepspeed_comm.cdb = None
        else:
            torch.distributed.destroy_process_group()
    for name in LAUNCHER:
        os.environ.pop(name, None)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``allocate``, its memory filled with NaN (floating), the largest number (integer) or True (bool)."""

    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    return wrapper


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that reads memory it never wrote is NaN, not by chance right. vLLM's own buffers are not our concern,
    and what is timed must not fill memory."""
    if not any(request.node.get_closest_marker(name) for name in ("vllm", "benchmark")):
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Callable[..., Scorer]":
    """Makes Scorers of the functions in reward_graders, found through the current directory."""
    from reward_graders import GRADERS, reward_config

    from rlplus.train.reward import Scorer

    (tmp_path / "own_graders.py").write_text(GRADERS)
    monkeypatch.chdir(tmp_path)
    return lambda **changes: Scorer(reward_config(function="own_graders:grade", **changes))
