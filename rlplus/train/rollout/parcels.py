"""Weights in memory that other processes of this machine read: sealed, with checksums, and gone with their last user.

The memory has no name in any file system (memfd_create), so a killed process leaves none behind, a container's limit
of /dev/shm does not apply, and no other user can plant anything in it. Readers open it through /proc, which the kernel
grants to processes of the same user.
"""

import fcntl
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import agree
from rlplus.train.rollout.push import rank

ALIGNMENT = 64  # each parameter's first byte is at a multiple
PAGE = 4096
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
FLOATS = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Parcel:
    """Parameters in memory of process pid, under its descriptor fd; iterating reads them: (name, tensor).

    run: who sends it; see `Receiver`. entries: name, dtype, shape, first byte and checksum of each parameter; lists and
    numbers only, so that JSON carries them. A tensor keeps the memory it was read from.
    """

    run: str
    pid: int
    fd: int
    entries: list[list[Any]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        memory = shared_memory(self.pid, self.fd)
        for name, kind, shape, begin, want in self.entries:
            if kind not in FLOATS:
                raise ValueError(f"want {name} of a dtype among {', '.join(FLOATS)}; got {kind}")
            dtype = FLOATS[kind]
            end = begin + math.prod(shape) * dtype.itemsize
            if begin % ALIGNMENT or begin < 0 or min(shape, default=0) < 0 or end > memory.numel():
                raise ValueError(f"want {name} at bytes {begin} to {end} of a parcel; it has {memory.numel()}")
            data = memory[begin:end]
            if (got := checksum(data)) != want:
                raise ValueError(f"want {name} with the trainer's checksum {want}; got {got}: the parcel is corrupt")
            yield name, data.view(dtype).view(shape)


def shared_memory(pid: int, fd: int) -> Tensor:
    """The bytes under a descriptor of a process on this machine, mapped; ValueError if they may still change."""
    path = f"/proc/{int(pid)}/fd/{int(fd)}"  # numbers: a request may hold anything
    try:
        ours = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(
            f"want the trainer's memory at {path}: both processes on one machine, of one user, in one container; got "
            f"{error.strerror}"
        ) from error
    try:
        if fcntl.fcntl(ours, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"want sealed memory at {path}; got memory that can still be written")
        size = os.fstat(ours).st_size
        return torch.from_file(f"/proc/self/fd/{ours}", shared=False, size=size, dtype=torch.uint8)
    except OSError as error:
        raise ValueError(f"want memory at {path}; got something else ({error.strerror})") from error
    finally:
        os.close(ours)


def checksum(data: Tensor) -> int:
    """A checksum of bytes that are aligned to 8: sums of pages, each times an odd number of its own, modulo 2**64.

    An even one would lose the words' upper bits. It notices a page that is missing, torn, stale or in another's place
    and any single change of a word; not two words of one page that are exchanged. It reads memory once, at about its
    speed.
    """
    whole = data.numel() // PAGE * PAGE
    rest = torch.zeros(PAGE, dtype=torch.uint8)
    rest[: data.numel() - whole] = data[whole:]
    sums = torch.cat([data[:whole].view(torch.int64).view(-1, PAGE // 8).sum(1), rest.view(torch.int64).sum()[None]])
    return int((sums * torch.arange(1, 2 * len(sums), 2)).sum())


class Memory:
    """Memory of this process that is filled, sealed and then read by others, until it is closed."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rlplus-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.entries: list[list[Any]] = []
        self.size = 0

    def add(self, name: str, weight: Tensor) -> None:
        kind = str(weight.dtype).removeprefix("torch.")
        data = weight.detach().cpu().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:  # a part of a larger tensor
            data = data.clone()
        self.write(bytes(-self.size % ALIGNMENT))
        self.entries.append([name, kind, list(weight.shape), self.size, checksum(data)])
        self.write(data.numpy())

    def write(self, data: Any) -> None:
        left = memoryview(data)
        self.size += len(left)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise OSError(f"no memory for weights on their way to an engine: {error}") from error

    def seal(self, run: str = "") -> Parcel:
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        return Parcel(run, os.getpid(), self._fd, self.entries)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def parcels(weights: Iterable[tuple[str, Tensor]], most_bytes: int, run: str) -> Iterator[Parcel]:
    """The weights in order, in parcels of at most most_bytes, or of one parameter; each until the next is asked for."""
    memory = Memory()
    try:
        for name, weight in weights:
            if memory.entries and memory.size + ALIGNMENT + weight.nbytes > most_bytes:
                yield memory.seal(run)
                memory.close()
                memory = Memory()
            memory.add(name, weight)
        if memory.entries:
            yield memory.seal(run)
    finally:
        memory.close()


class NodeWeights:
    """One version's weights for the engines of all ranks on this machine, whose first rank holds them."""

    def __init__(self) -> None:
        self._leader = rank() - int(os.environ.get("LOCAL_RANK", "0"))
        self._memory: Memory | None = None

    def replace(self, weights: Iterable[tuple[str, Tensor]]) -> Parcel:
        """Hold these in place of the last ones; all ranks call it."""
        if dist.is_initialized():
            agree.barrier()  # until no engine reads the old ones any more
        self.close()  # first: two versions at a time may not fit
        if self._leader == rank() or not dist.is_initialized():
            self._memory = Memory()
        for name, weight in weights:
            if self._memory:
                self._memory.add(name, weight)
        parcel = self._memory.seal() if self._memory else None
        held = agree.gathered(parcel)[self._leader] if dist.is_initialized() else parcel
        assert held is not None
        return held

    def close(self) -> None:
        if self._memory:
            self._memory.close()
        self._memory = None
