"""The plan of runs whose engine is beside the trainer, in a process, in a server, or nowhere."""

import json

import pytest
from plan_cases import PAPER, PROCESS, SERVER, make_plan, paper
from rich.console import Console

from rlplus.tools.cli import main
from rlplus.tools.plan import GPUS, make_cluster
from rlplus.tools.plan.plan_text import show
from rlplus.tools.plan.speed import GEMM_EFFICIENCY


def test_a_servers_gpus_are_not_counted(capsys):
    model = [str(PAPER), *SERVER]
    main(["plan", "--gpus", "8", "--gpu", "a100-80g", *model])
    out = capsys.readouterr().out
    assert "Not counted: the GPUs of the server" in out
    assert "Not in it: generation" in out
    assert "generate " not in out.partition("time of a step")[2]
    assert "engine" not in out


@pytest.mark.parametrize(("gpus", "parallel", "ranks"), [(8, 1, 4), (6, 2, 2)])
def test_an_engine_of_its_own_has_gpus_of_its_own(capsys, gpus, parallel, ranks):
    config = paper(*PROCESS, f"rollout.tensor_parallel_size={parallel}")
    plan = make_plan(config, make_cluster(gpus, "h200"))
    assert plan.ranks == ranks
    alone = make_plan(paper(*SERVER), make_cluster(ranks, "h200"))
    assert plan.memory.parts == alone.memory.parts  # a GPU that trains knows of no engine
    assert not any("engine" in part or "cache" in part for moment in plan.memory.parts.values() for part in moment)
    engine = plan.memory.engine
    assert engine["engine weights"] == 2 * plan.parameters // parallel
    share = sum(size for part, size in engine.items() if part != "reserve")
    assert share == pytest.approx(config.rollout.gpu_memory_utilization * 140 * 2**30, abs=2)
    token = 2 * 28 * 4 * 128 * 2 // parallel  # keys and values of 28 layers and 4 heads, in bf16
    assert plan.sequences == engine["kv cache"] // (token * config.max_generation_length)
    assert plan.memory.host == 2 * plan.parameters  # the last push
    adapters = make_plan(paper(*PROCESS, "model.lora={}", "rollout.lora=adapters"), make_cluster(8, "h200"))
    merged = make_plan(paper(*PROCESS, "model.lora={}"), make_cluster(8, "h200"))
    assert merged.memory.host == 2 * plan.parameters
    assert 0 < adapters.memory.host < merged.memory.host / 50
    share = adapters.memory.host / merged.memory.host
    assert adapters.seconds["sync"] == pytest.approx(share * merged.seconds["sync"])
    assert plan.to_json()["engine_memory"] == engine
    show(plan, Console(width=200))
    assert f"{gpus} x h200 ({ranks} train, {gpus - ranks} generate), " in capsys.readouterr().out


def test_generation_on_gpus_of_its_own_takes_the_time_that_it_takes_beside_the_training():
    """Equally many engines with the same cache have the same waves. With overlap, generation runs beside the rest."""
    cache = "rollout.kv_cache_memory_mb=20000"
    beside = make_plan(paper("rollout.sleep=false", cache), make_cluster(4, "h200")).seconds
    apart = make_plan(paper(*PROCESS, cache), make_cluster(8, "h200")).seconds
    assert apart["generate"] == beside["generate"]
    assert apart["sync"] > beside["sync"]
    overlap = make_plan(paper(*PROCESS, cache, "train.overlap=true"), make_cluster(8, "h200")).seconds
    rest = sum(overlap.values()) - overlap["total"] - overlap["generate"] - overlap["sync"]
    assert overlap["total"] == pytest.approx(apart["sync"] + max(rest, apart["generate"]))
    assert overlap["old_logprob"] == pytest.approx(apart["old_logprob"] / 4, rel=0.01)  # one of a group of 8; half
    later = make_plan(paper(*PROCESS, cache, "train.overlap=4"), make_cluster(8, "h200")).seconds
    assert later["sync"] == pytest.approx(overlap["sync"] / 4)  # weights are pushed in every fourth step


def test_half_a_response_a_step_decodes_twice_as_many_side_by_side_for_half_as_long():
    """The second half reads prompt and first half again. Its old logprobs are the engine's."""
    few = ("algorithm.preset=grpo", "train.prompts_per_step=16", "train.prompts_per_update=8")
    whole, wide, halves = (
        make_plan(paper(*few, *more), make_cluster(8, "h200"))
        for more in ((), ("rollout.group_size=16",), ("rollout.segment=4096",))
    )
    flops = GPUS["h200"].flops
    assert flops is not None

    def read(tokens: int) -> float:
        return 2 * whole.parameters * tokens / 8 / (flops * GEMM_EFFICIENCY)

    prompts = 16 * 1024
    twice = wide.seconds["generate"] - read(prompts)
    assert halves.seconds["generate"] - read(prompts + 16 * 8 * (1024 + 4096)) == pytest.approx(twice / 2)
    assert halves.seconds["generate"] < whole.seconds["generate"]
    assert halves.seconds["old_logprob"] == 0 < whole.seconds["old_logprob"]
    shown, all_tokens = (
        make_plan(paper(*more, "rollout.segment=4096"), make_cluster(8, "h200")).seconds["old_logprob"]
        for more in ((), ("algorithm.objective.kl_coef=0.1", "algorithm.preset=grpo"))
    )
    assert shown == pytest.approx(all_tokens), "one pass over everything"


