"""The plan's results: whether a run fits, remedies, and errors in a configuration."""

import io
import json
from types import SimpleNamespace

import pytest
import yaml
from plan_cases import CONFIGS, IN_BF16, PAPER, PROCESS, QWEN_7B, make_plan, paper
from rich.console import Console
from trainer_runs import run_config, write_task

from rlplus.loss.operations.library import implementation
from rlplus.tools.cli import main
from rlplus.tools.plan import GIB, GPUS, MOMENTS, Cluster, make_cluster, read_model, this_cluster
from rlplus.tools.plan.cluster import Gpu
from rlplus.tools.plan.memory import estimate_memory, head_scratch, head_tokens
from rlplus.tools.plan.plan_text import show
from rlplus.tools.plan.planned_model import packed_shape
from rlplus.tools.plan.speed import estimate_seconds
from rlplus.train.config import load_config, load_stages, with_first_model


def test_parameters_are_exact():
    plan = make_plan(paper(), make_cluster(8, "a100-80g"))
    assert plan.parameters == 7_615_616_512  # the safetensors index of the released model
    H, V, inner, layers = (QWEN_7B[k] for k in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"))
    layer = 2 * H * H + H + 2 * (H * 512 + 512) + 3 * H * inner + 2 * H
    assert plan.parameters == 2 * V * H + layers * layer + H
    assert plan.memory.parts["generate"]["weights"] == 2 * plan.parameters
    assert plan.memory.parts["generate"]["optimizer states"] == 12 * plan.parameters // 8


def test_the_papers_setting():
    """8 x A100-80G: it fits as configured, not with an engine that stays awake, and then the switch is named."""
    cluster = make_cluster(8, "a100-80g")
    assert make_plan(paper(), cluster).fits
    awake = make_plan(paper("rollout.sleep=false"), cluster)
    assert not awake.fits
    assert ("rollout.sleep=true",) in [remedy.overrides for remedy in awake.remedies]


@pytest.mark.parametrize("gpus", [8, 2])
def test_remedies_do_what_they_promise(gpus):
    """Each one fits when it is given on the command line, with the promised peak and time."""
    config = paper("rollout.sleep=false", "model.gradient_checkpointing=false")
    plan = make_plan(config, make_cluster(gpus, "a100-80g"))
    assert not plan.fits
    assert plan.remedies
    for remedy in plan.remedies:
        changed = paper("rollout.sleep=false", "model.gradient_checkpointing=false", *remedy.overrides)
        after = make_plan(changed, make_cluster(remedy.gpus, "a100-80g"))
        assert after.fits
        assert (after.memory.peak, after.memory.host) == (remedy.peak, remedy.host)
        assert after.seconds["total"] == remedy.seconds


def test_a_larger_micro_batch_and_fewer_gpus_never_take_less():
    def training(gpus: int, *overrides: str) -> int:
        memory = make_plan(paper(*overrides), make_cluster(gpus, "h200")).memory
        return max(map(memory.total, ("head", "backward", "optimizer")))

    tokens = [training(8, f"train.tokens_per_micro_batch={n}") for n in (9216, 16384, 32768, 65536)]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 4
    stages = [training(8, f"train.zero_stage={n}") for n in (3, 2, 1)]
    assert stages == sorted(stages)
    assert training(16) < training(8) < training(4)
    compiled = training(8, "model.attention=sdpa", "train.compile=true")  # packed rows have a mask
    assert compiled > training(8, "model.attention=sdpa") == pytest.approx(training(8), rel=1e-3)
    assert training(8, "train.offload_optimizer=cpu") < training(8)
    assert training(8, "model.gradient_checkpointing=false") > 2 * training(8)


def test_sixteen_thousand_tokens():
    """The documented option: demonstrations as long as the window leaves room for."""
    config = paper("data.max_demonstration_length=15360")
    assert config.max_sample_length == 16384
    assert make_plan(config, make_cluster(8, "a100-80g")).fits


LONG = ("rollout.max_response_length=15360", "evaluation.data.max_prompt_length=1024")  # 16,384 with a prompt


@pytest.mark.parametrize(
    ("overrides", "peak", "switches", "then", "host"),
    [
        ([], 67.8, None, None, 0),
        (["algorithm.preset=grpo", "algorithm.objective.kl_coef=0.001"], 82.0, ["train.zero_stage=3"], 75.0, 0),
        (["algorithm.preset=ppo"], 90.9, ["train.zero_stage=3"], 77.5, 0),
        (
            ["algorithm.preset=ppo", "algorithm.reward_kl_coef=0.01"],
            105.1,
            ["train.zero_stage=3", "train.offload_optimizer=cpu"],
            64.3,
            273.6,
        ),
        (["algorithm.preset=prime"], 106.8, ["train.zero_stage=3", "train.offload_optimizer=cpu"], 64.5, 283.7),
    ],
)
def test_responses_up_to_16384_tokens_fit_or_the_switch_is_named(overrides, peak, switches, then, host):
    """The table of docs/trainer.md, in GiB of 8 x A100-80G; more models than one need more than ZeRO-2."""
    config = paper(*LONG, *overrides)
    assert config.max_sample_length == config.max_generation_length == 16384
    plan = make_plan(config, make_cluster(8, "a100-80g"))
    assert round(plan.memory.peak / GIB, 1) == peak
    assert plan.fits == (switches is None)
    if switches is not None:
        (remedy,) = (r for r in plan.remedies if r.overrides == tuple(switches))
        assert (remedy.gpus, round(remedy.peak / GIB, 1), round(remedy.host / GIB, 1)) == (8, then, host)


TRAINING = sorted(set(CONFIGS.glob("*.yaml")) - {CONFIGS / "eval.yaml"})  # which trains nothing


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
@pytest.mark.parametrize("gpu", ["a100-40g", "a100-80g", "h100", "h200"])
def test_every_configuration_can_be_planned(path, gpu):
    for config in with_first_model(load_stages(path)):
        plan = make_plan(config, make_cluster(8, gpu))
        assert set(plan.memory.parts) == set(MOMENTS)
        assert plan.memory.peak > 0
        assert plan.fits or plan.remedies
        assert plan.seconds["total"] == pytest.approx(sum(plan.seconds.values()) / 2)


DRIVERS = {  # names of devices as the drivers give them, and their memory in MiB
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 81153),
    "h200": ("NVIDIA H200", 143167),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24256),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24209),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32111),
    "a10g": ("NVIDIA A10G", 22723),
    "l40s": ("NVIDIA L40S", 45458),
    "dgx-spark": ("NVIDIA GB10", 122571),
    "mi300x": ("AMD Instinct MI300X", 196288),
}


