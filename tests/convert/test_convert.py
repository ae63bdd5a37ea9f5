"""`rlplus convert`: what scripts of TRL and verl become. The expected values are computed by hand."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from rlplus.tools.cli import main
from rlplus.tools.convert import convert
from rlplus.tools.convert.trl_arguments import DEFAULTS as TRL_DEFAULTS
from rlplus.tools.convert.verl_overrides import DEFAULTS as VERL_DEFAULTS
from rlplus.train.algorithm import ALGORITHMS
from rlplus.train.config import load_config
from rlplus.train.config.synonyms import TRL, VERL, WITHOUT, ending

SCRIPTS = Path(__file__).parent / "scripts"
A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
OBJECTIVE = "algorithm.objective."

# Keys of the configuration by script, the settings that are listed as lost, and the keys that must be filled in.
CASES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "trl_first.py": (
        {
            "output_dir": "first", "model.path": "Qwen/Qwen2-0.5B-Instruct", "model.gradient_checkpointing": True,
            "model.dtype": "bfloat16", "data.path": "hf://trl-lib/DeepMath-103K/train", "reward.kind": "math_verify",
            "rollout.engine": "transformers", "rollout.group_size": 8, "rollout.max_response_length": 512,
            "algorithm.preset": "grpo", "algorithm.reduction": "token", "algorithm.normalize_std": True,
            f"{OBJECTIVE}kl_coef": 0.0, "train.prompts_per_step": 1, "train.epochs": 3, "train.lr": 1e-6,
            "train.lr_schedule": "linear", "train.weight_decay": 0.0, "train.seed": 42, "checkpoint.every": 500,
            "train.tokens_per_micro_batch": 8 * (1024 + 512),
        }, set(), set(),
    ),
    "trl_accumulation.py": (  # 8 completions on each of 4 processes, 16 times, in groups of 16
        {
            "train.prompts_per_step": 32, "train.prompts_per_update": None, "rollout.group_size": 16,
            "train.tokens_per_micro_batch": 8 * (512 + 2048), "data.max_prompt_length": 512, "train.epochs": 1,
            "rollout.max_response_length": 2048, "checkpoint.every": 50, "checkpoint.keep": 3, "train.lr": 5e-6,
        }, set(), {"data.path"},
    ),
    "trl_several_updates.py": (  # 64 completions are generated, 16 of them are an update: 4 updates a step
        {
            "output_dir": "runs/several", "train.prompts_per_step": 8, "train.prompts_per_update": 2,
            "train.steps": 100, "checkpoint.every": 25, f"{OBJECTIVE}kl_coef": 0.01, f"{OBJECTIVE}kl_estimator": "k3",
        }, {"num_iterations"}, {"data.path"},
    ),
    "trl_dapo.py": (
        {
            f"{OBJECTIVE}clip_low": 0.2, f"{OBJECTIVE}clip_high": 0.28, "algorithm.reduction": "token",
            "train.prompts_per_step": 8, "train.prompts_per_update": 2,
        }, {"mask_truncated_completions", "top_p", "top_k"}, {"model.path", "data.path", "reward.function"},
    ),
    "trl_dr_grpo.py": (
        {
            "algorithm.reduction": "constant", "algorithm.normalize_std": False, "model.dtype": "float32",
            "rollout.max_response_length": 3000, "reward.function": "rewards.py:FILL_IN", "rollout.temperature": 0.9,
        }, {"reward_funcs"}, {"data.path", "reward.function"},
    ),
    "trl_gspo.py": (
        {
            "algorithm.ratio_level": "sequence", "algorithm.reduction": "sequence", f"{OBJECTIVE}clip_low": 3e-4,
            f"{OBJECTIVE}clip_high": 4e-4, "train.prompts_per_step": 4, "train.prompts_per_update": 1,
        }, set(), {"model.path", "data.path", "reward.function"},
    ),
    "trl_cispo.py": (
        {
            "algorithm.preset": "cispo", f"{OBJECTIVE}clip_high": 4.0, "algorithm.advantage": "batch-std",
            "algorithm.reduction": "token", "algorithm.normalize_std": None,
        }, set(), {"model.path", "data.path", "reward.function"},
    ),
    "trl_sapo.py": (
        {
            "algorithm.preset": "sapo", f"{OBJECTIVE}tau_pos": 1.5, f"{OBJECTIVE}tau_neg": 2.0,
            "algorithm.reduction": "sequence", f"{OBJECTIVE}entropy_coef": 0.001,
        }, set(), {"model.path", "data.path", "reward.function"},
    ),
    "trl_server.py": (
        {
            "rollout.engine": "vllm", "rollout.mode": "server", "rollout.server_url": "http://10.0.0.7:8001",
            f"{OBJECTIVE}mismatch_cap": 2.0, f"{OBJECTIVE}mismatch_low": 0.5, f"{OBJECTIVE}mismatch_mode": "truncate",
            "algorithm.mismatch_level": "token",
        }, {"vllm_server_timeout", "logging_steps"}, {"model.path", "data.path", "reward.function"},
    ),
    "trl_lora.py": (
        {
            "model.lora.rank": 32, "model.lora.alpha": 64.0, "model.lora.target_modules": ["q_proj", "v_proj"],
            "model.attention": "flash_attention_2", "model.gradient_checkpointing": False,
            "train.lr_schedule": "cosine", "train.lr_min_ratio": 0.1, "train.warmup_ratio": 0.05,
            "train.weight_decay": 0.1, "train.betas": [0.9, 0.99], "train.grad_clip": 0.2, "train.seed": 7,
            "log.wandb": "huggingface", "train.deterministic": True,
        }, {"LoraConfig.lora_dropout", "deepspeed", "model_init_kwargs.dtype"}, {"data.path"},
    ),
    "trl_rewards.py": (
        {
            "data.path": "data/train.jsonl", "reward.function": {"math_verify": 1.0, "rewards.py:short": 0.2},
            "rollout.mode": "colocated", "rollout.gpu_memory_utilization": 0.6, "rollout.tensor_parallel_size": 2,
            "rollout.sleep": True, "algorithm.top_entropy": 0.2, f"{OBJECTIVE}dual_clip": 4.0,
            f"{OBJECTIVE}mismatch_cap": None,
        }, set(), {"reward.function"},
    ),
    "trl_unread.py": (
        {"output_dir": "runs/unread", "train.lr": 1e-6, "train.epochs": 3, "checkpoint.every": 0},
        {"top_p", "num_generation", "hub_model_id"},
        {"model.path", "data.path", "reward.function", "train.lr", "train.epochs"},
    ),
    "verl_grpo.sh": (
        {
            "output_dir": "checkpoints/grpo_example/qwen2_7b", "data.path": str(Path("~/data/gsm8k/train.parquet")),
            "data.answer": "reward_model.ground_truth", "data.max_dropped_share": 1.0, "rollout.group_size": 5,
            "rollout.gpu_memory_utilization": 0.6, "rollout.tensor_parallel_size": 2, "rollout.sleep": True,
            "algorithm.preset": "grpo", "algorithm.reduction": "token", f"{OBJECTIVE}kl_coef": 0.001,
            f"{OBJECTIVE}kl_estimator": "k3", f"{OBJECTIVE}dual_clip": 3.0, "train.prompts_per_step": 1024,
            "train.prompts_per_update": 256, "train.tokens_per_micro_batch": 40 * 1536, "train.epochs": 15,
            "train.zero_stage": 3, "checkpoint.every": 20, "evaluation.every": None, "evaluation.samples": 1,
            "evaluation.temperature": 0.0, "log.wandb": "grpo_example",
        },
        {
            "data.truncation", f"{M}use_remove_padding", f"{A}fsdp_config.param_offload",
            "trainer.test_freq", "$@",
        }, {"reward.function"},
    ),
    "verl_ppo.sh": (
        {
            "algorithm.preset": "ppo", "algorithm.recipe.gae_lambda": 0.95, "algorithm.recipe.lr": 1e-5,
            "algorithm.recipe.value_clip": 0.5, "algorithm.recipe.critic_updates": 4, "rollout.group_size": 1,
            "algorithm.reward_kl_coef": 0.002, f"{OBJECTIVE}clip_low": 0.2, "train.steps": 100, "train.epochs": None,
            "train.prompts_per_update": 64, "train.tokens_per_micro_batch": 768,
        }, {f"{A}clip_ratio", "critic.model.path", "critic.ppo_micro_batch_size_per_gpu"}, {"reward.function"},
    ),
    "verl_dapo.sh": (
        {
            "model.path": "models/Qwen2.5-32B", "data.path": "data/dapo-math-17k.parquet",
            "data.max_prompt_length": 2048, "rollout.max_response_length": 20480, "rollout.group_size": 16,
            f"{OBJECTIVE}clip_low": 0.2, f"{OBJECTIVE}clip_high": 0.28, f"{OBJECTIVE}dual_clip": 10.0,
            "algorithm.refill.max_draws": 10, "algorithm.shaping.overlong": 0.2, "train.sequence_parallel": 8,
            "train.tokens_per_micro_batch": 22528, "train.warmup_steps": 10, "train.weight_decay": 0.1,
            "train.prompts_per_step": 512, "train.prompts_per_update": 32,
        },
        {"data.truncation", "data.gen_batch_size", "algorithm.filter_groups.metric", "reward_model.reward_manager"},
        {"reward.function"},
    ),
    "verl_rloo.sh": (
        {
            "data.path": ["a.parquet", "b.parquet"], "algorithm.advantage": "leave-one-out",
            "train.lr_schedule": "cosine", "train.lr_min_ratio": 0.1, "train.warmup_ratio": 0.03, "train.seed": 3,
            "reward.function": "rewards.py:grade", "rollout.engine": "vllm", "train.deterministic": True,
        }, {f"{R}name"}, {"reward.function"},
    ),
    "verl_reinforce.sh": (
        {
            "algorithm.advantage": "batch", "rollout.group_size": 8, f"{OBJECTIVE}kl_estimator": "k2",
            "algorithm.reduction": "sequence", f"{OBJECTIVE}mismatch_cap": 3.0, "algorithm.mismatch_level": "token",
        }, {"trainer.val_before_train"}, {"reward.function"},
    ),
    "verl_lora.sh": (
        {
            "output_dir": "out/lora", "model.lora.rank": 64, "model.lora.alpha": 32.0, "model.attention": "eager",
            "model.overrides": {"max_position_embeddings": 32768}, "rollout.sleep": False,
            "train.tokens_per_micro_batch": 4096,
        }, {f"{M}use_shm", f"{R}load_format"}, {"reward.function"},
    ),
    "verl_gspo.sh": (
        {
            "algorithm.preset": "gspo", "algorithm.reduction": "sequence", f"{OBJECTIVE}clip_low": 3e-4,
            f"{OBJECTIVE}clip_high": 4e-4, f"{OBJECTIVE}dual_clip": None, "train.grad_clip": 0.5,
        }, {f"{R}top_p", f"{A}loss_agg_mode"}, {"reward.function"},
    ),
    "verl_arrays.sh": (
        {
            "model.path": "Qwen/Qwen2.5-1.5B", "train.prompts_per_step": 128, "train.prompts_per_update": None,
            "algorithm.reduction": "constant", "algorithm.normalize_std": False, "rollout.temperature": 0.8,
            f"{OBJECTIVE}clip_high": None, "rollout.group_size": 1, "evaluation.every": 10, "evaluation.samples": 4,
            "evaluation.temperature": 0.6,
        },
        {f"{A}clip_ratio_high", f"{A}clip_ratio_c", f"{A}ppo_mini_batch_size", '"$@"'},
        {"reward.function", "rollout.group_size"},
    ),
    "verl_branches.sh": (
        {
            "rollout.max_response_length": 2048, "rollout.group_size": 8, f"{OBJECTIVE}kl_coef": 0.0,
            "rollout.temperature": 1.0, "rollout.gpu_memory_utilization": 0.5, "train.sequence_parallel": 2,
        },
        {"--config-name", f"{A}kl_loss_coef", "trainer.logger", "trainer.val_before_train"},
        {"reward.function", "rollout.temperature", "rollout.gpu_memory_utilization"},
    ),
    "trl_around.py": (
        {
            "output_dir": "around", "train.lr": 1e-5, "rollout.max_response_length": 256, f"{OBJECTIVE}kl_coef": 0.02,
            "model.attention": "sdpa", "data.path": "hf://openai/gsm8k/main/train", "train.prompts_per_step": 8,
            "model.lora": {"rank": 16, "alpha": 8.0}, "reward.function": "rewards.py:accuracy_reward",
            "train.steps": None,
        },
        {
            "LoraConfig.target_modules", "LoraConfig.use_rslora", "GRPOTrainer.train_dataset.map",
            "GRPOTrainer.eval_dataset", "GRPOTrainer.environment_factory", "model_init_kwargs.dtype",
            "load_dataset('HuggingFaceH4/aime_2024', split='train')",
        }, {"reward.function", "train.epochs"},
    ),
}  # fmt: skip


def at(values: Any, key: str) -> Any:
    """The value under a dotted key; None if it is left out."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


