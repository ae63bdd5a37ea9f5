"""The memory that a run needs on each GPU, by part, a rough time per step, and switches that make it fit.

No GPU and no weights are needed: the model is built on the meta device. `activations` counts the tensors that a pass
keeps, `memory` has the formulas of the other parts, `speed` estimates the time, `search` tries the switches.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from rlplus.tools.plan.cluster import CPU, GIB, GPUS, Cluster, gpus_a_rank, make_cluster, this_cluster
from rlplus.tools.plan.memory import MOMENTS, Memory, checkpoint_bytes, estimate_memory, sequence_bytes
from rlplus.tools.plan.planned_model import Model, packed_shape
from rlplus.tools.plan.search import Remedy, find_remedies
from rlplus.tools.plan.speed import ASSUMPTIONS, estimate_seconds
from rlplus.train.config import Config, ModelConfig, model_problem, shipped_architecture
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.pretrained import (
    check_packing,
    check_positions,
    make_scratch_model,
    read_model_config,
    with_overrides,
)

TEACHER = "algorithm.recipe.teacher"

__all__ = [
    "CPU",
    "GIB",
    "GPUS",
    "MOMENTS",
    "Cluster",
    "Memory",
    "Plan",
    "Remedy",
    "make_cluster",
    "make_plan",
    "this_cluster",
]


@dataclass(frozen=True)
class Plan:
    """ranks: the number of GPUs that train; the others are for their engines. mode: the engine's, "none" without one.

    seconds: a step's time by phase, empty if unknown. remedies: only if the run does not fit. note: if the model's
    architecture is the copy that comes with a shipped configuration, the reason; and that rollout.vllm is not counted.
    steps: None if the data decide it. checkpoint: bytes of one on the disk; checkpoints: the most there at a time.
    """

    cluster: Cluster
    ranks: int
    mode: str
    overlap: bool
    parameters: int
    micro_batch: tuple[int, int]
    sequences: int
    memory: Memory
    seconds: dict[str, float]
    remedies: tuple[Remedy, ...]
    steps: int | None
    checkpoint: int
    checkpoints: int
    note: str

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        memory = self.memory
        return {
            "cluster": asdict(self.cluster),
            "ranks": self.ranks,
            "fits": self.fits,
            "problems": list(memory.problems),
            "parameters": self.parameters,
            "micro_batch": dict(zip(("rows", "length"), self.micro_batch, strict=True)),
            "capacity": memory.capacity,
            "peak": memory.peak,
            "memory": {moment: parts | {"total": memory.total(moment)} for moment, parts in memory.parts.items()},
            "engine_memory": memory.engine,
            "host": memory.host,
            "checkpoint": self.checkpoint,
            "checkpoints": self.checkpoints,
            "full_sequences_in_cache": self.sequences,
            "seconds": self.seconds,
            "assumed": list(ASSUMPTIONS) if self.seconds else [],
            "note": self.note,
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }

    def summary(self) -> str:
        """One line: the fullest moment and its parts."""
        moment = max(MOMENTS, key=self.memory.total)
        parts = sorted(self.memory.parts[moment].items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
        total = show_bytes(self.memory.total(moment))
        capacity = show_bytes(self.memory.capacity)
        return f"memory planned for {self.cluster.name}: {total} of {capacity} ({moment}: {shown})"


def make_plan(config: Config, cluster: Cluster) -> Plan:
    """Plan `config` for `cluster`, all GPUs except a server's.

    Errors as in `read_model`; ValueError also for lengths, ranks and heads that the run cannot have.
    """
    trainer = training_part(config, cluster)
    model, note = read_model(config)
    if config.algorithm.resolve().recipe.teacher_server is not None:
        note = "\n".join(filter(None, (note, "Not counted: the GPUs of the teacher's server, and the wait for it.")))
    if options := ", ".join(config.rollout.vllm):
        note = "\n".join(filter(None, (note, f"Not counted: what rollout.vllm changes ({options}).")))
    check_positions(config, model.lm.config)
    _check_heads(config, model)
    memory = estimate_memory(config, model, trainer)
    return Plan(
        cluster,
        trainer.gpus,
        config.rollout.mode if config.needs_engine else "none",
        config.train.overlap > 0,
        model.parameters,
        packed_shape(config),
        memory.cache // sequence_bytes(config, model, config.max_generation_length),
        memory,
        estimate_seconds(config, model, memory, trainer),
        () if memory.fits else tuple(find_remedies(config, model, trainer)),
        config.train.steps,
        checkpoint_bytes(config, model),
        config.checkpoint.keep + 1 + (config.validation.every > 0),  # one being written; the best, however old
        note,
    )


def read_model(config: Config) -> tuple[Model, str]:
    """The run's model without its weights, and a note if its architecture is the shipped copy.

    ValueError for a model that does not exist or cannot be trained, RuntimeError for one that cannot be built.
    """
    model_config, note = _model_config(config.model)
    model_config = with_overrides(model_config, config.model.overrides)
    check_packing(model_config)
    teacher = config.algorithm.resolve().recipe.teacher_model
    taught, more = (None, "") if teacher is None else _architecture(teacher, config.model.trust_remote_code, TEACHER)
    note = "\n".join(filter(None, (note, more)))
    try:
        return Model(config, model_config, teacher=taught), note
    except Exception as error:  # foreign configurations and code can raise anything
        reason = " ".join(str(error).split()) or repr(error)
        raise RuntimeError(f"the model cannot be built without memory: {reason}") from error


def _model_config(part: ModelConfig) -> tuple[PretrainedConfig, str]:
    """The model's architecture, and a note if it is the shipped copy."""
    if part.scratch is not None:
        with torch.device("meta"):
            return make_scratch_model(part.scratch, byte_tokenizer(), seed=0).config, ""
    assert part.path is not None
    return _architecture(part.path, part.trust_remote_code, "model.path")


