"""A search for settings of a model that fit, by the plan's formulas, the best ones first."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch.cuda import is_available

from rlplus.tools.plan import Cluster, Plan, make_cluster, make_plan, read_model, training_part
from rlplus.tools.plan.memory import estimate_memory, sequence_bytes
from rlplus.tools.plan.planned_model import Model
from rlplus.tools.plan.search import SCRATCH_MB
from rlplus.train.config import Config, config_from, installed_vllm, merged
from rlplus.train.learner.pretrained import positions

LENGTHS = (2048, 1024, 512)  # responses, in tokens
TOKENS = (16384, 8192, 4096, 2048)  # tokens of a micro-batch
ENGINES = (1, 2, 4, 8)  # GPUs that share an engine
SHARES = tuple(n / 20 for n in range(18, 1, -1))  # rollout.gpu_memory_utilization
CACHES = tuple(2**n for n in range(15, 8, -1))  # rollout.kv_cache_memory_mb of the transformers engine
VLLM = {"engine": "vllm", "sleep": True}
COPY = {"engine": "transformers"}
SHARED = COPY | {"share_weights": True}
WHOLE: dict[str, Any] = {"train": {"lr": 1e-6}}
ADAPTERS: dict[str, Any] = {"model": {"lora": {"rank": 16, "alpha": 32.0}}, "train": {"lr": 1e-5}}
IN_HOST = merged(ADAPTERS, {"train": {"zero_stage": 3, "offload_params": "cpu"}})
FULL = merged(WHOLE, {"rollout": VLLM})
LORA = merged(ADAPTERS, {"rollout": VLLM})
OFFLOADED = merged(IN_HOST, {"rollout": VLLM})
QLORA = merged(ADAPTERS, {"model": {"lora": {"quantization": "nf4"}}, "rollout": SHARED})
SIZES = (24, 32, 40, 48, 80, 140, 192)  # GiB of single GPUs that a refusal may name
SEQUENCES = 4  # that the engine's cache holds at least, if any share of the GPU gives so many
FULL_AT = 0.95  # share of a GPU's memory: a plan is an estimate


@dataclass(frozen=True)
class Found:
    """Settings that fit. refused: tunings that were tried before, in words."""

    values: dict[str, Any]
    config: Config
    plan: Plan
    refused: tuple[str, ...]

    @property
    def tuning(self) -> str:
        return _tuning(self.values)


def chosen_engine(rollout: dict[str, Any], cluster: Cluster) -> str:
    """The engine that the section names, else vLLM where what is installed computes on this cluster, else transformers.

    vLLM's CPU build, on a machine without a GPU, tells nothing of another machine's.
    """
    if (named := rollout.get("engine", "auto")) != "auto":
        return str(named)
    build = installed_vllm()
    here = "cpu" if cluster.cpu or not is_available() else "gpu"
    elsewhere = here == "cpu" and not cluster.cpu
    return "vllm" if build is not None and (elsewhere or build == here) else "transformers"


def tunings_for(rollout: dict[str, Any], cluster: Cluster) -> list[dict[str, Any]]:
    """Tunings to try, with this cluster's engine: first what trains more weights, then what has whole ones.

    Last comes what moves them over the bus in each step. rollout: keys of the section that are given.
    """
    mode = rollout.get("mode", "colocated")
    engines = [SHARED, COPY]
    if mode == "server":
        engines = [{}]
    elif chosen_engine(rollout, cluster) == "vllm":
        engines = [VLLM if mode == "colocated" and not cluster.cpu else {"engine": "vllm"}]
    found = [merged(trained, {"rollout": keys}) for trained in (WHOLE, ADAPTERS) for keys in engines]
    return found if cluster.cpu else [*found, QLORA, merged(IN_HOST, {"rollout": engines[-1]})]


def find_fitting(
    base: dict[str, Any],
    fixed: dict[str, Any],
    cluster: Cluster,
    tunings: Sequence[dict[str, Any]] | None = None,
    models: dict[str, Model] | None = None,
) -> Found | None:
    """The first settings that fit, of `tunings` and within each of `LENGTHS`; None if none does.

    base: sections of a configuration without lengths and training settings. fixed: values that stay. tunings: None =
    `tunings_for` the cluster. models: those read before, by the tuning, for searches that differ in the cluster only.
    ValueError where the fixed values go with no tuning.
    """
    refused: list[str] = []
    models = {} if models is None else models
    tried = [merged(merged(base, each), fixed) for each in tunings or tunings_for(fixed.get("rollout", {}), cluster)]
    accepted = [values for values in tried if _accepted(values)]
    if not accepted:
        config_from(with_room(tried[0]), "what is given, with the settings that init adds,")
    for values in accepted:
        if (name := _tuning(values)) in refused:  # fixed keys have made it an earlier one
            continue
        lora = str(values["model"].get("lora"))
        if lora not in models:
            models[lora], _ = read_model(_config(values))
        model = models[lora]
        for length in _lengths(values, model):
            chosen = merged(values, {"rollout": {"max_response_length": length}})
            if (settled := _settled(chosen, fixed, model, cluster)) is not None:
                config = Config.model_validate(settled)
                return Found(settled, config, make_plan(config, cluster), tuple(refused))
        refused.append(name)
    return None


def _tuning(values: dict[str, Any]) -> str:
    lora = values["model"].get("lora")
    offloaded = values["train"].get("offload_params", "none") != "none"
    name = "all weights are trained" if not lora else "LoRA" if not lora.get("quantization") else "QLoRA"
    return f"{name}{', the engine without a copy' * _shares(values)}{', offloaded' * offloaded}"


def _shares(values: dict[str, Any]) -> bool:
    return bool(values["rollout"].get("share_weights"))


def _has_engine(values: dict[str, Any]) -> bool:
    """Whether the run has an engine whose memory is planned."""
    config = _config(values)
    return config.needs_engine and config.rollout.mode != "server"


def with_room(values: dict[str, Any]) -> dict[str, Any]:
    """The values with what they lack, and micro-batches that are large enough for any sample."""
    rollout = {"max_response_length": LENGTHS[-1]} | values["rollout"]
    return merged(values, {"rollout": rollout, "train": {"tokens_per_micro_batch": 2**40}})


def _config(values: dict[str, Any]) -> Config:
    return Config.model_validate(with_room(values))


def _accepted(values: dict[str, Any]) -> bool:
    """Whether the values go together."""
    try:
        _config(values)
    except ValueError:
        return False
    return True


def _lengths(values: dict[str, Any], model: Model) -> list[int]:
    """Lengths of responses that the model has positions for."""
    if "max_response_length" in values["rollout"]:
        return [values["rollout"]["max_response_length"]]
    places = positions(model.lm.config)
    longest = [_config(merged(values, {"rollout": {"max_response_length": n}})).max_sample_length for n in LENGTHS]
    return [n for n, tokens in zip(LENGTHS, longest, strict=True) if places is None or tokens <= places]


def _settled(values: dict[str, Any], fixed: dict[str, Any], model: Model, cluster: Cluster) -> dict[str, Any] | None:
    """The values with the fewest GPUs per engine and the lowest ZeRO stage that fit, and the largest micro-batch there.

    None if none fits.
    """
    config = _config(values)
    stages = [config.train.zero_stage] if "zero_stage" in values["train"] or cluster.gpus == 1 else [1, 2, 3]
    engines = [n for n in ENGINES if cluster.gpus % n == 0 and model.heads % n == 0]
    least = config.max_sample_length

    def tried(engine: int, stage: int, tokens: int, **memory: int) -> dict[str, Any] | None:
        rollout = {} if engine == 1 else {"tensor_parallel_size": engine}
        train = {"zero_stage": stage, "tokens_per_micro_batch": tokens, **memory}
        changed = merged(merged(values, {"rollout": rollout, "train": train}), fixed)
        return _with_share(changed, fixed, model, cluster) if _accepted(changed) else None

    for engine, stage in product(engines, stages):
        if smallest := tried(engine, stage, least) or tried(engine, stage, least, max_scratch_mb=SCRATCH_MB[-1]):
            larger = (tried(engine, stage, tokens) for tokens in TOKENS if tokens > least)
            return next((found for found in larger if found), smallest)
    return None


def _with_share(values: dict[str, Any], fixed: dict[str, Any], model: Model, cluster: Cluster) -> dict[str, Any] | None:
    """The values with the largest share of the GPU, or cache, for the engine that fits; None if none does.

    The engine has it while the policy rests, so a larger one costs nothing.
    """
    trainer = training_part(_config(values), cluster)
    has_engine = _has_engine(values)
    shares: list[dict[str, Any]] = [{"gpu_memory_utilization": share} for share in SHARES]
    if not has_engine:
        shares = [{}]
    elif cluster.cpu:  # where memory is everybody's, no more than generation needs
        shares = [{}, *({"kv_cache_memory_mb": size} for size in reversed(CACHES))]
    elif values["rollout"]["engine"] == "transformers":
        shares = [{"kv_cache_memory_mb": size} for size in CACHES]
    for share in shares:
        tried = merged(merged(values, {"rollout": share}), fixed)
        config = Config.model_validate(tried)
        memory = estimate_memory(config, model, trainer)
        full = FULL_AT * memory.capacity
        one = sequence_bytes(config, model, config.max_generation_length)
        if memory.fits and memory.peak <= full and (not has_engine or memory.cache >= SEQUENCES * one):
            return tried
        if max(map(memory.total, ("head", "backward", "optimizer"))) > full:
            return None  # whatever the engine has
    return None


def what_would_fit(base: dict[str, Any], fixed: dict[str, Any], cluster: Cluster) -> str:
    """A sentence with the fewest GPUs of this kind, and the smallest single one, that would do."""
    found: list[str] = []
    models: dict[str, Model] = {}
    for gpus in () if cluster.cpu else (cluster.gpus * 2**i for i in range(1, 4)):  # ranks of a CPU share its memory
        if more := find_fitting(_for_ranks(base, gpus), fixed, Cluster(gpus, cluster.gpu), models=models):
            found.append(f"{gpus} such GPUs ({more.tuning}, ZeRO {more.config.train.zero_stage})")
            break
    for size in (size for size in SIZES if size * 2**30 > cluster.gpu.memory):
        larger = make_cluster(cluster.gpus, f"{size}g")
        if other := find_fitting(base, fixed, larger, models=models):
            found.append(f"{larger.gpus} x {size} GiB ({other.tuning})")
            break
    options = " or ".join(found)
    return f"it would on {options}; or take a smaller model" if found else "take a smaller model"


def _for_ranks(base: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The base with a step that so many ranks can share."""
    train = {key: max(value, ranks) for key, value in base["train"].items() if key.startswith("prompts_")}
    return merged(base, {"train": train})
