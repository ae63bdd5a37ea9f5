"""The plan against measurement: a real update's tensors, saved activations, the head's allocations; and its answers."""

import gc
import io
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from trainer_runs import run_config, write_task
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlplus.cli import main
from rlplus.config import Config, load_config
from rlplus.data import Sample, byte_tokenizer, pack
from rlplus.demo.base import make_model
from rlplus.demo.task import make_tokenizer
from rlplus.objective import Objective
from rlplus.ops import linear_policy_loss
from rlplus.plan import GPUS, MOMENTS, Cluster, make_cluster, make_plan, this_cluster
from rlplus.plan.activations import Meter, count_activations, meta_model
from rlplus.plan.cluster import Gpu
from rlplus.plan.memory import Model, head_memory, model_states, packed_shape
from rlplus.plan.show import show
from rlplus.trainer.batch import make_micro_batches
from rlplus.trainer.policy import PackedModel, Policy
from rlplus.trainer.ranks import initialize_distributed

CONFIGS = Path(__file__).parent.parent / "configs"
CPU = Cluster(1, Gpu("cpu", 2**40))
QWEN_7B = {  # Qwen/Qwen2.5-Math-7B's config.json
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Config(**QWEN_7B).save_pretrained(folder)
    return folder


def thin_model(**changes) -> Qwen2Config:
    values = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    return Qwen2Config(**(values | changes))


def real_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor of this process has."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Not subclasses: a compiler's stand-ins, which other tests of the process leave behind, have no memory.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def everything_known() -> list[torch.Tensor]:
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == "cpu"]


def alive_beyond(before: dict[int, int]) -> int:
    return sum(size for address, size in real_storages().items() if address not in before)