def test_a_pass_for_sequence_ratios_is_counted_where_one_is_made():
    """One before each update but the first; with tokens of high entropy, or their weights, before every one."""
    run = ("algorithm.preset=grpo", "train.prompts_per_update=32")
    seconds = [
        make_plan(paper(*run, *more), make_cluster(8, "h200")).seconds
        for more in ((), ("algorithm.ratio_level=sequence",), ("algorithm.top_entropy=0.2",))
    ]
    assert "statistics" not in seconds[0]
    assert seconds[1]["statistics"] == pytest.approx(seconds[0]["old_logprob"])
    assert seconds[2]["statistics"] == pytest.approx(seconds[0]["old_logprob"] / (1 - 32 / 128))
    assert seconds[2]["total"] > seconds[1]["total"] > seconds[0]["total"]
    plain, weighed = (
        make_plan(paper(f"algorithm.preset={preset}", run[1]), make_cluster(8, "h200")) for preset in ("luffy", "srft")
    )
    assert weighed.seconds["statistics"] == pytest.approx(plain.seconds["old_logprob"] / (1 - 32 / 128))
    assert weighed.memory.parts == plain.memory.parts


def test_the_cache_of_transformers_ends_with_the_responses():
    plan = make_plan(paper("rollout.engine=transformers", "rollout.sleep=false"), make_cluster(8, "h200"))
    with_cache = {moment for moment, parts in plan.memory.parts.items() if "kv cache" in parts}
    assert with_cache == {"generate"}
    assert all(parts["engine weights"] == 2 * plan.parameters for parts in plan.memory.parts.values())


def test_transformers_generates_as_slowly_as_the_host_launches_its_kernels():
    """A run with the sizes of Qwen2.5-0.5B on an H200: 16 prompts of 7, 256 tokens, in 7.4 s (bench/results/h200)."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"layer_types": None}
    small = "model.overrides=" + json.dumps(sizes | {"num_key_value_heads": 2, "tie_word_embeddings": True})
    lengths = ["data.max_prompt_length=32", "rollout.max_response_length=256", "data.max_demonstration_length=3564"]
    prompts = ["train.prompts_per_step=16", "train.prompts_per_update=16", "rollout.kv_cache_memory_mb=8000"]
    plans = {
        engine: make_plan(
            paper(*lengths, *prompts, small, f"rollout.engine={engine}", "rollout.sleep=false"), make_cluster(1, "h200")
        )
        for engine in ("transformers", "vllm")
    }
    assert plans["transformers"].seconds["generate"] == pytest.approx(7.4, rel=0.1)
    assert plans["vllm"].seconds["generate"] < 1


@pytest.mark.parametrize("sleep", [False, True])
def test_ranks_that_share_an_engine_share_its_weights(sleep):
    """With 7.6 billion bf16 weights and a fixed share of the GPU, the cache gets what the weights leave."""
    plans = [
        make_plan(paper(f"rollout.sleep={sleep}", f"rollout.tensor_parallel_size={size}"), make_cluster(8, "h200"))
        for size in (1, 2)
    ]
    one, two = (plan.memory.parts["generate"] for plan in plans)
    assert two["engine weights"] == one["engine weights"] // 2 == plans[0].parameters
    assert two["kv cache"] - one["kv cache"] == one["engine weights"] - two["engine weights"]
    assert plans[0].memory.peak == plans[1].memory.peak
    for plan in plans:
        resting = {part for part in plan.memory.parts["backward"] if "engine" in part or "cache" in part}
        assert resting == ({"engine rest"} if sleep else {"engine rest", "engine weights", "kv cache"})
    assert plans[1].sequences > 2 * plans[0].sequences  # each holds half of a token's keys and values, and more room
    assert plans[1].seconds["generate"] < plans[0].seconds["generate"]


def test_an_engine_that_does_not_fit_its_own_gpu():
    plan = make_plan(paper(*PROCESS, "rollout.gpu_memory_utilization=0.2"), make_cluster(16, "a100-80g"))
    assert plan.memory.problems == (
        "engine: 0.0 GiB are left for keys and values; a sequence of 10240 tokens takes 0.5 GiB",
    )
    assert [name.partition("=")[0] for name in plan.remedies[0].overrides] == ["rollout.gpu_memory_utilization"]
    assert {remedy.gpus for remedy in plan.remedies} == {16}
    greedy = make_plan(paper(*PROCESS, "rollout.gpu_memory_utilization=1.0"), make_cluster(16, "a100-80g"))
    assert greedy.memory.problems == ("engine: needs 83.0 GiB of 80.0 GiB",)


@pytest.mark.parametrize("engine", [(), PROCESS, SERVER])
def test_a_run_that_samples_nothing_has_no_engine(engine):
    """SFT: neither on its GPUs nor on others, nor in the host's memory; but for evaluations while it trains."""
    quiet = ("algorithm.preset=sft", "evaluation.every=0", *engine)
    plan = make_plan(paper(*quiet), make_cluster(8, "a100-80g"))
    alone = make_plan(paper(*SERVER), make_cluster(8, "a100-80g"))
    assert plan.ranks == 8
    assert plan.memory.parts == alone.memory.parts, "as where a server has the engine"
    assert (plan.memory.engine, plan.memory.host, plan.sequences) == ({}, 0, 0)
    assert not {"generate", "sync"} & plan.seconds.keys()
    evaluated = make_plan(paper(*quiet, "evaluation.every=5"), make_cluster(8, "a100-80g"))
    assert evaluated.ranks == (4 if engine == PROCESS else 8)
    assert (evaluated.sequences > 0) == (engine != SERVER)