def test_the_cards_that_a_desk_has(monkeypatch):
    """The time of a step follows the datasheets, and so does the fit."""
    config = paper("model.lora={}", "train.tokens_per_micro_batch=10240", "rollout.max_response_length=8192")
    model, _ = read_model(config)
    memory = {name: estimate_memory(config, model, make_cluster(1, name)) for name in GPUS}
    seconds = {name: estimate_seconds(config, model, memory[name], make_cluster(1, name)) for name in GPUS}
    trained = {name: times["forward and backward"] for name, times in seconds.items()}
    work = [times * GPUS[name].flops for name, times in trained.items()]
    moved = [times["optimizer"] * GPUS[name].bandwidth for name, times in seconds.items()]
    assert max(work) == pytest.approx(min(work))
    assert max(moved) == pytest.approx(min(moved))
    slowest = ("dgx-spark", "a10g", "rtx3090", "rtx4090", "rtx5090", "a100-40g", "l40s", "h100", "mi300x")
    assert sorted(slowest, key=trained.__getitem__, reverse=True) == list(slowest)
    assert {name for name in GPUS if not memory[name].fits} == {"rtx3090", "rtx4090", "rtx5090", "a10g"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    for card, (name, mebibytes) in (DRIVERS | {"": ("NVIDIA GeForce RTX 3090 Ti", 24256)}).items():
        properties = SimpleNamespace(name=name, total_memory=mebibytes * 2**20)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index, found=properties: found)
        gpu = make_cluster(None, None).gpu
        known = GPUS.get(card, Gpu("", 0.0))
        assert gpu == Gpu(name, properties.total_memory, known.flops, known.bandwidth, known.link, known.driver)


