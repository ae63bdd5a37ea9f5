"""The plan of a run that trains a second model alongside the policy."""

import pytest
import torch
from plan_cases import CPU, QWEN_7B, alive_beyond, everything_known, make_plan, paper, real_storages, thin_model
from trainer_runs import run_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlplus.common.agree import initialize_distributed
from rlplus.common.teacher_states import StatesWriter
from rlplus.tools.plan import GPUS, MOMENTS, Cluster, make_cluster
from rlplus.tools.plan.activations import Meter
from rlplus.tools.plan.memory import estimate_memory, model_states
from rlplus.tools.plan.planned_model import Model
from rlplus.train.data import Sample, byte_tokenizer
from rlplus.train.learner import ValueModel, mean_batches


def test_the_critic_of_ppo_is_counted():
    """The policy's body and one more row: all states a second time, activations of the one that takes the most."""
    ppo = make_plan(paper("algorithm.preset=ppo"), make_cluster(8, "h200"))
    grpo = make_plan(paper("algorithm.preset=grpo"), make_cluster(8, "h200"))
    assert ppo.parameters == grpo.parameters
    body = grpo.parameters - QWEN_7B["vocab_size"] * QWEN_7B["hidden_size"]
    critic = body + QWEN_7B["hidden_size"]
    for part, size in (("weights", 2), ("optimizer states", 12 / 8)):
        added = ppo.memory.parts["generate"][part] - grpo.memory.parts["generate"][part]
        assert added == pytest.approx(size * critic, rel=1e-9)
    for moment in MOMENTS[1:]:
        rest = [
            {
                name: size
                for name, size in plan.memory.parts[moment].items()
                if name not in ("weights", "optimizer states")
            }
            for plan in (ppo, grpo)
        ]
        assert rest[0] == rest[1], "the policy, which has the larger head, is the fullest moment"
    assert ppo.seconds["total"] > grpo.seconds["total"]
    share = ppo.seconds["learners"] / ppo.seconds["forward and backward"]
    assert 0.8 < share < 1.8  # one pass more than the policy's, without its head
    assert "learners" not in grpo.seconds


def test_the_reward_model_of_prime_is_counted_with_its_reference():
    """The policy's states a second time, and its weights a third time."""
    prime = make_plan(paper("algorithm.preset=prime"), make_cluster(8, "h200"))
    grpo = make_plan(paper("algorithm.preset=grpo"), make_cluster(8, "h200"))
    parts, alone = prime.memory.parts["generate"], grpo.memory.parts["generate"]
    assert parts["references"] == alone["weights"]
    assert parts["weights"] == 2 * alone["weights"]
    assert parts["optimizer states"] == 2 * alone["optimizer states"]
    assert "references" not in alone
    both = make_plan(paper("algorithm.preset=prime", "algorithm.objective.kl_coef=0.1"), make_cluster(8, "h200"))
    assert both.memory.parts["generate"]["references"] == 2 * alone["weights"]
    assert 1 < prime.seconds["learners"] / prime.seconds["forward and backward"] < 3


def test_the_average_of_the_policy_is_a_reference_and_fp32_in_shards():
    data = "data.demonstration=solution"
    made = {
        (teacher, stage): make_plan(
            paper("algorithm.preset=grpo", data, f"train.zero_stage={stage}", "algorithm.recipe.name=self-distill",
                  f"algorithm.recipe.teacher={teacher}", "rollout.max_response_length=2048"),
            make_cluster(8, "h200"),
        )
        for teacher in ("initial", "average") for stage in (2, 3)
    }  # fmt: skip
    for stage in (2, 3):
        initial, average = (made[teacher, stage].memory.parts["generate"] for teacher in ("initial", "average"))
        assert average["moving average"] == pytest.approx(made["average", stage].parameters * 4 / 8)
        assert {k: v for k, v in average.items() if k != "moving average"} == initial
    sent = {k: plan.seconds["communication"] for k, plan in made.items()}
    once = sent["average", 2] - sent["initial", 2]
    assert once > 0
    assert sent["average", 3] - sent["initial", 3] == pytest.approx(2 * once)


