"""Weights in memory for other processes: their bits, what is refused, and what a killed process leaves."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import Tensor

from rlplus.train.rollout import parcels
from rlplus.train.rollout.parcels import Memory, NodeWeights, Parcel, checksum, shared_memory


def weights() -> dict[str, Tensor]:
    """Every dtype, odd sizes, and parts of larger tensors that begin anywhere."""
    torch.manual_seed(0)
    large = torch.randn(301, 77)
    return {
        "scalar": torch.tensor(2.5),
        "double": torch.randn(3, 5, dtype=torch.float64),
        "odd": torch.randn(1031).bfloat16(),
        "half": torch.randn(2, 4099).half(),
        "transposed": large.T,
        "part": large.bfloat16().view(-1)[3:9002],
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "none": torch.zeros(0, 4),
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_weights_arrive_bit_for_bit() -> None:
    want = weights()
    for most, count in ((10**9, 1), (10_000, 5), (1, 8)):
        sizes = []
        got: dict[str, Tensor] = {}
        for parcel in parcels.parcels(want.items(), most, "run"):
            sizes.append(len(shared_memory(parcel.pid, parcel.fd)))
            got |= dict(parcel)
        assert len(sizes) == count
        assert list(got) == list(want)
        for name, weight in want.items():
            assert (got[name].dtype, got[name].shape) == (weight.dtype, weight.shape), name
            assert bits(got[name]) == bits(weight), name
        largest = max(weight.nbytes for weight in want.values())
        assert max(sizes) <= max(most, largest)


def test_what_was_read_outlives_its_memory() -> None:
    memory = Memory()
    memory.add("w", torch.arange(10_000.0))
    ((_, read),) = memory.seal()
    memory.close()
    assert torch.equal(read, torch.arange(10_000.0))


def test_a_checksum_is_the_sum_of_pages_times_odd_numbers() -> None:
    """By Python's integers; and it notices what can go wrong with pages, and any one bit."""
    torch.manual_seed(0)
    for size in (0, 1, 7, 8, 4095, 4096, 4097, 20_001):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        raw = data.numpy().tobytes()
        pages = [raw[i : i + 4096] for i in range(0, size + 1, 4096)]
        words = [[int.from_bytes(page[i : i + 8], "little") for i in range(0, len(page), 8)] for page in pages]
        want = sum((2 * number + 1) * sum(page) for number, page in enumerate(words))
        assert (checksum(data) - want) % 2**64 == 0
    whole = checksum(data)
    torn, moved = data.clone(), data.clone()
    torn[4096:8192] = 0
    moved[:4096], moved[4096:8192] = data[4096:8192], data[:4096]
    assert len({whole, checksum(torn), checksum(moved), checksum(data[:-1])}) == 4
    for at, bit in product((0, 4096 + 7, 5000, 3 * 4096 + 7, 20_000), (1, 128)):  # the upper bits of even words, too
        flipped = data.clone()
        flipped[at] ^= bit
        assert checksum(flipped) != whole


def parcel_of(**changes: Any) -> tuple[Memory, Parcel]:
    """A parcel of one parameter, w, with changes to its entry."""
    memory = Memory()
    memory.add("w", torch.ones(8, 4))
    sealed = memory.seal()
    names = ("name", "dtype", "shape", "begin", "checksum")
    entry = dict(zip(names, sealed.entries[0], strict=True)) | changes
    return memory, Parcel("", sealed.pid, sealed.fd, [list(entry.values())])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": 1}, "want w with the trainer's checksum 1; got .*: the parcel is corrupt"),
        ({"shape": [8, 3]}, "want w with the trainer's checksum .*: the parcel is corrupt"),
        ({"shape": [8, 5]}, "want w at bytes 0 to 160 of a parcel; it has 128"),
        ({"dtype": "float64"}, "want w at bytes 0 to 256 of a parcel; it has 128"),
        ({"dtype": "int32"}, "want w of a dtype among float64, float32, bfloat16, float16; got int32"),
        ({"begin": 8}, "want w at bytes 8 to 136 of a parcel; it has 128"),
    ],
)
def test_a_parcel_that_is_not_what_it_says_is_refused(changes: dict[str, Any], message: str) -> None:
    memory, parcel = parcel_of(**changes)
    with pytest.raises(ValueError, match=message):
        list(parcel)
    memory.close()


def test_only_sealed_memory_is_read(tmp_path: Path) -> None:
    memory = Memory()
    memory.add("w", torch.ones(8))
    with pytest.raises(ValueError, match=r"want sealed memory at /proc/.*; got memory that can still be written"):
        shared_memory(os.getpid(), memory._fd)
    parcel = memory.seal()
    with pytest.raises(OSError, match="no memory for weights on their way"):
        memory.write(b"more")
    with pytest.raises(PermissionError):
        os.ftruncate(parcel.fd, 0)
    memory.close()
    (tmp_path / "file").write_bytes(b"0" * 64)
    os.mkfifo(tmp_path / "fifo")
    for path, flags in (("file", os.O_RDONLY), ("fifo", os.O_RDWR)):
        other = os.open(tmp_path / path, flags)
        with pytest.raises(ValueError, match=r"want memory at /proc/.*; got something else"):
            shared_memory(os.getpid(), other)
        os.close(other)
    with pytest.raises(ValueError, match=r"memory at /proc/.*: both processes on one machine.*; got No such file"):
        list(parcel)


def test_a_rank_alone_holds_one_version() -> None:
    held = NodeWeights()
    first = held.replace(weights().items())
    assert list(dict(first)) == list(weights())
    second = held.replace([("w", torch.ones(3))])
    assert list(dict(second)) == ["w"]
    held.close()
    with pytest.raises(ValueError, match="want the trainer's memory"):
        list(second)


KILLED = """
import sys, time, torch
from rlplus.train.rollout.parcels import Memory
memory = Memory()
memory.add("w", torch.ones(1_000_000))
print(memory.seal().fd, flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_no_memory() -> None:
    """It never had a name."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with processes.started([sys.executable, "-c", KILLED], environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fd = int(process.stdout.readline())
        parcel = shared_memory(process.pid, fd)
        assert len(parcel) == 4_000_000
        assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == "/memfd:rlplus-weights (deleted)"
        process.kill()
        process.wait()
        with pytest.raises(ValueError, match="want the trainer's memory"):
            shared_memory(process.pid, fd)
    assert float(parcel.view(torch.float32).sum()) == 1e6, "a reader keeps it as long as it reads"
