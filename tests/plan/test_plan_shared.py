"""The plan of runs whose engine has the policy's own weights (`rollout.share_weights`)."""

import pytest
from plan_cases import CPU, QLORA, everything_known, make_plan, paper, thin_model
from trainer_runs import run_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus.common.agree import initialize_distributed
from rlplus.tools.plan import GIB, make_cluster
from rlplus.tools.plan.activations import Meter
from rlplus.train.data import byte_tokenizer
from rlplus.train.learner.policy import Policy
from rlplus.train.rollout import Request, Sampling
from rlplus.train.rollout.shared_engine import SharedEngine


@pytest.mark.parametrize(("prompt", "response"), [(40, 8), pytest.param(8, 100, marks=pytest.mark.slow)])
def test_generating_takes_what_is_planned(tmp_path, prompt, response):
    """A cache that is full of sequences of full length: where reading prompts takes most, and where the last token."""
    initialize_distributed()
    config = run_config(
        tmp_path,
        model={"scratch": None, "path": str(tmp_path / "model"), "lora": {"rank": 4}},
        data={"max_prompt_length": prompt},
        rollout={"max_response_length": response, "share_weights": True, "kv_cache_memory_mb": 2},
        algorithm={"preset": "grpo"},
        train={"tokens_per_micro_batch": 128},
    )
    model_config: Qwen2Config = thin_model(vocab_size=len(byte_tokenizer()))
    Qwen2ForCausalLM(model_config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    policy = Policy(config, str(tmp_path / "model"), model_config)
    limits = {"max_model_len": config.max_generation_length, "end_ids": [999], "pad_token_id": 0}
    engine = SharedEngine(config.rollout, policy.engine.module.lm, **limits)
    plan = make_plan(config, CPU)
    planned = plan.memory.parts["generate"]
    assert "engine weights" not in planned
    assert plan.sequences > config.rollout.group_size
    asked = [Request([1 + i] * prompt, 4, response) for i in range(-(-plan.sequences // 4) + 1)]
    with Meter(known=everything_known()) as meter:
        engine.generate(asked, Sampling(1.0, 0))
    assert meter.peak == pytest.approx(planned["kv cache"] + planned["engine rest"], rel=0.15)
    assert not {"kv cache", "engine rest"} & plan.memory.parts["backward"].keys()


def test_seven_billion_weights_train_on_one_gpu_of_24_gb():
    """With weights of 4 bits which the engine has no copy of; a whole copy beside them does not fit."""
    cluster = make_cluster(1, "rtx4090")
    quantized = ("model.lora={quantization: nf4}", *QLORA, "rollout.engine=transformers", "rollout.sleep=false")
    shared, copied = (
        make_plan(paper(*quantized, f"rollout.share_weights={share}", "rollout.kv_cache_memory_mb=4096"), cluster)
        for share in ("true", "false")
    )
    assert shared.fits
    assert not copied.fits
    parts = shared.memory.parts["generate"]
    assert parts["weights"] == copied.memory.parts["generate"]["weights"]
    assert parts["kv cache"] == 4 * GIB
    assert parts["dequantized weights"] == 2 * 3584 * 18944
    assert "engine weights" not in parts
    assert copied.memory.parts["generate"]["engine weights"] == 2 * shared.parameters
    longest = paper(*quantized).max_generation_length
    token = 2 * 28 * 4 * 128 * 2  # keys and values of 28 layers and 4 heads, in bf16
    assert shared.sequences == 4 * GIB // (token * longest + 16 * 152064)
    one = make_plan(paper(*quantized, "rollout.share_weights=true", "rollout.kv_cache_memory_mb=1"), cluster)
    assert one.sequences == 1, "a sequence is generated however small the cache"
    assert one.memory.cache == token * longest + 16 * 152064


def test_no_more_is_generated_at_a_time_than_a_rank_samples_in_a_step():
    """Two prompts of seven rollouts in a cache for hundreds; with evaluations, as many as it holds."""
    quantized = ("model.lora={quantization: nf4}", *QLORA, "rollout.engine=transformers", "rollout.sleep=false")
    quantized = (*quantized, "rollout.share_weights=true", "train.prompts_per_step=4", "train.prompts_per_update=4")

    def work(gpus: int, *options: str) -> int:
        plan = make_plan(paper(*quantized, *options, "rollout.max_response_length=128"), make_cluster(gpus, "80g"))
        assert plan.sequences > 100
        return plan.memory.parts["generate"]["engine rest"]

    small, large = "rollout.kv_cache_memory_mb=16384", "rollout.kv_cache_memory_mb=32768"
    assert work(2, large) == work(2, small) < work(1, small)
    read = 'validation={data: {path: v.jsonl, response_prefix: "<think>\\n"}, every: 10, samples: 1}'
    assert work(2, read, large) > 1.5 * work(2, read, small)


def test_a_smaller_cache_is_a_remedy_of_a_run_whose_cache_is_too_large():
    """A cache of 20 GB beside weights of 4 bits: half of it fits, and no other switch makes the whole fit."""
    quantized = ("model.lora={quantization: nf4}", *QLORA, "rollout.engine=transformers", "rollout.sleep=false")
    plan = make_plan(
        paper(*quantized, "rollout.share_weights=true", "rollout.kv_cache_memory_mb=20000"), make_cluster(1, "24g")
    )
    assert [remedy.overrides for remedy in plan.remedies] == [("rollout.kv_cache_memory_mb=10000",)]