def test_a_kl_penalty_in_the_reward_takes_a_reference_and_two_forward_passes():
    ppo, penalized = (
        make_plan(paper("algorithm.preset=ppo", f"algorithm.reward_kl_coef={coef}"), make_cluster(8, "h200"))
        for coef in (0, 0.1)
    )
    parts = penalized.memory.parts["generate"]
    assert parts["references"] == pytest.approx(ppo.parameters * 2)  # bf16
    assert "references" not in ppo.memory.parts["generate"]
    # The paper's setting has two updates per step: half a pass for the old policy of the second one.
    assert penalized.seconds["old_logprob"] == pytest.approx(5 * ppo.seconds["old_logprob"])


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_an_update_of_a_critic_takes_what_is_planned(tmp_path, stage, dtype):
    """Within 10%, as for a policy in test_plan_memory.py."""
    initialize_distributed()
    config = run_config(
        tmp_path,
        model={"scratch": None, "path": str(tmp_path / "model"), "dtype": dtype},
        algorithm={"preset": "ppo"},
        train={"zero_stage": stage, "tokens_per_micro_batch": 48},
        rollout={"max_response_length": 40},
    )
    model_config = thin_model(vocab_size=len(byte_tokenizer()))
    Qwen2ForCausalLM(model_config).save_pretrained(tmp_path / "model")
    before = real_storages()
    critic = ValueModel(config, str(tmp_path / "model"), model_config)
    samples = [Sample([1, 2], [3] * 46, 0, False, False, None, value=[0.0] * 46, returns=[1.0] * 46) for _ in range(2)]

    def update() -> None:
        batches = mean_batches(samples, config, 0, critic.device)
        assert len(batches) == 2
        critic.accumulate(batches, 0.2)
        assert critic.step()

    update()  # the first one makes the optimizer's moments
    between = alive_beyond(before)
    with Meter(known=everything_known()) as passes:
        critic.accumulate(mean_batches(samples, config, 0, critic.device), 0.2)
    waiting = alive_beyond(before)
    with Meter(known=everything_known()) as optimizer:
        critic.step()
    planned = Model(config, model_config, "value")
    states, memory = model_states(config, planned, CPU), estimate_memory(config, planned, CPU)
    engine = memory.parts["optimizer"]["engine weights"]
    stay = states.gradients if states.gradients_stay else 0
    assert between == pytest.approx(states.weights + states.optimizer + stay, rel=0.1)
    assert between + passes.peak == pytest.approx(max(map(memory.total, ("head", "backward"))) - engine, rel=0.1)
    assert waiting + optimizer.peak == pytest.approx(memory.total("optimizer") - engine, rel=0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_states_of_all_learners_are_counted_and_one_of_them_trains(stage):
    """A second one of half the width: its states are added, and it trains when the larger one does not."""
    config, cluster = paper(f"train.zero_stage={stage}"), Cluster(8, GPUS["a100-80g"])
    policy, critic = (Model(config, Qwen2Config(**(QWEN_7B | {"hidden_size": width}))) for width in (3584, 1792))
    alone = {model: estimate_memory(config, model, cluster) for model in (policy, critic)}
    states = {model: model_states(config, model, cluster) for model in (policy, critic)}
    policy.learners = (policy, critic)
    both = estimate_memory(config, policy, cluster)
    added = states[critic].weights + states[critic].optimizer
    added += states[critic].gradients if states[critic].gradients_stay else 0
    for moment in MOMENTS:
        assert alone[critic].total(moment) < alone[policy].total(moment) or moment == "generate"
        assert both.total(moment) == alone[policy].total(moment) + added
    assert both.host == alone[policy].host + states[critic].host


def test_the_teacher_of_demonstrations_takes_time():
    """As much as on as many responses of that length, of which a group has eight; by the column none."""
    cluster, length = make_cluster(8, "h200"), "data.max_demonstration_length=8192"
    of = "algorithm.recipe={name: distill, %s, loss: reverse_kl}"
    beside = of % "teacher: Qwen/Qwen2.5-Math-1.5B"
    on_responses = make_plan(paper("algorithm.preset=grpo", "rollout.max_response_length=8192", beside), cluster)
    shown = make_plan(paper("algorithm.preset=sft", "data.demonstration=solution", length, beside), cluster)
    assert shown.seconds["teacher"] == pytest.approx(on_responses.seconds["teacher"] / 8)
    column = ("data.demonstration=solution", length, "data.teacher_topk=taught", of % "teacher_topk: 8")
    told = make_plan(paper("algorithm.preset=sft", *column), cluster)
    assert "teacher" not in told.seconds
    assert "teacher" not in told.memory.parts["head"]


def test_of_a_stored_teacher_the_head_is_counted(tmp_path):
    """On every GPU in all moments, and the states of a micro-batch; it takes no time."""
    facts = {"fingerprint": "", "vocabulary": "", "dtype": "bfloat16", "hidden": 5120}
    StatesWriter(tmp_path / "states", facts, {"weight": torch.zeros(50, 5120).bfloat16()}).close()
    cluster, length = make_cluster(8, "h200"), "data.max_demonstration_length=8192"
    of = "algorithm.recipe={name: distill, %s, loss: reverse_kl}"
    given = ("algorithm.preset=sft", "data.demonstration=solution", length)
    told = make_plan(paper(*given, of % f"teacher_states: {tmp_path / 'states'}"), cluster)
    beside = make_plan(paper(*given, of % "teacher: Qwen/Qwen2.5-Math-1.5B"), cluster)
    assert "teacher" not in told.seconds
    assert all("teacher" not in parts for parts in told.memory.parts.values())
    heads = {parts["teacher's head"] for parts in told.memory.parts.values()}
    assert heads == {(tmp_path / "states/head.safetensors").stat().st_size}
    tokens = told.micro_batch[0] * told.micro_batch[1]
    assert told.memory.parts["head"]["head"] - beside.memory.parts["head"]["head"] == 2 * tokens * (5120 - 1536)


def test_a_teacher_is_counted():
    """Its weights on every GPU in all moments, its hidden states and the logits of both heads in one, its passes."""
    cluster, grpo = make_cluster(8, "h200"), "algorithm.preset=grpo"
    recipe = "algorithm.recipe={name: distill, teacher: Qwen/Qwen2.5-Math-1.5B, loss: %s}"
    alone = make_plan(paper(grpo), cluster)
    whole, sampled = (make_plan(paper(grpo, recipe % loss), cluster) for loss in ("reverse_kl", "sampled"))
    for plan in (whole, sampled):
        assert {plan.memory.parts[moment]["teacher"] for moment in MOMENTS} == {2 * 1_543_714_304}  # Qwen2.5-1.5B, tied
        assert "the architecture that comes with rlplus" in plan.note
    rest = sampled.memory.parts["head"].copy()
    del rest["teacher"]
    assert rest == alone.memory.parts["head"]
    tokens = whole.micro_batch[0] * whole.micro_batch[1]
    added = whole.memory.parts["head"]["head"] - alone.memory.parts["head"]["head"]
    hidden, vocabulary = QWEN_7B["hidden_size"], QWEN_7B["vocab_size"]
    in_bf16 = 2 * vocabulary * hidden  # the weight's gradient, after its sum over tokens in fp32
    assert added == pytest.approx(2 * tokens * 1536 + in_bf16, rel=0.05)
    forward = whole.seconds["forward and backward"] / 4  # layers are computed twice, and their gradients cost two
    assert sampled.seconds["teacher"] == whole.seconds["teacher"] == pytest.approx(forward * 1.54 / 7.6, rel=0.2)
    asked = sampled.seconds["old_logprob"] - whole.seconds["old_logprob"]  # the policy, for the advantages
    assert asked == pytest.approx(forward, rel=0.1)
    assert whole.seconds["forward and backward"] > sampled.seconds["forward and backward"]


def test_a_teacher_on_a_server_takes_only_what_it_tells():
    cluster, grpo = make_cluster(8, "h200"), "algorithm.preset=grpo"
    recipe = "algorithm.recipe={name: distill, teacher_url: 'http://x', teacher_topk: %d, loss: reverse_kl}"
    few, many = (make_plan(paper(grpo, recipe % k), cluster) for k in (20, 1024))
    assert not {"teacher"} & {*many.memory.parts["head"], *many.seconds}
    tokens = many.micro_batch[0] * many.micro_batch[1]
    head = [plan.memory.parts["head"]["head"] for plan in (few, many)]
    assert head[1] - head[0] == 16 * tokens * 1004
    whole = make_plan(paper(grpo, "algorithm.recipe={name: distill, teacher: Qwen/Qwen2.5-Math-1.5B}"), cluster)
    assert whole.memory.parts["head"]["head"] - head[0] == tokens * (2 * 1536 - 16 * 20)
    here, there = (
        make_plan(paper(grpo, f"algorithm.recipe={{name: distill, loss: sampled, {teacher}}}"), cluster)
        for teacher in ("teacher: Qwen/Qwen2.5-Math-1.5B", "teacher_url: 'http://x'")
    )
    assert there.seconds["old_logprob"] == here.seconds["old_logprob"], "the policy is asked, wherever the teacher is"
    assert "the teacher's server" in there.note