@pytest.mark.parametrize("script", CASES)
def test_a_script_becomes(script: str, tmp_path: Path) -> None:
    expected, lost, missing = CASES[script]
    guessed = {"data.prompt", "data.answer"} if script.startswith("trl") else set()
    converted = convert(SCRIPTS / script, gpus=4 if script == "trl_accumulation.py" else 1)
    values = yaml.safe_load(converted.text)
    assert {key: at(values, key) for key in expected} == expected
    assert {re.sub(r" \((line \d+|default)\)$", "", line.partition(": ")[0]) for line in converted.lost} == lost
    assert {line.partition(":")[0] for line in converted.missing} == missing | guessed
    (path := tmp_path / "run.yaml").write_text(converted.text)
    assert load_config(path) == converted.config
    graded = convert(SCRIPTS / script, gpus=4 if script == "trl_accumulation.py" else 1, overrides=["reward.kind=oat"])
    for reward in (converted.config.reward, graded.config.reward):  # both grade responses that were cut off
        assert (reward.cut_off, reward.box) == ("grade", "optional" if script.startswith("trl") else "auto")
    assert graded.config.reward.names == ["oat"]
    assert all(line in converted.text for line in (*converted.lost, *converted.missing))


def test_every_script_has_a_case() -> None:
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == CASES.keys()
    assert len(CASES) == 22


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.yaml"
    assert main(["convert", str(SCRIPTS / "verl_gspo.sh"), "--out", str(out), "reward.kind=math_verify"]) == 0
    said = capsys.readouterr().out
    assert "Fill in" not in said
    assert f"{R}top_p (line 7): the loss there is of the whole vocabulary" in said
    text = out.read_text()
    assert f"group_size: 16  # {R}n (line 3)" in text
    assert f"clip_low: 0.0003  # {A}clip_ratio_low (line 6)" in text
    assert load_config(out).reward.kind == "math_verify"
    assert main(["convert", str(SCRIPTS / "verl_gspo.sh"), "--out", str(out)]) == 2
    assert out.read_text() == text


