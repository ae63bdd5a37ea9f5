"""A search for switches that make a run fit, by evaluating the plan's formulas with each of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd
from typing import Any

from rlplus.loss import MAX_SCRATCH_MB
from rlplus.tools.plan.cluster import Cluster, gpus_a_rank
from rlplus.tools.plan.memory import estimate_memory
from rlplus.tools.plan.planned_model import Model
from rlplus.tools.plan.speed import estimate_seconds
from rlplus.train.config import Config, RolloutConfig
from rlplus.train.rollout import DEFAULT_CACHE_MB

Changes = Mapping[str, Any]
SHOWN = 4  # remedies
SCRATCH_MB = (640, 320, 160)  # train.max_scratch_mb; with less, GEMMs would read the weight for few rows each time
LEAST_CACHE_MB = 256  # the smallest rollout.kv_cache_memory_mb that is tried
SHARE = "rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Remedy:
    """Overrides for the command line, and their result on `gpus` GPUs in total.

    peak: bytes on a GPU that trains. host: bytes of each node's memory. seconds: time of a step, 0 if unknown.
    """

    overrides: tuple[str, ...]
    gpus: int
    peak: int
    host: int
    seconds: float


def find_remedies(config: Config, model: Model, cluster: Cluster) -> list[Remedy]:
    """The fewest switches that make the run fit, the fastest first. cluster: the ranks and their GPUs.

    If two are not enough: as many as needed, on these GPUs or, if even all of them are not enough, on more.
    """
    switches = list(all_switches(config, model, cluster))
    for size in (1, 2):
        found = []
        for chosen in combinations(switches, size):
            fitting = (_try(config, model, cluster, values) for values in product(*chosen))
            found += [remedy for remedy in fitting if remedy][:1]
        if found:
            return sorted(found, key=lambda r: (r.seconds, r.peak))[:SHOWN]
    for gpus in (cluster.gpus * 2**i for i in range(8)):
        larger = Cluster(gpus, cluster.gpu)
        if remedy := _all_but_the_needless(config, model, larger):
            return [remedy]
    return []


def all_switches(config: Config, model: Model, cluster: Cluster) -> Iterator[list[Changes]]:
    """Each switch's settings, the mildest first; a setting may need two keys."""
    train = config.train
    rollout = config.rollout
    vllm = config.needs_engine and rollout.mode != "server" and rollout.engine != "transformers" and not cluster.cpu
    if vllm and rollout.mode == "colocated" and not rollout.sleep:
        yield [{"rollout.sleep": True}]
    if config.needs_engine and rollout.mode == "colocated" and train.zero_stage < 3 and not rollout.share_weights:
        yield [_sharing(rollout)]
    if not config.model.gradient_checkpointing:
        yield [{"model.gradient_checkpointing": True}]
    if vllm and rollout.kv_cache_memory_mb is None:
        tenths = (u / 20 for u in range(18, 1, -1))
        yield [{SHARE: u} for u in tenths if u != rollout.gpu_memory_utilization]
    cache = rollout.kv_cache_memory_mb or DEFAULT_CACHE_MB
    smaller = [mb for i in range(1, 8) if (mb := cache >> i) >= LEAST_CACHE_MB]
    if config.needs_engine and rollout.engine == "transformers" and smaller:
        yield [{"rollout.kv_cache_memory_mb": mb} for mb in smaller]
    most = 2 if config.model.lora and config.model.lora.quantization else 3  # ZeRO-3 refuses weights of 4 bits
    if train.zero_stage < most:
        yield [{"train.zero_stage": stage} for stage in range(train.zero_stage + 1, most + 1)]
    tokens = train.tokens_per_micro_batch
    least = -(-config.max_sample_length // train.sequence_parallel)
    halves = [t for i in range(1, 8) if (t := tokens >> i) > least]
    if tokens > least:
        yield [{"train.tokens_per_micro_batch": t} for t in (*halves, least)]
    chunked = train.backend != "reference"
    now = train.max_scratch_mb or MAX_SCRATCH_MB
    if chunked and (scratch := [mb for mb in SCRATCH_MB if mb < now]):
        yield [{"train.max_scratch_mb": mb} for mb in scratch]
    shared = gcd(cluster.gpus, model.heads, model.key_heads)
    if ranks := [s for s in (2, 4, 8) if s > train.sequence_parallel and shared % s == 0]:
        yield [
            {
                "train.sequence_parallel": s,
                "train.tokens_per_micro_batch": max(-(-config.max_sample_length // s), tokens // s),
            }
            for s in ranks
        ]
    if train.offload_optimizer == "none" and train.optimizer == "adamw":  # the other one cannot be
        yield [{"train.offload_optimizer": "cpu"}]
    if train.offload_params == "none" and most == 3:
        yield [{"train.zero_stage": 3, "train.offload_params": "cpu"}]


def _sharing(rollout: RolloutConfig) -> Changes:
    """The switch to an engine without a copy of the weights, and off what it does not go with."""
    names = ("sleep", "tensor_parallel_size", "gpu_memory_utilization", "vllm", "push_timeout_s", "lora")
    wanted = {"engine": "transformers", "share_weights": True}
    wanted |= {name: RolloutConfig.model_fields[name].get_default(call_default_factory=True) for name in names}
    return {f"rollout.{name}": value for name, value in wanted.items() if getattr(rollout, name) != value}


def _try(config: Config, model: Model, cluster: Cluster, settings: tuple[Changes, ...]) -> Remedy | None:
    changes = {key: value for setting in settings for key, value in setting.items()}
    if len(changes) < sum(map(len, settings)):  # two settings of one key
        return None
    changed = with_changes(config, changes)
    if changed is None or not (memory := estimate_memory(changed, model, cluster)).fits:
        return None
    seconds = estimate_seconds(changed, model, memory, cluster).get("total", 0.0)
    gpus = cluster.gpus * gpus_a_rank(config, cluster.gpu)
    return Remedy(show_changes(changes), gpus, memory.peak, memory.host, seconds)


def _all_but_the_needless(config: Config, model: Model, cluster: Cluster) -> Remedy | None:
    """All switches at their strongest, minus those that are not needed to fit, the most costly ones first."""
    per_update = config.train.prompts_per_update or config.train.prompts_per_step
    if per_update % cluster.gpus:
        return None
    switches = [s for s in all_switches(config, model, cluster) if len(s[0]) == 1]
    strongest = [s[-1] for s in switches if SHARE not in s[0]]
    shares = [s for settings in switches if SHARE in settings[0] for s in settings]  # neither end is the strongest
    for chosen in ([*strongest, share] for share in shares or [{}]):
        if best := _try(config, model, cluster, tuple(chosen)):
            for setting in reversed(chosen):
                without = [s for s in chosen if s is not setting]
                if fewer := _try(config, model, cluster, tuple(without)):
                    chosen = without
                    best = fewer
            return best
    return None


def with_changes(config: Config, changes: Changes) -> Config | None:
    """The configuration with these values; None if it refuses them."""
    values = config.model_dump()
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    try:
        return Config.model_validate(values)
    except ValueError:  # a combination that the configuration refuses is no remedy
        return None


def show_changes(changes: Changes) -> tuple[str, ...]:
    """The changes as overrides for the command line."""
    return tuple(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in changes.items())
