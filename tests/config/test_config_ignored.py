"""Keys that would have no effect in a run."""

from pathlib import Path

import pytest
from run_files import problems, write_minimal

from rlplus.train.config import load_config
from rlplus.train.config.ignored import RULES

EVALUATED = ["evaluation.data.path=test.jsonl"]
VALIDATED = ["validation.every=5", "validation.data.path=validation.jsonl"]
CONTEXT = ["algorithm.preset=prefix-rft", "algorithm.recipe={name: prefix, trained: false}"]
CLIPPED = ["algorithm.preset=grpo", "train.prompts_per_update=64"]
SERVER = ["rollout.mode=server", "rollout.server_url=http://localhost:1"]
PROCESS = ["rollout.mode=process"]
TAUGHT = ["data.demonstration=d", "algorithm.preset=sft", "algorithm.recipe={name: distill}"]


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write_minimal(tmp_path)


IGNORED: list[tuple[str, list[str], list[str] | None]] = [
    ("rollout.gpu_memory_utilization=0.9", ["rollout.engine=transformers"], []),
    ("rollout.vllm={quantization: fp8}", ["rollout.engine=transformers"], PROCESS),
    ("rollout.vllm={quantization: fp8}", [*SERVER, *EVALUATED], ["rollout.engine=vllm"]),
    ("rollout.gpu_memory_utilization=0.9", SERVER, [*SERVER, *EVALUATED]),
    ("rollout.enforce_eager=true", SERVER, ["rollout.engine=transformers"]),
    ("rollout.kv_cache_memory_mb=64", SERVER, ["rollout.engine=transformers"]),
    ("rollout.push_timeout_s=9", ["rollout.engine=transformers", "rollout.share_weights=true"], []),
    ("log.sample_groups=5", ["log.samples_every=0"], []),
    ("rollout.transfer=nccl", PROCESS, SERVER),
    ("data.teacher_topk=x", ["data.demonstration=d"], TAUGHT),
    ("evaluation.samples=4", [], EVALUATED),
    ("evaluation.k=[1, 2]", [], EVALUATED),
    ("evaluation.temperature=0.5", [], EVALUATED),
    ("evaluation.math_grader=oat", EVALUATED, ["evaluation.benchmarks=[amc]"]),
    ("evaluation.data.demonstration=x", EVALUATED, None),
    ("validation.data.demonstration=x", VALIDATED, None),
    ("validation.data={path: validation.jsonl}", [], ["validation.every=5"]),
    ("validation.benchmarks=[amc]", [], ["validation.every=5"]),
    ("validation.math_grader=oat", VALIDATED, ["validation.every=5", "validation.benchmarks=[amc]"]),
    ("validation.samples=2", [], VALIDATED),
    ("validation.k=[1, 2]", [], VALIDATED),
    ("validation.temperature=0.5", [], VALIDATED),
    ("validation.patience=3", [], VALIDATED),
    ("validation.allow_test_benchmarks=true", [], VALIDATED),
    ("data.benchmark=x", [], None),
    ("train.lr_min_ratio=0.1", [], ["train.lr_schedule=cosine"]),
    ("train.max_scratch_mb=9", ["train.backend=reference"], []),
    ("train.backward_threshold=0.1", [], ["train.backward=sampled"]),
    ("train.grad_clip=2", ["train.deepspeed.gradient_clipping=3"], []),
    ("train.generated_tokens=9", ["algorithm.preset=sft"], []),
    ("train.overlap=true", [*PROCESS, "algorithm.preset=sft"], PROCESS),
    ("algorithm.normalize_std=false", ["algorithm.preset=sft"], []),
    ("algorithm.normalize_std=false", ["algorithm.advantage=mean"], []),
    ("algorithm.advantage=mean", ["algorithm.preset=sft"], []),
    ("algorithm.advantage_k=2", [], ["algorithm.advantage=pass@k"]),
    ("algorithm.refill={low: 0.2}", ["algorithm.preset=sft"], []),
    ("algorithm.shaping={wrong: -1}", ["algorithm.preset=sft"], []),
    ("algorithm.reward_kl_coef=0.1", ["algorithm.preset=sft"], ["algorithm.preset=grpo"]),
    ("algorithm.normalize_std=false", ["algorithm.preset=ppo"], ["algorithm.preset=grpo"]),
    ("algorithm.objective.internal=clip", ["algorithm.preset=sft"], []),
    ("rollout.top_k=20", ["algorithm.preset=sft"], []),
    ("rollout.routing_replay=true", ["algorithm.preset=sft"], []),
    ("rollout.segment=20", ["algorithm.preset=sft"], []),
    ("algorithm.objective.mismatch_cap=2", ["algorithm.preset=sft"], []),
    ("algorithm.objective.external=shaped", ["algorithm.preset=grpo"], []),
    ("algorithm.objective.gamma=1", ["algorithm.preset=grpo"], ["algorithm.preset=luffy"]),
    ("algorithm.objective.gamma=1", ["algorithm.objective.external=none"], []),
    ("algorithm.external_reduction=sequence", ["algorithm.preset=grpo"], ["algorithm.preset=grpo-sft"]),
    ("algorithm.external_reduction=sequence", ["algorithm.preset=sft"], []),
    ("algorithm.objective.external_coef=2", ["algorithm.preset=grpo"], []),
    ("algorithm.objective.external_coef=2", ["algorithm.objective.external=none"], []),
    ("algorithm.external_schedule={shape: gradient-norm}", ["algorithm.preset=grpo"], []),
    ("algorithm.external_top_entropy=0.2", ["algorithm.preset=grpo"], []),
    ("algorithm.external_top_entropy=0.2", CONTEXT, ["algorithm.preset=prefix-rft"]),
    ("algorithm.objective.external_coef=2", CONTEXT, ["algorithm.preset=prefix-rft"]),
    ("algorithm.external_schedule={shape: gradient-norm}", ["algorithm.objective.external=none"], []),
    ("algorithm.objective.kl_estimator=k2", [], ["algorithm.objective.kl_coef=0.1"]),
    ("algorithm.objective.mismatch_low=0.5", [], ["algorithm.objective.mismatch_cap=5"]),
    ("algorithm.objective.mismatch_mode=mask", [], ["algorithm.objective.mismatch_cap=5"]),
    ("algorithm.objective.ratio_cap=9", CLIPPED, [*CLIPPED, "algorithm.preset=dppo"]),
    ("algorithm.objective.tau_pos=2", CLIPPED, [*CLIPPED, "algorithm.preset=sapo"]),
    ("algorithm.objective.tau_neg=2", ["algorithm.preset=sapo"], [*CLIPPED, "algorithm.preset=sapo"]),
    ("algorithm.objective.clip_low=0.1", [*CLIPPED, "algorithm.preset=cispo"], [*CLIPPED, "algorithm.preset=dppo"]),
    ("algorithm.objective.clip_high=3", [*CLIPPED, "algorithm.preset=sapo"], [*CLIPPED, "algorithm.preset=cispo"]),
    ("algorithm.ratio_level=sequence", ["algorithm.preset=grpo"], CLIPPED),
    ("algorithm.mismatch_level=sequence", [], ["algorithm.objective.mismatch_cap=5"]),
    ("algorithm.top_entropy=0.2", ["algorithm.preset=sft"], []),
    ("algorithm.objective.kappa=1", [], ["algorithm.preset=luffy"]),
    ("algorithm.objective.mixture_share=0.125", ["algorithm.preset=luffy"], []),
    ("algorithm.objective.clip_low=0.1", [], CLIPPED),
    ("algorithm.objective.clip_high=0.1", ["algorithm.preset=grpo"], CLIPPED),
    (
        "algorithm.objective.clip_high=0.1",
        ["algorithm.preset=grpo"],
        ["algorithm.preset=grpo", *PROCESS, "train.overlap=true"],
    ),
    ("algorithm.objective.clip_high=0.1", ["algorithm.preset=grpo"], ["algorithm.preset=grpo", "rollout.segment=32"]),
    ("algorithm.objective.dual_clip=3", ["algorithm.preset=grpo", "train.prompts_per_update=128"], CLIPPED),
]  # an override, a run where it has no effect, one where it has (None: there is none)


