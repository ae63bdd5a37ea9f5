"""The transfer of weights from the trainer to an engine: checked, with a timeout, in memory or through files."""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlplus.common import agree
from rlplus.rollout.clock import Clock, rank
from rlplus.rollout.protocol import whole_model

LOCK = ".lock"  # a file in a folder of weights


def parameter_shapes(path: str, *, trust_remote_code: bool) -> tuple[dict[str, torch.Size], int]:
    """Names and shapes of a push's tensors for the model of a config.json, in order; and the vocabulary's size."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with whole_model(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes, model.get_input_embeddings().num_embeddings


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, detached, while they fit shapes; ValueError at a misfit, and at the end for a missing one.

    Lazy: under ZeRO-3 the iterator gathers a few parameters at a time.
    """
    missing = set(shapes)
    for name, weight in weights:
        if name not in shapes:
            raise ValueError(f"want the model's parameter names; got {name!r}, which it does not have")
        if name not in missing:
            raise ValueError(f"want every parameter once; {name!r} came twice")
        if weight.shape != shapes[name]:
            raise ValueError(f"want {name} of shape {tuple(shapes[name])}; got {tuple(weight.shape)}")
        missing.remove(name)
        yield name, weight.detach()
    if missing:
        raise ValueError(f"want every parameter; {len(missing)} did not come: {', '.join(sorted(missing)[:5])}")


@contextmanager
def watched(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], *, version: int, timeout_s: float
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """`checked_weights` for the body to exhaust; RunFailed when it stays at one parameter for more than timeout_s.

    The message names rank, parameter and who did not answer. As `Clock` does it: where the body cannot be interrupted
    the process ends.
    """
    clock = Clock(f"the push of version {version}", "rollout.push_timeout_s", timeout_s)
    with clock.running("the push to begin"):
        yield _timed(checked_weights(weights, shapes), shapes, clock)


def _timed(
    weights: Iterator[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], clock: Clock
) -> Iterator[tuple[str, Tensor]]:
    expected = dict.fromkeys(shapes)  # trainer and engine name parameters in the same order
    while True:
        clock.at(f"the trainer to gather {next(iter(expected), 'the end')}")
        item = next(weights, None)
        if item is None:
            clock.at(f"the engine to finish after {list(shapes)[-1]}")
            return
        expected.pop(item[0])
        clock.at(f"the engine to load {item[0]}")
        yield item


def ranks_here() -> int:
    """Ranks on this machine: torchrun and the DeepSpeed launcher have different names for it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)


class WeightFiles:
    """One version's weights as safetensors files of about bucket_bytes, for engines in other processes.

    Iterating reads them: (name, tensor). Ranks that share the folder share the files: `leader` says who writes them,
    the others only exhaust their iterator, which under ZeRO-3 gathers for all.
    """

    def __init__(self, parent: str | None, bucket_mb: int, *, per_node: bool) -> None:
        shared = Path("/dev/shm")
        base = Path(parent) if parent else shared if shared.is_dir() else Path(tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        self._bucket_bytes = bucket_mb * 2**20
        leader = rank() - int(os.environ.get("LOCAL_RANK", "0")) if per_node else 0
        folder = ""
        if leader == rank() or not dist.is_initialized():
            _remove_abandoned(base)
            folder = str(_new_folder(base))
        self.leader = bool(folder)
        if dist.is_initialized():
            folder = agree.gathered(folder)[leader]
        self.folder = Path(folder)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the files; all ranks call it and return when the files are there."""
        self._wait()  # until no engine reads the old ones any more
        if self.leader:
            for old in self.folder.glob("*.safetensors"):
                old.unlink()  # first: two versions at a time may not fit
        bucket: dict[str, Tensor] = {}
        size = count = 0
        for name, weight in weights:
            nbytes = weight.numel() * weight.element_size()
            if bucket and size + nbytes > self._bucket_bytes:
                self._save(bucket, count)
                bucket, size, count = {}, 0, count + 1
            if self.leader:
                bucket[name] = weight.detach().to("cpu", copy=True).contiguous()
            size += nbytes
        if bucket:
            self._save(bucket, count)
        self._wait()

    def _save(self, bucket: dict[str, Tensor], number: int) -> None:
        try:
            save_file(bucket, self.folder / f"weights-{number:05d}.safetensors")
        except Exception as error:
            raise OSError(f"could not write weights into {self.folder} (rollout.push_folder): {error}") from error

    def _wait(self) -> None:
        if dist.is_initialized():
            agree.barrier()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    yield name, file.get_tensor(name)

    def close(self) -> None:
        if self.leader:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(_locks.pop(str(self.folder)))


_locks: dict[str, int] = {}
"""Descriptors of this process's locks by folder, held as long as it lives; not in `WeightFiles`, which is sent to
engines."""


def _prefix() -> str:
    """Per user and per machine: locks do not reach over every network file system."""
    return f"rlplus-weights-{os.geteuid()}-{socket.gethostname()}-"


def _new_folder(base: Path) -> Path:
    """A folder for this user alone, with a lock that shows that it is in use."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
    lock = os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "lock", folder / LOCK)  # a lock under this name that is not held belongs to a dead process
    _locks[str(folder)] = lock
    return folder


def _remove_abandoned(base: Path) -> None:
    """Remove the folders of this user's processes that were killed: their locks are not held any more.

    Others can create any name in a folder such as /dev/shm. Anything but a folder with a regular lock file of this user
    is left alone, no open waits (as a FIFO's would), and only what was checked is removed, whatever its name
    points to by then.
    """
    for left in base.glob(f"{_prefix()}*"):
        with ExitStack() as stack:
            try:
                folder = _open_own(left, os.O_RDONLY | os.O_DIRECTORY, stat.S_ISDIR, stack)
                lock = _open_own(LOCK, os.O_RDWR, stat.S_ISREG, stack, inside=folder)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in os.listdir(folder):
                    os.unlink(name, dir_fd=folder)
                left.rmdir()
            except OSError:  # not this user's, in use, or just being made
                continue


def _open_own(
    path: Path | str, flags: int, kind: Callable[[int], bool], stack: ExitStack, inside: int | None = None
) -> int:
    """A descriptor of what this user owns at `path`, closed with the stack; OSError where it is something else."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    stack.callback(os.close, descriptor)
    found = os.fstat(descriptor)
    if not kind(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not this user's")
    return descriptor