@pytest.mark.parametrize("command", ["plan", "init"])
def test_the_commands_list_the_cards(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"--gpu GPU {', '.join(GPUS)}, or a size" in " ".join(capsys.readouterr().out.replace("-\n", "-").split())


@pytest.mark.parametrize(
    ("name", "gpus", "gpu", "billions", "peak"),
    [
        ("gsm8k-0.5b", 1, "24g", 0.49, 21.4),
        ("gsm8k-7b-24gb", 1, "24g", 7.62, 19.4),
        ("qwen2.5-math-1.5b", 8, "a100-80g", 1.54, 48.0),
        ("llama-3.1-8b-instruct", 8, "a100-80g", 8.03, 69.2),
        ("deepseek-math-7b-instruct", 8, "a100-80g", 6.91, 65.5),
    ],
)
def test_the_other_models_fit_where_their_configurations_say(name, gpus, gpu, billions, peak):
    """The README's table, in GiB of a GPU; the parameters are the models' own."""
    plan = make_plan(load_config(CONFIGS / f"{name}.yaml"), make_cluster(gpus, gpu))
    assert round(plan.parameters / 1e9, 2) == billions
    assert plan.fits
    assert round(plan.memory.peak / GIB, 1) == peak


def test_the_command(capsys):
    arguments = ["plan", str(PAPER), "--gpus", "8"]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a100-80"], "or a size of memory such as 24g; got 'a100-80'; nearest: a100-80g"),
        (
            ["--gpu", "24"],
            "dgx-spark, mi300x, or a size of memory such as 24g; got '24'\n",
        ),
        (["--gpu", ""], "or a size of memory such as 24g; got ''"),
        (["--gpu", "0g"], "or a size of memory such as 24g; got '0g'"),
        (["--gpus", "0"], "want --gpus of at least 1; got 0"),
        (["--gpus", "7"], "multiples of the 7 ranks; got 64"),
        (
            ["--gpus", "8", *PROCESS, "rollout.tensor_parallel_size=2"],
            "takes 3 GPUs per rank: want a multiple of them; got 8",
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
        (["model.overrides={hidden_size: abc}"], "want model.overrides that make a valid Qwen2Config; got {'hidden_"),
        (["model.overrides={num_hidden_layers: 2}"], "must be equal to the number of `layer_types` (28)"),
        (
            ["model.overrides={max_position_embeddings: 99}"],
            "of an evaluation have 10240 tokens together, the model has 99 positions",
        ),
        (
            ["model.overrides={num_attention_heads: 0, max_position_embeddings: 16384}"],
            "no plan of the memory: the model cannot be built without memory: ",
        ),
        (
            ["train.deepspeed.zero_optimization.reduce_bucket_size=many"],
            "train.deepspeed.zero_optimization.reduce_bucket_size: want a number; got 'many'",
        ),
        (["train.zero_stagee=3"], "train.zero_stagee: unknown key; nearest: train.zero_stage"),
    ],
)
def test_what_is_wrong_is_one_message(capsys, arguments, message):
    given = [
        *([] if "--gpus" in arguments else ["--gpus", "8"]),
        *([] if "--gpu" in arguments else ["--gpu", "a100-80g"]),
    ]
    assert main(["plan", str(PAPER), *arguments, *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_says_what_it_will_take(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path, train={"steps": 1}).to_yaml())
    assert main(["train", str(path)]) == 0
    assert "memory planned for 1 x cpu: " in capsys.readouterr().err


def test_a_backend_says_what_a_logit_takes(monkeypatch):
    """1250 MB hold 1,000 rows of that many bytes a logit, and no part of another."""
    for name in ("reference", "torch"):
        monkeypatch.setattr(implementation(name), "scratch_per_logit", lambda *_: 8)
    sizes = {"vocabulary": 156_250, "hidden": 3584, "itemsize": 2}
    model, cluster = SimpleNamespace(**sizes, in_shards=lambda _: False), make_cluster(8, "a100-80g")
    rows = {
        name: head_scratch(paper(f"train.backend={name}"), model, cluster) / (8 * model.vocabulary)
        for name in ("reference", "torch")
    }
    assert rows == {"reference": head_tokens(paper()), "torch": 1000}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_in_fp32_take_more(stage):
    """Than in bf16: 2 bytes of each parameter, or of a rank's, of the bucket, and what is reduced."""
    parameters, bucket, head = 7.62e9, 5e8, 152_064 * 3584
    plans = [make_plan(paper(f"train.zero_stage={stage}", *o), make_cluster(8, "a100-80g")) for o in ((), (IN_BF16,))]
    fp32, bf16 = (plan.memory.parts["backward"]["gradients"] for plan in plans)
    kept = {1: 2 + 4 / 8, 2: 2 / 8, 3: 2 / 8}[stage] * parameters
    assert fp32 - bf16 == pytest.approx(kept + 2 * bucket + (0 if stage == 1 else 4 * head), rel=0.01)
    sent = [plan.seconds["communication"] for plan in plans]
    assert sent[0] > 1.1 * sent[1]


def test_no_remedy_splits_heads_that_cannot_be_split():
    """28 heads, 4 of keys and values: sequence_parallel 8 would be refused by the run."""
    plan = make_plan(paper("train.tokens_per_micro_batch=131072"), make_cluster(16, "a100-40g"))
    assert not plan.fits
    assert not any("sequence_parallel=8" in text for remedy in plan.remedies for text in remedy.overrides)


def test_shipped_configurations_are_planned_without_a_network(tmp_path, monkeypatch, capsys):
    """The architecture travels with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["plan", str(PAPER), "--gpus", "8", "--gpu", "a100-80g"]) == 0
    text = capsys.readouterr().out
    assert "8 x a100-80g, 7.62 billion parameters" in text
    assert "Qwen/Qwen2.5-Math-7B: the architecture that comes with rlplus (no such folder; http://127.0.0.1:9" in text
    assert main(["plan", str(PAPER), "--gpus", "8", "--gpu", "a100-80g", "--json"]) == 0
    assert "that comes with rlplus" in json.loads(capsys.readouterr().out)["note"]
    assert main(["train", str(PAPER), f"data.path={write_task(tmp_path)}", "evaluation.every=0"]) == 2
    assert "want model.path a Hugging Face folder" in capsys.readouterr().err  # planned from it, never trained
    shipped = {path.stem.replace("--", "/") for path in (CONFIGS / "models").glob("*.json")}
    paths = {yaml.safe_load(path.read_text())["model"].get("path") for path in CONFIGS.glob("*.yaml")}
    assert shipped == paths - {None}


def test_nothing_is_promised_where_nothing_helps():
    plan = make_plan(paper(), make_cluster(8, "4g"))
    assert not plan.remedies
    console = Console(width=200, file=io.StringIO())
    show(plan, console)
    assert "No switches make it fit, not even all together and on more GPUs." in console.file.getvalue()


@pytest.mark.parametrize("size", ["24g", "24G", "24GB", "24gib"])
def test_any_size_of_memory_is_a_gpu(size):
    """Its memory is used; its speed is unknown."""
    assert make_cluster(8, size) == Cluster(8, Gpu("24 GiB GPU", 24 * 2**30))
    if size != "24g":
        return
    plan = make_plan(paper(), make_cluster(8, size))
    assert plan.memory.capacity == 24 * 2**30
    assert not plan.fits
    assert not plan.seconds
    console = Console(width=200, file=io.StringIO())
    show(plan, console)
    assert "The speed of a 24 GiB GPU is not known: no time is estimated." in console.file.getvalue()


def test_a_container_has_the_memory_that_its_control_group_allows(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("rlplus.tools.plan.cluster.CGROUP_LIMITS", (tmp_path / "none", limit))
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


def test_an_update_of_a_recipe_can_be_the_largest(tmp_path):
    """Demonstrations that wait, or a critic's part of a step, may be more samples than an update of the policy has."""

    def tokens(algorithm):
        train = {"prompts_per_step": 64, "prompts_per_update": 2, "tokens_per_micro_batch": 10**6}
        config = run_config(tmp_path, algorithm=algorithm, train=train)
        rows, length = packed_shape(config)
        assert rows * length % config.max_sample_length == 0
        return rows * length // config.max_sample_length

    assert tokens({"preset": "grpo-sft"}) == 2 * 5
    assert tokens({"preset": "relift", "recipe": {"batch": 9}}) == 2 * 5
    assert tokens({"preset": "relift"}) == 128
    assert tokens({"preset": "ppo"}) == 22  # 256 samples in 12 parts
    assert tokens({"preset": "ppo", "recipe": {"critic_updates": 100}}) == 2 * 5