@pytest.mark.parametrize(("override", "without", "with_effect"), IGNORED)
def test_a_key_without_effect_is_refused(
    minimal: Path, tmp_path: Path, override: str, without: list[str], with_effect: list[str] | None
) -> None:
    key = override.partition("=")[0]
    (line,) = problems(minimal, *without, override)
    assert line.startswith(f"{key} would have no effect, leave it out: ")
    load_config(minimal, without)
    if with_effect is not None:
        config = load_config(minimal, [*with_effect, override])
        copy = tmp_path / "copy.yaml"  # like a run's: every value, defaults included
        copy.write_text(config.to_yaml())
        assert load_config(copy) == config


def test_every_rule_is_tried() -> None:
    assert {case[0].partition("=")[0] for case in IGNORED} == {key for keys, *_ in RULES for key in keys.split()}


def test_a_default_without_effect_is_no_error(minimal: Path) -> None:
    """Otherwise a written configuration would not load again, and presets could not be swapped."""
    config = load_config(minimal, ["rollout.gpu_memory_utilization=0.5", "rollout.engine=transformers"])
    assert "gpu_memory_utilization: 0.5" in config.to_yaml()
    load_config(minimal, ["algorithm.preset=grpo", "algorithm.objective.gamma=0"])
    changed = config.rollout.model_copy(update={"gpu_memory_utilization": 0.9})
    assert changed.gpu_memory_utilization == 0.9
