"""The plan against measurement: the tensors of an update, what autograd saves, what the head allocates."""

from functools import partial

import pytest
import quick
import torch
from engine_runs import changed
from plan_cases import (
    CPU,
    QLORA,
    QWEN_7B,
    alive_beyond,
    everything_known,
    make_plan,
    paper,
    real_storages,
    thin_model,
)
from torch import nn
from trainer_runs import run_config
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from rlplus.common.agree import initialize_distributed
from rlplus.loss import Objective, PolicyLoss, linear_policy_loss
from rlplus.loss.backends import native
from rlplus.tools.plan import GIB, make_cluster
from rlplus.tools.plan.activations import Meter, count_activations, meta_model
from rlplus.tools.plan.memory import head_memory, model_states
from rlplus.tools.plan.planned_model import Model
from rlplus.train.data import Sample, byte_tokenizer, pack
from rlplus.train.learner import make_micro_batches
from rlplus.train.learner.adapters import quantize
from rlplus.train.learner.packed_model import LONG_ROW, PackedModel
from rlplus.train.learner.policy import Policy


def samples_of(n: int, length: int) -> list[Sample]:
    return [
        Sample([1, 2], list(range(3, length + 1)), 0, i == 0, False, None, advantage=1.0 - 2 * (i % 2))
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("stage", "dtype", "shard_head"),
    quick.first(
        3,
        [
            *((2, "float32", False), (3, "bfloat16", False), (3, "bfloat16", True)),
            *((1, "float32", False), (1, "bfloat16", False), (2, "bfloat16", False)),
            *((3, "float32", False), (3, "float32", True)),
        ],
    ),
)
def test_an_update_takes_what_is_planned(tmp_path, stage, dtype, shard_head):
    """One rank, two micro-batches: tensors alive between updates, and the most at any moment of one, within 10%."""
    initialize_distributed()
    config = run_config(
        tmp_path,
        model={"scratch": None, "path": str(tmp_path / "model"), "dtype": dtype},
        train={"zero_stage": stage, "tokens_per_micro_batch": 48, "backend": "torch", "shard_head": shard_head},
        rollout={"max_response_length": 40},
    )
    model_config = thin_model(vocab_size=len(byte_tokenizer()), tie_word_embeddings=stage == 2)
    Qwen2ForCausalLM(model_config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    before = real_storages()
    policy = Policy(config, str(tmp_path / "model"), model_config)
    algorithm = config.algorithm.resolve()

    def update() -> None:
        batches = make_micro_batches(samples_of(2, 48), algorithm, config, 0, policy.device)
        assert len(batches) == 2
        policy.backward(batches, policy.loss_of(algorithm.objective))
        assert policy.step()

    update()  # the first one makes the optimizer's moments
    between = alive_beyond(before)
    with Meter(known=everything_known()) as passes:
        batches = make_micro_batches(samples_of(2, 48), algorithm, config, 0, policy.device)
        policy.backward(batches, policy.loss_of(algorithm.objective))
    del batches
    waiting = alive_beyond(before)
    with Meter(known=everything_known()) as optimizer:
        policy.step()
    states = model_states(config, Model(config, model_config), CPU)
    stay = states.gradients if states.gradients_stay else 0
    assert between == pytest.approx(states.weights + states.optimizer + stay, rel=0.1)
    memory = make_plan(config, CPU).memory
    engine = memory.parts["optimizer"]["engine weights"]
    assert between + passes.peak == pytest.approx(max(map(memory.total, ("head", "backward"))) - engine, rel=0.1)
    assert waiting + optimizer.peak == pytest.approx(memory.total("optimizer") - engine, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("length", "shares"), [(192, (1, 1, 1)), (1152, (1, 1, 1)), (1152, (32, 20, 13, 8, 8, 6, 3, 3, 2, 1))]
)
def test_activations_are_those_that_autograd_saves(length, shares, checkpointing):
    """Through real attention on packed rows: bytes given to saved_tensors_hooks, and the most alive in the backward."""
    config = thin_model()
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = PackedModel(lm, None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    lengths = 2 * [length * share // sum(shares) for share in shares]
    samples = [Sample([1], [2] * (n - 1), 0, False, False, None, advantage=1.0) for n in lengths]
    weights = [torch.ones(len(s.response)) for s in samples]
    (batch,) = pack(samples, weights, row_length=length, tokens_per_micro_batch=2 * length, pad_id=0)
    parameters = {p.data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(batch, lambda hidden, *_, **__: hidden)
    at_head = sum(saved.values()) + 2 * hidden.untyped_storage().nbytes()  # the last norm's output and its rows
    if checkpointing and length < LONG_ROW:
        at_head += 2 * length * length  # arguments of a checkpoint, the mask, are not given to the hooks
    del hidden
    saved.clear()
    op = partial(
        linear_policy_loss, target=batch.target, old_logprob=None, advantage=batch.advantage, external=batch.external,
        token_weight=batch.token_weight, objective=Objective.preset("grpo"), backend="torch", max_scratch_mb=1,
    )  # fmt: skip
    with Meter(known=everything_known()) as meter:
        model(batch, lambda *args, **kwargs: op(*args, **kwargs).loss).backward()
    planned = count_activations(
        meta_model(config, "float32"), rows=2, length=length, attention="sdpa", checkpointing=checkpointing
    )
    assert planned.head == pytest.approx(at_head, rel=0.1)
    assert planned.backward == pytest.approx(meter.peak, rel=0.1)


@pytest.mark.parametrize("family", [MistralConfig, Gemma2Config])
def test_rows_longer_than_a_sliding_window_are_charged_with_its_mask(family):
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    length, counts = LONG_ROW + 76, {}
    for window in (512, length, length + 1):
        config = family(**sizes, num_key_value_heads=2, vocab_size=64, sliding_window=window)
        counts[window] = count_activations(
            meta_model(config, "float32"), rows=1, length=length, attention="sdpa", checkpointing=True
        ).backward
    assert counts[512] == counts[length] > counts[length + 1] + length * length


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_and_three_layers_say_what_all_take(checkpointing):
    config = paper(f"model.gradient_checkpointing={checkpointing}")
    model_config = Qwen2Config(**QWEN_7B)
    quick = Model(config, model_config).activations(config)
    lm = meta_model(model_config, "bfloat16")
    whole = count_activations(lm, rows=1, length=32768, attention="flash_attention_2", checkpointing=checkpointing)
    assert quick == whole


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_by_hand(checkpointing):
    """Korthikanti et al., 2022, section 4, for Qwen2's layer with a fused attention: counted on paper."""
    tokens, H, inner, heads, width = 4096, 256, 1024, 4, 64

    def at_head(layers: int) -> int:
        config = thin_model(
            hidden_size=H, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=heads,
            num_hidden_layers=layers, max_position_embeddings=tokens,
        )  # fmt: skip
        lm = meta_model(config, "bfloat16")
        return count_activations(
            lm, rows=1, length=tokens, attention="flash_attention_2", checkpointing=checkpointing
        ).head

    layer = at_head(4) - at_head(3)
    if checkpointing:
        assert layer == 2 * H * tokens  # its input
        return
    norms = 2 * (4 * H + 4 + 2 * H + 2 * H)  # fp32 input, reciprocal root, normalised in bf16, output
    attention = 2 * (3 * H + H) + 4 * heads + 2 * H  # q, k, v, output, logsumexp, output put together
    assert width * heads == H
    mlp = 2 * 4 * inner  # gate, activated, up, product
    assert layer / tokens == pytest.approx(norms + attention + mlp + 2 * 2 * H, rel=0.1)  # and two residual sums


@pytest.mark.parametrize(
    ("backend", "dtype", "tokens", "backward"),
    [
        ("torch", "float32", 1500, "exact"),
        ("cpp", "float32", 1500, "exact"),
        ("reference", "float32", 300, "exact"),
        ("cpp", "bfloat16", 1500, "sampled"),
    ],
)
def test_the_head_takes_what_is_planned(tmp_path, backend, dtype, tokens, backward, monkeypatch):
    """Bytes that torch's allocator hands out during one forward pass of the fused loss."""
    if backend == "cpp":
        pytest.importorskip("rlplus.loss.backends.native").load() or pytest.skip("the native library is not built")
    V, H = 20_000, 64
    scratch = {} if backend == "reference" else {"max_scratch_mb": 60}
    config = run_config(
        tmp_path,
        model={"dtype": dtype, "scratch": None, "path": "-"},
        train={"backend": backend, "tokens_per_micro_batch": tokens, "backward": backward} | scratch,
        rollout={"max_response_length": tokens - 8},
    )
    hidden, weight = (torch.randn(n, H, dtype=getattr(torch, dtype), requires_grad=True) for n in (tokens, V))
    target, ones = torch.randint(V, (tokens,)), torch.ones(tokens)
    total = torch.zeros(V, H) if dtype == "bfloat16" else None  # the learner's, among the gradients

    def loss() -> PolicyLoss:
        return linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=ones, token_weight=ones, backend=backend,
            external=torch.zeros(tokens, dtype=torch.bool), backward=backward, weight_grad=total, **scratch,
        )  # fmt: skip

    if backend == "cpp":  # it keeps its scratch for the next call
        native.kept_scratch.clear()
    else:
        loss()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = loss()
        if backend == "reference":
            out.loss.backward()
    if backward == "sampled":
        monkeypatch.setattr("rlplus.tools.plan.memory.DRAWN", int(out.stats["sampled_elements"]) // tokens)
    model = Model(config, thin_model(vocab_size=V, hidden_size=H, num_attention_heads=2))
    assert peak_of(profile) == pytest.approx(head_memory(config, model, CPU), rel=0.1)


def peak_of(profile: torch.profiler.profile) -> int:
    """The most bytes that torch's allocator had handed out at a time."""
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_kept_tokens_take_what_is_planned(tmp_path):
    """All rows have as many as they can, so that none needs the scratch for whole rows of logits."""
    tokens, V, H, top_k = 1500, 2000, 64, 200
    sections = {
        "model": {"scratch": None, "path": "-"},
        "train": {"backend": "torch", "tokens_per_micro_batch": tokens, "max_scratch_mb": 1},
    }
    configs = [
        run_config(tmp_path, rollout={"max_response_length": tokens - 8, "top_k": k}, **sections) for k in (0, top_k)
    ]
    hidden, weight = (torch.randn(n, H, requires_grad=True) for n in (tokens, V))
    target, ones = torch.randint(V, (tokens,)), torch.ones(tokens)
    kept = torch.arange(tokens + 1) * top_k, ((target[:, None] + torch.arange(top_k)) % V).flatten().int()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=ones, token_weight=ones, kept=kept, backend="torch",
            max_scratch_mb=1,
        )  # fmt: skip
    model = Model(configs[0], thin_model(vocab_size=V, hidden_size=H, num_attention_heads=2))
    none, some = (head_memory(config, model, CPU) for config in configs)
    assert some - none == 80 * tokens * top_k
    assert peak_of(profile) == pytest.approx(some, rel=0.1)


VLLM = "rollout.gpu_memory_utilization=0.6"


def test_weights_of_4_bits_are_counted():
    """As bitsandbytes has them, without its tables; what-fits.md has the same numbers for 7 billion."""
    pytest.importorskip("bitsandbytes")
    quantized = paper("model.lora={quantization: nf4}", *QLORA, VLLM)
    lm = AutoModelForCausalLM.from_config(thin_model(), dtype=torch.bfloat16)
    largest = max(m.weight.numel() for m in lm.model.modules() if isinstance(m, nn.Linear))
    quantize(lm, torch.device("cpu"))
    sizes = [p.numel() * p.element_size() for p in lm.parameters()]
    states = [m.weight.quant_state for m in lm.modules() if hasattr(m, "quant_state")]
    sizes += [s.absmax.numel() + 4 * s.state2.absmax.numel() for s in states]
    assert len(states) == 4 * 7
    thin = Model(quantized, thin_model())
    assert thin.weight_bytes == pytest.approx(sum(sizes), rel=1e-3)
    assert thin.dequantized == 2 * largest
    cluster = make_cluster(1, "rtx5090")
    whole = paper("model.lora={}", *QLORA, VLLM)
    plans = [make_plan(config, cluster) for config in (quantized, whole)]
    assert [plan.fits for plan in plans] == [True, False]
    assert [round(plan.memory.parts["head"]["weights"] / GIB, 1) for plan in plans] == [5.2, 14.2]
    assert [round(plan.memory.total("backward") / GIB, 1) for plan in plans] == [11.6, 20.5]
    assert round(plans[0].memory.peak / GIB, 1) == 27.8
    default = [
        make_plan(changed(config, "train", max_scratch_mb=None), cluster).memory for config in (quantized, whole)
    ]
    assert [round(max(m.total("head"), m.total("backward")) / GIB, 1) for m in default] == [12.0, 20.9]
