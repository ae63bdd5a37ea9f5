"""The GPUs that a plan is for: their vendors' datasheets, and further assumptions."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlplus.common.errors import hint
from rlplus.train.config import Config

GIB = 2**30
NODE = 8  # GPUs of a node
CPU = "cpu"
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # v2, v1


@dataclass(frozen=True)
class Gpu:
    """memory in bytes; flops: dense bf16 peak; bandwidth of memory and link (one direction) in bytes per second.

    None: unknown, so no time is estimated. driver: a regular expression in the driver's name of the device.
    """

    name: str
    memory: float
    flops: float | None = None
    bandwidth: float | None = None
    link: float | None = None
    driver: str = ""


# The vendors' datasheets. bf16 peaks are without sparsity and, where the sheet has both, with sums in fp32. Memory is
# in GiB but for what the driver keeps (`RESERVE` has that). Links are quoted as the sum of both directions: here one.
GPUS = {
    # NVLink and SXM modules of NVIDIA.
    "a100-40g": Gpu("a100-40g", 40 * GIB, 312e12, 1555e9, 300e9, "a100"),
    "a100-80g": Gpu("a100-80g", 80 * GIB, 312e12, 2039e9, 300e9, "a100"),
    "h100": Gpu("h100", 80 * GIB, 989e12, 3350e9, 450e9, "h100"),
    "h200": Gpu("h200", 140 * GIB, 989e12, 4800e9, 450e9, "h200"),
    # PCIe: 32 GB/s in the fourth generation, 64 in the fifth. The peaks of the GeForce cards are in the white papers
    # of GA102, Ada and RTX Blackwell. ECC, which is on as delivered, takes a sixteenth of the GDDR6 of A10G and L40S.
    "rtx3090": Gpu("rtx3090", 24 * GIB, 71e12, 936e9, 32e9, "rtx 3090$"),
    "rtx4090": Gpu("rtx4090", 24 * GIB, 165e12, 1008e9, 32e9, "rtx 4090$"),
    "rtx5090": Gpu("rtx5090", 32 * GIB, 209e12, 1792e9, 64e9, "rtx 5090$"),
    "a10g": Gpu("a10g", 22.5 * GIB, 70e12, 600e9, 32e9, "a10g"),
    "l40s": Gpu("l40s", 45 * GIB, 362e12, 864e9, 32e9, "l40s"),
    # 128 decimal GB, shared with the system. The sheet has 1 PFLOP/s of sparse FP4 alone; the other chips of RTX
    # Blackwell do a sixteenth of theirs in bf16. Between machines ConnectX-7, 200 Gbit/s.
    "dgx-spark": Gpu("dgx-spark", 128e9, 62e12, 273e9, 25e9, "gb10"),
    # AMD's Infinity Fabric, seven links.
    "mi300x": Gpu("mi300x", 192 * GIB, 1307e12, 5300e9, 448e9, "mi300x"),
}


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs of one kind. On a CPU: a number of ranks."""

    gpus: int
    gpu: Gpu

    @property
    def cpu(self) -> bool:
        return self.gpu.name == CPU

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu.name}"


def make_cluster(gpus: int | None, gpu: str | None) -> Cluster:
    """The cluster of that name and size; None means this machine's GPUs, or its CPU if it has none.

    gpu: a name in GPUS, a memory size in GiB such as "24g", with unknown speed, or "cpu": ranks of this machine. One of
    them by default. ValueError for another name and a number below 1.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"want --gpus of at least 1; got {gpus}")
    here = torch.cuda.device_count() if gpu is None and torch.cuda.is_available() else 0
    if gpu == CPU or (gpu is None and not here):
        return Cluster(gpus or 1, _cpu(gpus or 1))
    return Cluster(gpus or here or 1, _this_gpu() if gpu is None else _named_gpu(gpu))


def _named_gpu(name: str) -> Gpu:
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if size := re.fullmatch(r"([1-9]\d{0,5})g(?:i?b)?", name.lower()):
        return Gpu(f"{size[1]} GiB GPU", int(size[1]) * GIB)
    wanted = f"one of {', '.join((CPU, *GPUS))}, or a size of memory such as 24g"
    raise ValueError(f"want --gpu {wanted}; got {name!r}{hint(name, (*GPUS, CPU))}")


def gpus_a_rank(config: Config, gpu: Gpu) -> int:
    """GPUs per rank: one, and in mode process its engine's, if the run has one; a server's are not counted."""
    own_gpus = config.needs_engine and config.rollout.mode == "process" and gpu.name != CPU
    return 1 + config.rollout.tensor_parallel_size if own_gpus else 1


def this_cluster(config: Config) -> Cluster:
    """The cluster that this process's run is on; without GPUs the ranks share the host's memory."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        gpu = _this_gpu()
        return Cluster(ranks * gpus_a_rank(config, gpu), gpu)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Cluster(ranks, _cpu(local))


def _cpu(ranks: int) -> Gpu:
    """The share of a rank of this machine's memory."""
    return Gpu(CPU, _host_memory() / ranks)


def _host_memory() -> int:
    """Bytes of this machine, or of the container where its control group allows less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for file in CGROUP_LIMITS if file.is_file() and (text := file.read_text().strip()).isdigit()]
    return min([memory, *limits])


def _this_gpu() -> Gpu:
    """The device of this process, with the speeds of the listed one of that name and size, if any."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    words = properties.name.lower()
    alike = [
        g for g in GPUS.values() if re.search(g.driver, words) and abs(g.memory / properties.total_memory - 1) < 0.1
    ]
    known = alike[0] if alike else Gpu("", 0.0)
    return replace(known, name=properties.name, memory=float(properties.total_memory))