def _architecture(path: str, trust_remote_code: bool, key: str) -> tuple[PretrainedConfig, str]:
    shipped = shipped_architecture(path)
    if shipped is not None and (problem := model_problem(path)):
        config = read_model_config(str(shipped), trust_remote_code)
        return config, f"{path}: the architecture that comes with rlplus ({problem})"
    return read_model_config(path, trust_remote_code, key), ""


def training_part(config: Config, cluster: Cluster) -> Cluster:
    """The GPUs that train: one per rank."""
    each = gpus_a_rank(config, cluster.gpu)
    parallel = config.rollout.tensor_parallel_size
    if cluster.gpus % each:
        raise ValueError(
            f"rollout.mode process with rollout.tensor_parallel_size {parallel} takes {each} GPUs per rank: "
            f"want a multiple of them; got {cluster.gpus}"
        )
    ranks = cluster.gpus // each
    per_update = config.train.prompts_per_update or config.train.prompts_per_step
    if per_update % ranks:
        raise ValueError(f"want prompts_per_step and _per_update multiples of the {ranks} ranks; got {per_update}")
    if ranks % config.train.sequence_parallel:
        raise ValueError(
            f"want train.sequence_parallel a divisor of the {ranks} ranks; got {config.train.sequence_parallel}"
        )
    if config.needs_engine and config.rollout.mode == "colocated" and ranks % parallel:
        raise ValueError(f"want rollout.tensor_parallel_size a divisor of the {ranks} ranks; got {parallel}")
    return Cluster(ranks, cluster.gpu)


def _check_heads(config: Config, model: Model) -> None:
    """ValueError if the trainer's attention or vLLM could not split the heads."""
    sequence = config.train.sequence_parallel
    tensor = config.rollout.tensor_parallel_size if config.needs_engine else 1
    for key, size, heads in (
        ("train.sequence_parallel", sequence, {model.heads, model.key_heads}),
        ("rollout.tensor_parallel_size", tensor, {model.heads}),
    ):
        for count in heads:
            if count % size:
                raise ValueError(f"want {key} a divisor of the model's {count} heads; got {size}")


def show_bytes(size: float) -> str:
    """The size in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