def samples_of(n: int, length: int) -> list[Sample]:
    return [
        Sample([1, 2], list(range(3, length + 1)), 0, i == 0, False, None, advantage=1.0 - 2 * (i % 2))
        for i in range(n)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_takes_what_is_planned(tmp_path, stage, dtype):
    """One rank, two micro-batches: tensors alive between updates, and the most at any moment of one, within 10%."""
    initialize_distributed()
    config = run_config(
        tmp_path,
        model={"scratch": None, "path": str(tmp_path / "model"), "dtype": dtype},
        train={"zero_stage": stage, "tokens_per_micro_batch": 48, "backend": "torch"},
        rollout={"max_response_length": 40},
    )
    model_config = thin_model(vocab_size=len(byte_tokenizer()), tie_word_embeddings=stage == 2)
    Qwen2ForCausalLM(model_config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    before = real_storages()
    policy = Policy(config, str(tmp_path / "model"), model_config, config.algorithm.resolve().objective)

    def update() -> None:
        batches = make_micro_batches(samples_of(2, 48), config.algorithm.resolve(), config, 0, policy.device)
        assert len(batches) == 2
        policy.accumulate(batches)
        assert policy.step()

    update()  # the first one makes the optimiser's moments
    between = alive_beyond(before)
    with Meter(known=everything_known()) as passes:
        batches = make_micro_batches(samples_of(2, 48), config.algorithm.resolve(), config, 0, policy.device)
        policy.accumulate(batches)
    del batches
    waiting = alive_beyond(before)
    with Meter(known=everything_known()) as optimizer:
        policy.step()
    states = model_states(config, Model(config, model_config), CPU)
    stay = states.gradients if states.gradients_stay else 0
    assert between == pytest.approx(states.weights + states.optimizer + stay, rel=0.1)
    memory = make_plan(config, CPU).memory
    engine = sum(memory.parts["optimizer"][part] for part in ("engine weights", "kv cache"))
    assert between + passes.peak == pytest.approx(max(map(memory.total, ("head", "backward"))) - engine, rel=0.1)
    assert waiting + optimizer.peak == pytest.approx(memory.total("optimizer") - engine, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("length", [192, 768])
def test_activations_are_those_that_autograd_saves(length, checkpointing):
    """Through real attention on packed rows: bytes given to saved_tensors_hooks, and the most alive in the backward."""
    config = thin_model()
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = PackedModel(lm, None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    samples = [Sample([1], [2] * (length // 3 - 1), 0, False, False, None, advantage=1.0) for _ in range(6)]
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
    if checkpointing:
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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_and_three_layers_say_what_all_take(qwen, checkpointing):
    config = paper(qwen, f"model.gradient_checkpointing={checkpointing}")
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
    ("backend", "dtype", "tokens", "memory"),
    [
        ("torch", "float32", 1500, "fast"),
        ("cpp", "float32", 1500, "fast"),
        ("reference", "float32", 300, "fast"),
        ("torch", "float32", 1500, "least"),
        ("torch", "bfloat16", 1500, "least"),
        ("cpp", "bfloat16", 1500, "least"),
    ],
)
def test_the_head_takes_what_is_planned(tmp_path, backend, dtype, tokens, memory):
    """Bytes that torch's allocator hands out during one forward pass of the fused loss."""
    if backend == "cpp":
        pytest.importorskip("rlplus.ops.cpp").load() or pytest.skip("the native library is not built")
    V, H = 20_000, 64
    scratch = {} if backend == "reference" else {"max_scratch_mb": 60}
    config = run_config(
        tmp_path,
        model={"dtype": dtype, "scratch": None, "path": "-"},
        train={"backend": backend, "tokens_per_micro_batch": tokens, "memory": memory} | scratch,
        rollout={"max_response_length": tokens - 8},
    )
    hidden, weight = (torch.randn(n, H, dtype=getattr(torch, dtype), requires_grad=True) for n in (tokens, V))
    target, ones = torch.randint(V, (tokens,)), torch.ones(tokens)

    def loss() -> object:
        return linear_policy_loss(
            hidden, weight, target, old_logprob=None, advantage=ones, token_weight=ones, backend=backend,
            external=torch.zeros(tokens, dtype=torch.bool), memory=memory, **scratch,
        )  # fmt: skip

    if backend != "cpp":  # it keeps its scratch for the next call
        loss()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = loss()
        if backend == "reference":
            out.loss.backward()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    model = Model(config, thin_model(vocab_size=V, hidden_size=H, num_attention_heads=2))
    assert peak == pytest.approx(head_memory(config, model, CPU), rel=0.1)


def paper(qwen: Path, *overrides: str) -> Config:
    return load_config(CONFIGS / "qwen2.5-math-7b.yaml", [f"model.path={qwen}", *overrides])


def test_parameters_are_exact(qwen):
    plan = make_plan(paper(qwen), make_cluster(8, "a100-80g"))
    assert plan.parameters == 7_615_616_512  # the safetensors index of the released model
    H, V, inner, layers = (QWEN_7B[k] for k in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"))
    layer = 2 * H * H + H + 2 * (H * 512 + 512) + 3 * H * inner + 2 * H
    assert plan.parameters == 2 * V * H + layers * layer + H
    assert plan.memory.parts["generate"]["weights"] == 2 * plan.parameters
    assert plan.memory.parts["generate"]["optimizer states"] == 12 * plan.parameters // 8


def test_the_papers_setting(qwen):
    """8 x A100-80G: it fits as configured, not with an engine that stays awake, and then the switch is named."""
    cluster = make_cluster(8, "a100-80g")
    assert make_plan(paper(qwen), cluster).fits
    awake = make_plan(paper(qwen, "rollout.sleep=false"), cluster)
    assert not awake.fits
    assert ("rollout.sleep=true",) in [remedy.overrides for remedy in awake.remedies]


@pytest.mark.parametrize("gpus", [8, 2])
def test_remedies_do_what_they_promise(qwen, gpus):
    """Each one fits when it is given on the command line, with the promised peak and time."""
    config = paper(qwen, "rollout.sleep=false", "model.gradient_checkpointing=false")
    plan = make_plan(config, make_cluster(gpus, "a100-80g"))
    assert not plan.fits
    assert plan.remedies
    for remedy in plan.remedies:
        changed = paper(qwen, "rollout.sleep=false", "model.gradient_checkpointing=false", *remedy.overrides)
        after = make_plan(changed, make_cluster(remedy.gpus, "a100-80g"))
        assert after.fits
        assert (after.memory.peak, after.seconds["total"]) == (remedy.peak, remedy.seconds)


def test_a_larger_micro_batch_and_fewer_gpus_never_take_less(qwen):
    def training(gpus: int, *overrides: str) -> int:
        memory = make_plan(paper(qwen, *overrides), make_cluster(gpus, "h200")).memory
        return max(map(memory.total, ("head", "backward", "optimizer")))

    tokens = [training(8, f"train.tokens_per_micro_batch={n}") for n in (9216, 16384, 32768, 65536)]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 4
    stages = [training(8, f"train.zero_stage={n}") for n in (3, 2, 1)]
    assert stages == sorted(stages)
    assert training(16) < training(8) < training(4)
    assert training(8, "model.attention=sdpa") > training(8)
    assert training(8, "train.offload_optimizer=cpu") < training(8)
    assert training(8, "model.gradient_checkpointing=false") > 2 * training(8)


def test_sixteen_thousand_tokens(qwen):
    """The documented option: demonstrations as long as the window leaves room for."""
    config = paper(qwen, "data.max_demonstration_length=15360")
    assert config.max_sample_length == 16384
    assert make_plan(config, make_cluster(8, "a100-80g")).fits


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_configuration_can_be_planned(path, gpu, qwen, tmp_path):
    config = load_config(path)
    if path.stem == "demo":  # it makes its model first
        thin_model().save_pretrained(tmp_path)
        config = load_config(path, [f"model.path={tmp_path}"])
    elif config.model.path is not None:  # on the hub
        config = load_config(path, [f"model.path={qwen}"])
    plan = make_plan(config, make_cluster(8, gpu))
    assert set(plan.memory.parts) == set(MOMENTS)
    assert plan.memory.peak > 0
    assert plan.fits or plan.remedies
    assert plan.seconds["total"] == pytest.approx(sum(plan.seconds.values()) / 2)


def test_the_command(qwen, capsys):
    arguments = ["plan", str(CONFIGS / "qwen2.5-math-7b.yaml"), f"model.path={qwen}", "--gpus", "8"]
    assert main([*arguments, "--gpu", "a100-80g"]) == 0
    text = capsys.readouterr().out
    assert "8 x a100-80g, 7.62 billion parameters, micro-batches of 1 x 32768 tokens" in text
    assert "It fits." in text
    assert main([*arguments, "--gpu", "a100-40g"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit:" in text
    assert "It would fit with:" in text
    assert main([*arguments, "--gpu", "a100-40g", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 7_615_616_512
    assert plan["peak"] == max(sum(v for k, v in m.items() if k != "total") for m in plan["memory"].values())
    assert plan["peak"] > plan["capacity"] == 40 * 2**30
    assert plan["remedies"][0]["peak"] <= plan["capacity"]


PROCESS = ("rollout.sleep=false", "rollout.mode=process")
SERVER = ("rollout.sleep=false", "rollout.mode=server", "rollout.server_url=http://localhost:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a100-80"], "or a size of memory such as 24g; got 'a100-80' (nearest: a100-80g)"),
        (
            ["--gpu", "24"],
            "h100, h200, or a size of memory such as 24g; got '24'\n",
        ),
        (["--gpus", "0"], "want --gpus of at least 1; got 0"),
        (["--gpus", "7"], "multiples of the 7 ranks; got 64"),
        (
            ["--gpus", "8", *PROCESS, "rollout.tensor_parallel_size=2"],
            "takes 3 GPUs a rank: want a multiple of them; got 8",
        ),
        (
            ["--gpus", "6", "rollout.tensor_parallel_size=4", "train.prompts_per_step=6", "train.prompts_per_update=6"],
            "want rollout.tensor_parallel_size a divisor of the 6 ranks; got 4",
        ),
        (
            ["rollout.tensor_parallel_size=8"],
            "want rollout.tensor_parallel_size a divisor of the model's 28 heads; got 8",
        ),
        (["train.sequence_parallel=8"], "want train.sequence_parallel a divisor of the model's"),
        (["model.path=nowhere"], "want model.path a Hugging Face folder or hub name; got 'nowhere'"),
        (["model.overrides={rope_thta: 1}"], "model.overrides.rope_thta: want a field of Qwen2Config"),
        (["train.zero_stagee=3"], "train.zero_stagee: unknown key; nearest: train.zero_stage"),
    ],
)
def test_what_is_wrong_is_one_message(qwen, capsys, arguments, message):
    options = [f"model.path={qwen}", *arguments, *([] if "--gpus" in arguments else ["--gpus", "8"])]
    assert main(["plan", str(CONFIGS / "qwen2.5-math-7b.yaml"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_says_what_it_will_take(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, train={"steps": 1}).to_yaml())
    assert main(["train", str(path)]) == 0
    assert "memory planned for 1 x cpu: " in capsys.readouterr().err


def test_least_memory_saves_the_accumulator_of_the_head(qwen):
    """4 V H bytes of fp32, and the difference of 1250 to 80 MB of scratch, all in the head."""
    cluster = make_cluster(8, "a100-80g")
    fast, least = (make_plan(paper(qwen, f"train.memory={memory}"), cluster) for memory in ("fast", "least"))
    saved = fast.memory.parts["head"]["head"] - least.memory.parts["head"]["head"]
    assert saved == pytest.approx(4 * 152_064 * 3584 + 1170e6, rel=0.05)
    assert fast.seconds["forward and backward"] < least.seconds["forward and backward"]


def test_a_servers_gpus_are_not_counted(qwen, capsys):
    model = [str(CONFIGS / "qwen2.5-math-7b.yaml"), f"model.path={qwen}", *SERVER]
    main(["plan", "--gpus", "8", "--gpu", "a100-80g", *model])
    out = capsys.readouterr().out
    assert "Not counted: the GPUs of the server" in out
    assert "Not in it: generation" in out
    assert "generate " not in out.partition("time of a step")[2]
    assert "engine" not in out


@pytest.mark.parametrize(("gpus", "parallel", "ranks"), [(8, 1, 4), (6, 2, 2)])
def test_an_engine_of_its_own_has_gpus_of_its_own(qwen, capsys, gpus, parallel, ranks):
    config = paper(qwen, *PROCESS, f"rollout.tensor_parallel_size={parallel}")
    plan = make_plan(config, make_cluster(gpus, "h200"))
    assert plan.ranks == ranks
    alone = make_plan(paper(qwen, *SERVER), make_cluster(ranks, "h200"))
    assert plan.memory.parts == alone.memory.parts  # a GPU that trains knows of no engine
    assert not any("engine" in part or "cache" in part for moment in plan.memory.parts.values() for part in moment)
    engine = plan.memory.engine
    assert engine["engine weights"] == 2 * plan.parameters // parallel
    share = sum(size for part, size in engine.items() if part != "reserve")
    assert share == pytest.approx(config.rollout.gpu_memory_utilization * 140 * 2**30, abs=2)
    token = 2 * 28 * 4 * 128 * 2 // parallel  # keys and values of 28 layers and 4 heads, in bf16
    assert plan.sequences == engine["kv cache"] // (token * config.max_generation_length)
    assert plan.memory.host == 2 * plan.parameters  # the files of weights
    assert plan.to_json()["engine_memory"] == engine
    show(plan, Console(width=200))
    assert f"{gpus} x h200 ({ranks} train, {gpus - ranks} generate), " in capsys.readouterr().out


def test_generation_on_gpus_of_its_own_takes_the_time_that_it_takes_beside_the_training(qwen):
    """As many engines, with the same cache: the same waves. And with overlap it goes on beside the rest."""
    cache = "rollout.kv_cache_memory_mb=20000"
    beside = make_plan(paper(qwen, "rollout.sleep=false", cache), make_cluster(4, "h200")).seconds
    apart = make_plan(paper(qwen, *PROCESS, cache), make_cluster(8, "h200")).seconds
    assert apart["generate"] == beside["generate"]
    assert apart["sync"] > beside["sync"]
    overlap = make_plan(paper(qwen, *PROCESS, cache, "train.overlap=true"), make_cluster(8, "h200")).seconds
    rest = sum(overlap.values()) - overlap["total"] - overlap["generate"] - overlap["sync"]
    assert overlap["total"] == pytest.approx(apart["sync"] + max(rest, apart["generate"]))
    assert overlap["old_logprob"] == pytest.approx(apart["old_logprob"] / 4, rel=0.01)  # one of a group of 8; half


@pytest.mark.parametrize("sleep", [False, True])
def test_ranks_that_share_an_engine_share_its_weights(qwen, sleep):
    """Of 7.6 billion bf16 weights and a fixed share of the GPU, the cache gets what the weights leave."""
    plans = [
        make_plan(
            paper(qwen, f"rollout.sleep={sleep}", f"rollout.tensor_parallel_size={size}"), make_cluster(8, "h200")
        )
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


def test_an_engine_that_does_not_fit_its_own_gpu(qwen):
    plan = make_plan(paper(qwen, *PROCESS, "rollout.gpu_memory_utilization=0.2"), make_cluster(16, "a100-80g"))
    assert plan.memory.problems == (
        "engine: 0.0 GiB are left for keys and values; a sequence of 10240 tokens takes 0.5 GiB",
    )
    assert [name.partition("=")[0] for name in plan.remedies[0].overrides] == ["rollout.gpu_memory_utilization"]
    assert {remedy.gpus for remedy in plan.remedies} == {16}
    greedy = make_plan(paper(qwen, *PROCESS, "rollout.gpu_memory_utilization=1.0"), make_cluster(16, "a100-80g"))
    assert greedy.memory.problems == ("engine: needs 83.0 GiB of 80.0 GiB",)


def test_no_remedy_splits_heads_that_cannot_be_split(qwen):
    """28 heads, 4 of keys and values: sequence_parallel 8 would be refused by the run."""
    plan = make_plan(paper(qwen, "train.tokens_per_micro_batch=131072"), make_cluster(16, "a100-40g"))
    assert not plan.fits
    assert not any("sequence_parallel=8" in text for remedy in plan.remedies for text in remedy.overrides)


def test_shipped_configurations_are_planned_without_a_network(tmp_path, monkeypatch, capsys):
    """From the architecture that travels with them, which is Qwen's own and that of the demo's recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["plan", str(CONFIGS / "qwen2.5-math-7b.yaml"), "--gpus", "8", "--gpu", "a100-80g"]) == 0
    text = capsys.readouterr().out
    assert "8 x a100-80g, 7.62 billion parameters" in text
    assert "Qwen/Qwen2.5-Math-7B: the architecture that comes with rlplus (no such folder; http://127.0.0.1:9" in text
    assert main(["plan", str(CONFIGS / "demo.yaml"), "--gpus", "1", "--gpu", "h100", "--json"]) == 0
    parameters = sum(p.numel() for p in make_model(make_tokenizer()).parameters())
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == parameters
    assert "that comes with rlplus" in plan["note"]
    assert main(["train", str(CONFIGS / "demo.yaml"), f"data.path={write_task(tmp_path)}", "evaluation.every=0"]) == 2
    assert "want model.path a Hugging Face folder" in capsys.readouterr().err  # planned from it, never trained
    shipped = {path.stem.replace("--", "/") for path in (CONFIGS / "models").glob("*.json")}
    paths = {yaml.safe_load(path.read_text())["model"].get("path") for path in CONFIGS.glob("*.yaml")}
    assert shipped == paths - {None}


@pytest.mark.parametrize("size", ["24g", "24G", "24GB", "24gib"])
def test_any_size_of_memory_is_a_gpu(qwen, size):
    """Its memory counts; its speed is not made up."""
    assert make_cluster(8, size) == Cluster(8, Gpu("24 GiB GPU", 24 * 2**30))
    if size != "24g":
        return
    plan = make_plan(paper(qwen), make_cluster(8, size))
    assert plan.memory.capacity == 24 * 2**30
    assert not plan.fits
    assert not plan.seconds
    console = Console(width=200, file=io.StringIO())
    show(plan, console)
    assert "The speed of a 24 GiB GPU is not known: no time is estimated." in console.file.getvalue()


@pytest.mark.parametrize("engine", [(), PROCESS, SERVER])
def test_a_run_that_samples_nothing_has_no_engine(qwen, engine):
    """SFT: neither on its GPUs nor on others, nor in the host's memory; but for evaluations while it trains."""
    quiet = ("algorithm.preset=sft", "evaluation.every=0", *engine)
    plan = make_plan(paper(qwen, *quiet), make_cluster(8, "a100-80g"))
    alone = make_plan(paper(qwen, *SERVER), make_cluster(8, "a100-80g"))
    assert plan.ranks == 8
    assert plan.memory.parts == alone.memory.parts, "as where a server has the engine"
    assert (plan.memory.engine, plan.memory.host, plan.sequences) == ({}, 0, 0)
    assert not {"generate", "sync"} & plan.seconds.keys()
    evaluated = make_plan(paper(qwen, *quiet, "evaluation.every=5"), make_cluster(8, "a100-80g"))
    assert evaluated.ranks == (4 if engine == PROCESS else 8)
    assert (evaluated.sequences > 0) == (engine != SERVER)


def test_a_container_has_the_memory_that_its_control_group_allows(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("rlplus.plan.cluster.CGROUP_LIMITS", (tmp_path / "none", limit))
    limit.write_text("max\n")
    machine = this_cluster(config := run_config(tmp_path)).gpu.memory
    limit.write_text("1048576\n")
    assert this_cluster(config).gpu.memory == 2**20 < machine


def test_a_budget_beyond_the_samples_of_an_update_takes_nothing(tmp_path):
    """4 prompts in groups of 4 and a demonstration cannot fill more micro-batch than they have tokens."""
    small, large = (run_config(tmp_path, train={"tokens_per_micro_batch": n}) for n in (10**4, 10**12))
    assert packed_shape(small) == packed_shape(large)
    rows, length = packed_shape(large)
    assert rows * length >= 4 * 4 * large.max_sample_length
