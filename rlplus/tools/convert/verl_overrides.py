"""verl's PPO trainer as a run of ours. Defaults: verl 0.9."""

from typing import Any

from rlplus.common.errors import check_name
from rlplus.tools.convert.draft import Draft, Script
from rlplus.train.config.synonyms import WITHOUT

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
M = "actor_rollout_ref.model."
DEFAULTS: dict[str, Any] = {
    f"{A}optim.lr": 1e-6, f"{A}optim.lr_warmup_steps": -1, f"{A}optim.lr_warmup_steps_ratio": 0.0,
    f"{A}optim.lr_scheduler_type": "constant", f"{A}optim.min_lr_ratio": 0.0, f"{A}optim.weight_decay": 0.01,
    f"{A}grad_clip": 1.0, f"{A}ppo_mini_batch_size": 256, f"{A}use_dynamic_bsz": False,
    f"{A}ppo_max_token_len_per_gpu": 16384, f"{A}ppo_micro_batch_size_per_gpu": 1, f"{A}clip_ratio_low": 0.2,
    f"{A}clip_ratio_high": 0.2, f"{A}clip_ratio_c": 3.0, f"{A}loss_agg_mode": "token-mean",
    f"{A}entropy_coeff": 0, f"{A}use_kl_loss": False,
    f"{A}kl_loss_coef": 0.001, f"{A}kl_loss_type": "low_var_kl", f"{A}ulysses_sequence_parallel_size": 1,
    f"{A}policy_loss.loss_mode": "vanilla", f"{A}tau_pos": 1.0, f"{A}tau_neg": 1.05,
    f"{R}n": 1, f"{R}temperature": 1.0, f"{R}gpu_memory_utilization": 0.5, f"{R}tensor_model_parallel_size": 2,
    f"{R}free_cache_engine": True, f"{R}name": "vllm", f"{R}val_kwargs.n": 1, f"{R}val_kwargs.temperature": 0,
    f"{R}val_kwargs.do_sample": False, f"{M}enable_gradient_checkpointing": True, f"{M}lora_rank": 0,
    f"{M}lora_alpha": 16, f"{M}target_modules": "all-linear",
    "data.prompt_key": "prompt", "data.max_prompt_length": 512, "data.max_response_length": 512,
    "data.train_batch_size": 1024, "data.filter_overlong_prompts": False, "trainer.total_epochs": 30,
    "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k", "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1,
    "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0, "algorithm.use_kl_in_reward": False, "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "critic.optim.lr": 1e-5, "critic.optim.lr_warmup_steps": -1, "critic.cliprange_value": 0.5,
    "reward_model.overlong_buffer.penalty_factor": 1.0,
}  # fmt: skip
NOTHING = {
    f"{A}optim.lr_warmup_steps": -1, "critic.optim.lr_warmup_steps": -1, f"{A}optim.min_lr_ratio": 0.0,
    f"{A}ppo_micro_batch_size_per_gpu": 1,
}  # fmt: skip
OPTIONS = ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd")
OPTION = "the settings of that file are not read, and verl's defaults are taken: write them into the command"
ADVANTAGES = {
    "gae": "critic", "grpo": "group", "grpo_vectorized": "group", "rloo": "leave-one-out",
    "rloo_vectorized": "leave-one-out", "reinforce_plus_plus": "batch", "reinforce_plus_plus_baseline": "group-batch",
}  # fmt: skip
REDUCTIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
MODES = {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
ESTIMATORS |= {f"{name}+": "k2" for name in ("kl", "k1", "low_var_kl", "k3", "mse", "k2")}  # straight through k2


def from_verl(script: Script) -> Draft:
    """ValueError for an estimator or a loss that is none of ours."""
    draft = Draft("verl", script, DEFAULTS, NOTHING)
    names = ("trainer.project_name", "trainer.experiment_name")
    if draft.given("trainer.default_local_dir"):
        draft.take("output_dir", "trainer.default_local_dir")
    else:
        folder = "/".join(["checkpoints", *(str(draft.get(name)) for name in names)])
        draft.set("output_dir", folder, *draft.unread("trainer.default_local_dir"), *names)
    _model(draft)
    _data(draft)
    _reward(draft)
    _rollout(draft)
    _algorithm(draft)
    _train(draft)
    _evaluation(draft)
    draft.list_the_rest(WITHOUT["verl"] | dict.fromkeys(OPTIONS, OPTION), "no counterpart")
    return draft


def _model(draft: Draft) -> None:
    if draft.given(f"{M}path"):
        draft.take("model.path", f"{M}path")
    else:
        draft.fill_in("model.path", "FILL-IN", "what the command does not say in a way that can be read", f"{M}path")
    draft.take("model.gradient_checkpointing", f"{M}enable_gradient_checkpointing")
    if draft.get(f"{M}use_liger"):
        draft.set("model.liger", True, f"{M}use_liger")
    draft.take("model.trust_remote_code", f"{M}trust_remote_code")
    if draft.get(f"{M}lora_rank"):
        draft.take("model.lora.rank", f"{M}lora_rank")
        draft.set("model.lora.alpha", draft.number(f"{M}lora_alpha"), f"{M}lora_alpha")
        draft.take("model.lora.target_modules", f"{M}target_modules")
    for name in [name for name in draft.script.settings if name.startswith(f"{M}override_config.")]:
        field = name.removeprefix(f"{M}override_config.").removeprefix("model_config.")  # Megatron's fields are below
        key = "model.attention" if field == "attn_implementation" else f"model.overrides.{field}"
        draft.take(key, name)


def _data(draft: Draft) -> None:
    if draft.given("data.train_files"):
        draft.take("data.path", "data.train_files")
    else:
        note = "what the command does not say in a way that can be read"
        draft.fill_in("data.path", "FILL-IN.parquet", note, "data.train_files")
    draft.take("data.prompt", "data.prompt_key")
    draft.set("data.answer", "reward_model.ground_truth", note="verl's column")
    draft.take("data.max_prompt_length", "data.max_prompt_length")
    if draft.get("data.filter_overlong_prompts"):
        note = "longer prompts are dropped, however many"
        draft.set("data.max_dropped_share", 1.0, "data.filter_overlong_prompts", note=note)


def _reward(draft: Draft) -> None:
    prefix = next((p for p in ("", "reward.") if draft.has(f"{p}custom_reward_function.path")), None)
    if prefix is not None:
        names = (f"{prefix}custom_reward_function.path", f"{prefix}custom_reward_function.name")
        name = draft.get(names[1]) or "compute_score"
        form = "verl's takes (data_source, solution_str, ground_truth, extra_info), here (text, answer)"
        note = f"{name} of {draft.get(names[0]) or 'an unknown file'}: {form}"
        draft.fill_in("reward.function", f"rewards.py:{name}", note, *names)
    else:
        kinds = 'reward.kind math_verify, or exact_match with reward.pattern "#### (.+)" for GSM8K'
        draft.fill_in("reward.function", "rewards.py:FILL_IN", f"verl grades by a row's data_source; here {kinds}")
    draft.set("reward.cut_off", "grade", note="verl grades cut responses, too")


def _rollout(draft: Draft) -> None:
    engine = draft.get(f"{R}name")
    draft.set("rollout.engine", "transformers" if engine == "hf" else "vllm", f"{R}name")
    if engine not in ("vllm", "hf"):
        draft.lose(f"{R}name", f"{engine}: vLLM takes its place")
    draft.take("rollout.group_size", f"{R}n")
    draft.take("rollout.temperature", f"{R}temperature")
    draft.take("rollout.max_response_length", "data.max_response_length")
    if engine != "hf":
        draft.take("rollout.gpu_memory_utilization", f"{R}gpu_memory_utilization")
        draft.take("rollout.tensor_parallel_size", f"{R}tensor_model_parallel_size")
        draft.take("rollout.sleep", f"{R}free_cache_engine")
        draft.take("rollout.enforce_eager", f"{R}enforce_eager")


def _algorithm(draft: Draft) -> None:
    estimator = str(draft.get("algorithm.adv_estimator"))
    mode = str(draft.get(f"{A}policy_loss.loss_mode"))
    check_name("verl's algorithm.adv_estimator", estimator, ADVANTAGES)
    check_name("verl's policy_loss.loss_mode", mode, MODES)
    critic = estimator == "gae"
    names = ("algorithm.adv_estimator", f"{A}policy_loss.loss_mode")
    draft.set("algorithm.preset", "ppo" if critic else MODES[mode], *names)
    if critic:
        _critic(draft, mode)
    elif ADVANTAGES[estimator] == "group":
        draft.take("algorithm.normalize_std", "algorithm.norm_adv_by_std_in_grpo")
    else:
        draft.set("algorithm.advantage", ADVANTAGES[estimator], names[0])
    reduction = str(draft.get(f"{A}loss_agg_mode"))
    check_name("verl's loss_agg_mode", reduction, REDUCTIONS)
    if mode == "gspo":
        draft.set("algorithm.reduction", "sequence", f"{A}policy_loss.loss_mode", note="verl's GSPO has no other")
    else:
        draft.set("algorithm.reduction", REDUCTIONS[reduction], f"{A}loss_agg_mode")
    _clipping(draft, mode)
    draft.set("algorithm.objective.entropy_coef", draft.number(f"{A}entropy_coeff"), f"{A}entropy_coeff")
    _divergence(draft)
    _mismatch(draft)
    _filters(draft)


def _critic(draft: Draft, mode: str) -> None:
    if mode != "vanilla":
        raise ValueError(f"want policy_loss.loss_mode vanilla with adv_estimator gae; got {mode}")
    draft.set("algorithm.recipe.gamma", draft.number("algorithm.gamma"), "algorithm.gamma")
    draft.set("algorithm.recipe.gae_lambda", draft.number("algorithm.lam"), "algorithm.lam")
    draft.set("algorithm.recipe.stopped_only", False, note="verl rewards cut responses, too")
    draft.take("algorithm.recipe.lr", "critic.optim.lr")
    draft.set("algorithm.recipe.warmup_steps", max(0, draft.count("critic.optim.lr_warmup_steps", -1)),
              "critic.optim.lr_warmup_steps")  # fmt: skip
    draft.take("algorithm.recipe.value_clip", "critic.cliprange_value")
    updates = max(1, draft.count("data.train_batch_size") // draft.count(f"{A}ppo_mini_batch_size"))
    draft.set("algorithm.recipe.critic_updates", updates, "data.train_batch_size", f"{A}ppo_mini_batch_size")


def _clipping(draft: Draft, mode: str) -> None:
    low = draft.number(f"{A}clip_ratio_low")
    high = draft.number(f"{A}clip_ratio_high")
    if draft.given(f"{A}clip_ratio"):
        draft.lose(f"{A}clip_ratio", "verl itself takes clip_ratio_low and clip_ratio_high, which have defaults")
    if mode == "sapo":
        draft.take("algorithm.objective.tau_pos", f"{A}tau_pos")
        draft.take("algorithm.objective.tau_neg", f"{A}tau_neg")
        return
    draft.set("algorithm.objective.clip_high", high, f"{A}clip_ratio_high")
    if mode == "cispo":
        if low < 1:
            draft.lose(f"{A}clip_ratio_low", f"{low}: here CISPO's ratio has an upper bound only")
        return
    draft.set("algorithm.objective.clip_low", low, f"{A}clip_ratio_low")
    if mode == "vanilla":
        draft.take("algorithm.objective.dual_clip", f"{A}clip_ratio_c")


def _divergence(draft: Draft) -> None:
    coefficient = draft.number(f"{A}kl_loss_coef")
    kind = str(draft.get(f"{A}kl_loss_type"))
    if draft.get(f"{A}use_kl_loss"):
        check_name("verl's kl_loss_type (the gradient of kl is 0 in expectation)", kind, ESTIMATORS)
        draft.set("algorithm.objective.kl_coef", float(coefficient), f"{A}use_kl_loss", f"{A}kl_loss_coef")
        draft.set("algorithm.objective.kl_estimator", ESTIMATORS[kind], f"{A}kl_loss_type")
    else:
        draft.set("algorithm.objective.kl_coef", 0.0, f"{A}use_kl_loss")
    coefficient = draft.number("algorithm.kl_ctrl.kl_coef")
    kind = draft.get("algorithm.kl_penalty")
    if draft.get("algorithm.use_kl_in_reward"):
        names = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
        draft.set("algorithm.reward_kl_coef", float(coefficient), *names, "algorithm.kl_penalty")
        if kind not in ("kl", "k1"):
            draft.lose("algorithm.kl_penalty", f"{kind}: here the penalty is log p - log p_ref")
    else:
        draft.set("algorithm.reward_kl_coef", 0.0, "algorithm.use_kl_in_reward")


def _mismatch(draft: Draft) -> None:
    part = "algorithm.rollout_correction."
    level = draft.get(f"{part}rollout_is")
    cap = draft.number(f"{part}rollout_is_threshold")
    if level in ("token", "sequence"):
        draft.set("algorithm.mismatch_level", level, f"{part}rollout_is")
        draft.set("algorithm.objective.mismatch_cap", float(cap), f"{part}rollout_is_threshold")
    elif level is not None:
        draft.lose(f"{part}rollout_is", f"{level}: here algorithm.mismatch_level is token or sequence")


def _filters(draft: Draft) -> None:
    """DAPO's dynamic sampling and its penalty of long responses."""
    most = draft.get("algorithm.filter_groups.max_num_gen_batches")
    if draft.get("algorithm.filter_groups.enable"):
        names = ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches")
        draft.set("algorithm.refill.max_draws", most or 1000, *names)
        if draft.given("data.gen_batch_size"):
            draft.lose("data.gen_batch_size", "a draw has as many prompts as a step")
    for part in ("reward_model.overlong_buffer.", "reward.reward_kwargs.overlong_buffer_cfg."):
        on = draft.get(f"{part}enable")
        factor = draft.get(f"{part}penalty_factor")
        if not on:
            continue
        share = draft.count(f"{part}len") / draft.count("data.max_response_length")
        buffer = [f"{part}{name}" for name in ("enable", "len", "penalty_factor")]
        draft.set("algorithm.shaping.overlong", share, *buffer, "data.max_response_length")
        if factor not in (None, 1, 1.0):
            draft.lose(f"{part}penalty_factor", f"{factor}: here the penalty falls to -1")


def _train(draft: Draft) -> None:
    steps = draft.get("trainer.total_training_steps")
    if steps:
        draft.take("train.steps", "trainer.total_training_steps")
        draft.get("trainer.total_epochs")
    else:
        names = ("trainer.total_epochs", *draft.unread("trainer.total_training_steps"))
        draft.set("train.epochs", draft.get("trainer.total_epochs"), *names)
    draft.set("train.prompts_per_step", draft.count("data.train_batch_size"), "data.train_batch_size")
    if draft.count(f"{A}ppo_mini_batch_size") < draft.count("data.train_batch_size"):
        draft.take("train.prompts_per_update", f"{A}ppo_mini_batch_size")
    ulysses = f"{A}ulysses_sequence_parallel_size"
    parallel = 1
    if draft.get("algorithm.adv_estimator") == "gae" or draft.get("algorithm.use_kl_in_reward"):
        if draft.count(ulysses) > 1:
            draft.lose(ulysses, "train.sequence_parallel goes with neither a critic nor algorithm.reward_kl_coef")
    elif (parallel := draft.count(ulysses)) > 1:
        draft.take("train.sequence_parallel", ulysses)
    longest = draft.count("data.max_prompt_length") + draft.count("data.max_response_length")
    tokens = draft.count(f"{A}ppo_max_token_len_per_gpu")
    rows = draft.count(f"{A}ppo_micro_batch_size_per_gpu")
    if draft.get(f"{A}use_dynamic_bsz"):
        draft.set("train.tokens_per_micro_batch", tokens, f"{A}use_dynamic_bsz", f"{A}ppo_max_token_len_per_gpu")
    else:
        names = (f"{A}ppo_micro_batch_size_per_gpu", "data.max_prompt_length", "data.max_response_length")
        draft.set("train.tokens_per_micro_batch", -(-rows * longest // parallel), *names)
    optim = f"{A}optim."
    draft.take("train.lr", f"{optim}lr")
    name = f"{optim}warmup_style" if draft.has(f"{optim}warmup_style") else f"{optim}lr_scheduler_type"
    schedule = draft.get(name) or "constant"
    check_name(f"verl's {name}", schedule, ("constant", "cosine"))
    draft.set("train.lr_schedule", schedule, name)
    if schedule == "cosine":
        draft.set("train.lr_min_ratio", draft.number(f"{optim}min_lr_ratio"), f"{optim}min_lr_ratio")
    warmup = draft.count(f"{optim}lr_warmup_steps", -1)
    share = draft.get(f"{optim}lr_warmup_steps_ratio")
    if warmup > 0:
        draft.take("train.warmup_steps", f"{optim}lr_warmup_steps")
    elif share:
        draft.take("train.warmup_ratio", f"{optim}lr_warmup_steps_ratio")
    draft.set("train.weight_decay", draft.number(f"{optim}weight_decay"), f"{optim}weight_decay")
    draft.set("train.grad_clip", draft.number(f"{A}grad_clip"), f"{A}grad_clip")
    draft.set("train.zero_stage", 3, note="verl's FSDP shards the weights")
    draft.take("train.seed", "data.seed")
    if draft.get(name := f"{A}fsdp_config.full_determinism"):
        draft.set("train.deterministic", True, name)
    gpus = draft.count("trainer.n_gpus_per_node") * draft.count("trainer.nnodes")
    note = f"for torchrun on {gpus} GPUs in all"
    draft.comment("train", note, "trainer.n_gpus_per_node", "trainer.nnodes", note=note)


def _evaluation(draft: Draft) -> None:
    every = draft.count("trainer.test_freq", -1)
    samples = draft.get(f"{R}val_kwargs.n")
    greedy = not draft.get(f"{R}val_kwargs.do_sample") or draft.get(f"{R}val_kwargs.temperature") == 0
    if draft.given("data.val_files"):
        draft.take("evaluation.data.path", "data.val_files")
        keep = ("prompt", "answer", "max_prompt_length")
        draft.values["evaluation"]["data"] |= {key: draft.values["data"][key] for key in keep}
        if draft.get(f"{R}tensor_model_parallel_size") == 1:
            draft.set("evaluation.every", max(0, every), "trainer.test_freq")
        elif every > 0:
            draft.lose("trainer.test_freq", "engines that share GPUs do not evaluate in training: use rlplus eval")
        draft.set("evaluation.samples", 1 if greedy else samples, f"{R}val_kwargs.n")
        temperature = 0.0 if greedy else draft.number(f"{R}val_kwargs.temperature")
        draft.set("evaluation.temperature", temperature, f"{R}val_kwargs.temperature", f"{R}val_kwargs.do_sample")
    draft.set("checkpoint.every", max(0, draft.count("trainer.save_freq", -1)), "trainer.save_freq")
    draft.take("checkpoint.keep", "trainer.max_actor_ckpt_to_keep")
    if draft.given("trainer.logger") and "wandb" in str(draft.get("trainer.logger")):
        draft.set("log.wandb", draft.get("trainer.project_name"), "trainer.logger", "trainer.project_name")
