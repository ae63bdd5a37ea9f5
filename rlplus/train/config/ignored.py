"""Keys that a run would not read. Setting one to a non-default value is refused, since the user relies on it.

Not here: what another preset of the same file reads (the demonstrations' columns, group_size, and under preset sft the
section rollout, of which `rlplus eval` has its engine, too), what depends on the machine (engine auto), and what is so
anyway (enforce_eager with transformers).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rlplus.loss import Objective
from rlplus.loss.objective.surrogates import EXTERNAL, INTERNAL
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config.sections import Sections

# Keys, when they have no effect, and why.
Rule = tuple[str, Callable[[Sections], bool], str]


def _objective(config: Sections) -> Objective:
    return config.algorithm.resolve().objective


def _ratio_is_one(config: Sections) -> bool:
    """Whether the policy that trains is the one that sampled: then clip range and gate do not change the gradient."""
    train = config.train
    stale = config.train.overlap or config.rollout.segment
    return train.prompts_per_update in (None, train.prompts_per_step) and not stale


def _surrogate_reads(config: Sections, field: str) -> bool:
    algorithm = config.algorithm.resolve()
    sampled = algorithm.generates and field in INTERNAL[algorithm.objective.internal].reads
    return sampled or (algorithm.demonstrates and field in EXTERNAL[algorithm.objective.external].reads)


def _surrogates_rules() -> Iterator[Rule]:
    """Rules for fields of the objective that only some surrogates use."""
    readers = defaultdict(list)
    for kind, table in (("internal", INTERNAL), ("external", EXTERNAL)):
        for name, surrogate in table.items():
            for field in surrogate.reads:
                readers[field].append(f"algorithm.objective.{kind} {name}")
    for field, names in readers.items():
        without_effect = partial(lambda field, c: not _surrogate_reads(c, field), field)
        yield f"algorithm.objective.{field}", without_effect, f"it belongs to {' or '.join(names)}"


RULES: tuple[Rule, ...] = (
    (
        "rollout.gpu_memory_utilization rollout.vllm",
        lambda c: c.rollout.engine == "transformers",
        "it is vLLM's, and rollout.engine is transformers",
    ),
    (
        "rollout.gpu_memory_utilization rollout.enforce_eager rollout.kv_cache_memory_mb",
        # `rlplus eval` has an engine of its own, also where a server does the rollouts.
        lambda c: c.rollout.mode == "server" and c.evaluation.data is None,
        "a server has its own from where you start it",
    ),
    ("rollout.vllm", lambda c: c.rollout.mode == "server", "a server's engine arguments belong to where you start it"),
    (
        "data.teacher_topk",
        lambda c: not c.algorithm.resolve().recipe.topk,
        "the recipe distill reads it, with a divergence and no other teacher",
    ),
    (
        "rollout.transfer",
        lambda c: c.rollout.mode != "server",
        "it is the way of the weights to a server; other engines are on the trainer's machine",
    ),
    (
        "rollout.push_timeout_s",
        lambda c: c.rollout.share_weights,
        "with rollout.share_weights nothing is pushed",
    ),
    (
        "evaluation.samples evaluation.k evaluation.temperature",
        lambda c: c.evaluation.data is None,
        "there is no evaluation.data",
    ),
    (
        "validation.data",
        lambda c: not (c.validation.every or c.validation.benchmarks),
        "validation.every is 0",
    ),
    (
        "validation.benchmarks validation.samples validation.k validation.temperature validation.patience "
        "validation.allow_test_benchmarks",
        lambda c: not c.validation.every,
        "validation.every is 0",
    ),
    ("log.sample_groups", lambda c: c.log.samples_every == 0, "log.samples_every is 0, so no samples are kept"),
    ("evaluation.math_grader", lambda c: not c.evaluation.benchmarks, "it is for evaluation.benchmarks"),
    ("validation.math_grader", lambda c: not c.validation.benchmarks, "it is for validation.benchmarks"),
    (
        "evaluation.data.demonstration validation.data.demonstration",
        lambda c: True,
        "evaluations show no demonstrations",
    ),
    ("data.benchmark", lambda c: True, "it is for evaluation.data, whose benchmarks are reported separately"),
    ("train.lr_min_ratio", lambda c: c.train.lr_schedule == "constant", "train.lr_schedule is constant"),
    ("train.max_scratch_mb", lambda c: c.train.backend == "reference", "backend reference keeps the full logits"),
    ("train.backward_threshold", lambda c: c.train.backward == "exact", "train.backward is exact"),
    (
        "train.grad_clip",
        lambda c: "gradient_clipping" in c.train.deepspeed,
        "train.deepspeed.gradient_clipping takes its place",
    ),
    (
        "rollout.top_k rollout.routing_replay rollout.segment "
        "train.generated_tokens train.overlap algorithm.normalize_std algorithm.advantage algorithm.advantage_k "
        "algorithm.refill algorithm.shaping algorithm.reward_kl_coef "
        "algorithm.objective.internal algorithm.ratio_level algorithm.mismatch_level algorithm.top_entropy "
        "algorithm.objective.mismatch_cap algorithm.objective.mismatch_low algorithm.objective.mismatch_mode",
        lambda c: not c.algorithm.resolve().generates,
        "the preset generates nothing",
    ),
    (
        "algorithm.normalize_std algorithm.advantage algorithm.advantage_k",
        lambda c: c.algorithm.resolve().recipe.own_advantages,
        "the preset's recipe has advantages of its own",
    ),
    (
        "algorithm.objective.external algorithm.objective.external_coef algorithm.objective.gamma "
        "algorithm.external_schedule algorithm.external_top_entropy",
        lambda c: not c.algorithm.resolve().demonstrates,
        "the preset takes no demonstrations",
    ),
    (
        "algorithm.objective.external algorithm.objective.external_coef algorithm.objective.gamma "
        "algorithm.external_schedule algorithm.external_top_entropy algorithm.external_reduction",
        lambda c: not c.algorithm.resolve().recipe.trains_demonstrations,
        "what is demonstrated is context, the recipe does not train on it",
    ),
    (
        "algorithm.external_reduction",
        lambda c: not (c.algorithm.resolve().demonstrates and c.algorithm.resolve().generates),
        "it is the normaliser of demonstrations beside rollouts, and the preset has none or nothing else",
    ),
    (
        "algorithm.objective.external_coef algorithm.objective.gamma algorithm.external_schedule",
        lambda c: EXTERNAL[_objective(c).external].terms is None,
        "it weighs demonstrated tokens, and algorithm.objective.external is none",
    ),
    (
        "algorithm.normalize_std",
        lambda c: c.algorithm.resolve().advantage != "group",
        "it belongs to algorithm.advantage group",
    ),
    (
        "algorithm.advantage_k",
        lambda c: c.algorithm.resolve().advantage != "pass@k",
        "it belongs to algorithm.advantage pass@k",
    ),
    *_surrogates_rules(),
    (
        "algorithm.objective.kl_estimator",
        lambda c: not _objective(c).kl_coef,
        "algorithm.objective.kl_coef is 0",
    ),
    (
        "algorithm.objective.mismatch_low algorithm.objective.mismatch_mode algorithm.mismatch_level",
        lambda c: _objective(c).mismatch_cap is None,
        "there is no algorithm.objective.mismatch_cap",
    ),
    (
        " ".join(f"algorithm.objective.{field}" for surrogate in INTERNAL.values() for field in surrogate.reads)
        + " algorithm.ratio_level",
        _ratio_is_one,
        "with one update a step the ratio is 1: want train.prompts_per_update below prompts_per_step, train.overlap or "
        "rollout.segment",
    ),
)


def ignored_keys(config: Sections) -> Iterator[str]:
    """A line per key without effect, with the first reason."""
    said = set()
    for keys, without_effect, why in RULES:
        for key in keys.split():
            if key not in said and _changed(config, key) and without_effect(config):
                said.add(key)
                yield f"{key} would have no effect, leave it out: {why}"


def _changed(config: Sections, key: str) -> bool:
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part)
        if section is None:
            return False
    if isinstance(section, dict):  # the changes of a preset
        default = getattr(ALGORITHMS[config.algorithm.preset].objective, name)
        return bool(section.get(name, default) != default)
    default = type(section).model_fields[name].default
    if key in ("algorithm.refill", "algorithm.shaping"):
        default = getattr(ALGORITHMS[config.algorithm.preset], name)
    return bool(getattr(section, name) != default)