def converted_text(text: str, folder: Path, name: str = "script.py") -> Any:
    (path := folder / name).write_text(text)
    return convert(path)


def test_a_script_is_not_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"open({str(made)!r}, 'w')\nfrom trl import GRPOConfig\nGRPOConfig(output_dir=open({str(made)!r}, 'w'))\n"
    converted_text(text, tmp_path)
    command = (
        f"X=$(touch {made})\npython -m verl.trainer.main_ppo trainer.a=`touch {made}` algorithm.adv_estimator=grpo\n"
    )
    converted_text(command, tmp_path, "script.sh")
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "print(1)", "want one call of TRL's GRPOConfig; got none"),
        ("a.py", "GRPOConfig()\nGRPOConfig()", "want one call of TRL's GRPOConfig; got 2, in lines 1, 2"),
        ("a.py", "x = 1\nGRPOConfig(", r"a\.py, line 2: not valid Python: '\(' was never closed"),
        (
            "a.py",
            "\nTrlParser((ScriptArguments, GRPOConfig))",
            r"got none: TrlParser \(line 2\) takes the arguments from a command line, which cannot be read",
        ),
        ("rows.jsonl", '{"prompt": "1"}', r"a shell script \(.sh\); got .*rows\.jsonl, which ends in \.jsonl"),
        (
            "a.py",
            "GRPOConfig(\n    num_generations=0,\n)",
            r"^want TRL's num_generations an integer of at least 1; got 0 \(line 2\)$",
        ),
        ("a.py", 'GRPOConfig(num_generations="eight")', r"an integer of at least 1; got 'eight' \(line 1\)$"),
        ("a.py", "GRPOConfig(gradient_accumulation_steps=0)", r"gradient_accumulation_steps an integer .*; got 0 \("),
        ("a.py", 'GRPOConfig(beta="small")', r"^want TRL's beta a number; got 'small' \(line 1\)$"),
        ("a.py", "GRPOConfig(num_train_epochs=0)", r"^want TRL's num_train_epochs a number greater than 0; got 0 \("),
        (
            "a.py",
            "GRPOConfig(num_generations=3)",
            "per_device_train_batch_size 8 on 1 process: name their number by --gpus$",
        ),
        ("a.py", 'GRPOConfig(loss_type="vespo")', "want TRL's loss_type one of grpo, dapo, .*; got 'vespo'"),
        (
            "a.py",
            "GRPOConfig(num_generations=16)",
            "want TRL's generation batch a multiple of num_generations 16",
        ),
        ("a.py", 'GRPOConfig(loss_type="cispo")', "the largest ratio of loss_type cispo, at least 1; got 0.2"),
        ("a.py", "GRPOConfig(learning_rate=-1.0)", r"train.lr: want greater than 0; got -1.0"),
        ("a.sh", "python train.py", "want one command of verl.trainer.main_ppo; got none"),
        (
            "a.sh",
            "python -m verl.trainer.main_ppo algorithm.adv_estimator=remax",
            "one of .*; got 'remax'",
        ),
        (
            "a.sh",
            f"python -m verl.trainer.main_ppo {A}policy_loss.loss_mode=clip_cov algorithm.adv_estimator=grpo",
            "want verl's policy_loss.loss_mode one of vanilla, gspo, cispo, sapo; got 'clip_cov'",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        converted_text(text, tmp_path, name)


def test_no_script(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want a Python file with a GRPOConfig, or a shell script of verl; got .*: "):
        convert(tmp_path / "none.py")


def test_an_attribute_that_is_assigned_later_is_listed(tmp_path: Path) -> None:
    text = "a = GRPOConfig(learning_rate=1e-5)\na.learning_rate = 3e-5\na.logging_steps = 7\nb.beta = 1.0\n"
    text += "self.epsilon = 1\na.seed += 1\n"
    converted = converted_text(text, tmp_path)
    missing = dict(line.split(": ", 1) for line in converted.missing)
    assert missing["train.lr"] == "learning_rate (line 2 could not be read); 1e-06 is by TRL's default"
    assert missing["train.seed"] == "seed (line 6 could not be read); 42 is by TRL's default"
    assert any(line.startswith("logging_steps (line 3): ") for line in converted.lost)
    assert missing["algorithm.objective.kl_coef"] == "beta (line 4 could not be read); 0.0 is by TRL's default"
    assert "algorithm.objective.clip_low" not in missing
    assert "lr: 1.0e-06  # FILL IN; learning_rate (line 2 could not be read)" in converted.text
    trainer = converted_text("t = GRPOTrainer(args=GRPOConfig())\nt.args.learning_rate = 1\n", tmp_path)
    assert any(line.startswith("train.lr: learning_rate (line 2 could not be read)") for line in trainer.missing)


def test_none_is_kept_where_it_has_a_meaning_and_else_to_be_filled_in(tmp_path: Path) -> None:
    given = "max_grad_norm=None, vllm_importance_sampling_clip_max=None, max_completion_length=None, delta=None"
    (script := tmp_path / "a.py").write_text(f"GRPOConfig(use_vllm=True, {given})")
    converted = convert(script)
    assert "mismatch_cap: 1000000000.0  # vllm_importance_sampling_clip_max (line 1); no cap" in converted.text
    assert "grad_clip: 1000000000.0  # max_grad_norm (line 1); no clipping" in converted.text
    assert "max_response_length: 512  # FILL IN; max_completion_length (line 1 gives no value)" in converted.text
    keys = "actor_rollout_ref.actor.grad_clip=null data.max_response_length=null trainer.total_epochs=null"
    cap = "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=null"
    rest = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr_warmup_steps=null"
    (script := tmp_path / "a.sh").write_text(f"python -m verl.trainer.main_ppo {keys} {cap} {rest}")
    missing = [line.partition(":")[0] for line in convert(script).missing if "gives no value" in line]
    assert {*missing} == {f"{OBJECTIVE}mismatch_cap", "train.grad_clip", "rollout.max_response_length",
                          "train.epochs", "train.tokens_per_micro_batch"}  # fmt: skip


def test_guessed_columns_are_to_be_filled_in(tmp_path: Path) -> None:
    (path := tmp_path / "a.py").write_text("GRPOConfig()")
    before = {line.partition(":")[0] for line in convert(path).missing}
    after = convert(path, overrides=["data.answer=final"])
    assert {"data.prompt", "data.answer"} <= before
    assert {line.partition(":")[0] for line in after.missing} == before - {"data.answer"}
    assert "solution" not in after.text


@pytest.mark.parametrize("value", [0, -1, 2.5, 1e999, "eight", [], {"a": "b"}], ids=repr)
def test_nonsense_is_refused_in_words(value: Any, tmp_path: Path) -> None:
    for name in (*TRL, *TRL_DEFAULTS):
        with contextlib.suppress(ValueError):  # any other error would be a traceback
            converted_text(f"GRPOConfig(**{{{name!r}: {value!r}}})".replace("inf", "1e999"), tmp_path)
    for name in VERL_DEFAULTS:
        with contextlib.suppress(ValueError):
            verl = f"python -m verl.trainer.main_ppo '{name}={json.dumps(value)}'"
            converted_text(verl, tmp_path, "script.sh")


def test_every_argument_of_the_trainers_has_a_name_here_or_a_reason() -> None:
    arguments = {name for name in TrainingArguments.__dataclass_fields__ if not name.startswith("_")}
    assert arguments - TRL.keys() - WITHOUT["TRL"].keys() == set()
    assert TRL_DEFAULTS.keys() - TRL.keys() - WITHOUT["TRL"].keys() == set()
    known = {*VERL, *WITHOUT["verl"], *(name for name in VERL_DEFAULTS if at_home(name))}
    assert [name for name in VERL_DEFAULTS if ending(name, known) is None] == []
    assert TRL.keys() & WITHOUT["TRL"].keys() == set()
    assert VERL.keys() & WITHOUT["verl"].keys() == set()


def at_home(name: str) -> bool:
    """Whether the key has the same name here, or one so near that a mistyped one of ours may be meant."""
    return name in ("data.max_prompt_length", "algorithm.gamma")


def test_presets_that_are_converted_to_exist() -> None:
    from rlplus.tools.convert.trl_arguments import LOSSES
    from rlplus.tools.convert.verl_overrides import MODES

    assert {preset for preset, _ in LOSSES.values()} | {*MODES.values(), "ppo"} <= ALGORITHMS.keys()
