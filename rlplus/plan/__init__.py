"""What a run will take of each GPU, before it starts: memory by part, a rough time, and switches that make it fit.

No GPU and no weights are needed: the model is built without memory. `activations` counts what a pass keeps, `memory`
has the formulas of the other parts, `speed` those of the time, `search` tries the switches.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlplus.config import Config
from rlplus.data import byte_tokenizer
from rlplus.plan.cluster import GIB, GPUS, Cluster, make_cluster, this_cluster
from rlplus.plan.memory import MOMENTS, Memory, Model, estimate_memory, packed_shape
from rlplus.plan.search import Remedy, find_remedies
from rlplus.plan.speed import ASSUMPTIONS, estimate_seconds
from rlplus.trainer.model import make_scratch_model, read_model_config, with_overrides

__all__ = ["GIB", "GPUS", "MOMENTS", "Cluster", "Memory", "Plan", "Remedy", "make_cluster", "make_plan", "this_cluster"]


@dataclass(frozen=True)
class Plan:
    """seconds of a step by phase, empty where unknown; remedies: only where the run does not fit."""

    cluster: Cluster
    parameters: int
    micro_batch: tuple[int, int]
    sequences: int
    memory: Memory
    seconds: dict[str, float]
    remedies: tuple[Remedy, ...]
    steps: int

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        memory = self.memory
        return {
            "cluster": asdict(self.cluster),
            "fits": self.fits,
            "problems": list(memory.problems),
            "parameters": self.parameters,
            "micro_batch": dict(zip(("rows", "length"), self.micro_batch, strict=True)),
            "capacity": memory.capacity,
            "peak": memory.peak,
            "memory": {moment: parts | {"total": memory.total(moment)} for moment, parts in memory.parts.items()},
            "host": memory.host,
            "full_sequences_in_cache": self.sequences,
            "seconds": self.seconds,
            "assumed": list(ASSUMPTIONS) if self.seconds else [],
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def summary(self) -> str:
        """One line: the fullest moment and its parts."""
        moment = max(MOMENTS, key=self.memory.total)
        parts = sorted(self.memory.parts[moment].items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
        total, capacity = show_bytes(self.memory.total(moment)), show_bytes(self.memory.capacity)
        return f"memory planned for {self.cluster.name}: {total} of {capacity} ({moment}: {shown})"


def make_plan(config: Config, cluster: Cluster) -> Plan:
    """Plan `config` for `cluster`; ValueError for a model that is not there and for ranks that the run cannot have."""
    per_update = config.train.prompts_per_update or config.train.prompts_per_step
    if per_update % cluster.gpus:
        raise ValueError(
            f"want prompts_per_step and _per_update multiples of the {cluster.gpus} ranks; got {per_update}"
        )
    if cluster.gpus % config.train.sequence_parallel:
        raise ValueError(
            f"want train.sequence_parallel a divisor of the {cluster.gpus} ranks; got {config.train.sequence_parallel}"
        )
    part = config.model
    if part.scratch is not None:
        with torch.device("meta"):
            model_config = make_scratch_model(part.scratch, byte_tokenizer(), seed=0).config
    else:
        assert part.path is not None
        model_config = read_model_config(part.path, part.trust_remote_code)
    model = Model(config, with_overrides(model_config, part.overrides))
    memory = estimate_memory(config, model, cluster)
    one = model.cache_bytes // config.rollout.tensor_parallel_size * config.max_generation_length
    return Plan(
        cluster,
        model.parameters,
        packed_shape(config),
        memory.cache // one,
        memory,
        estimate_seconds(config, model, memory, cluster),
        () if memory.fits else tuple(find_remedies(config, model, cluster)),
        config.train.steps,
    )


def show_bytes(size: float) -> str:
    """In GiB, or in MiB below a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
