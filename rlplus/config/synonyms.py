"""Names that other trainers have for this package's keys, so that an unknown key can be answered with the one meant."""

# Arguments of TRL's GRPOConfig and of transformers' TrainingArguments.
TRL = {
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_schedule",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "per_device_train_batch_size": "train.tokens_per_micro_batch",
    "gradient_accumulation_steps": "train.prompts_per_update",
    "generation_batch_size": "train.prompts_per_step",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_response_length",
    "vllm_mode": "rollout.mode",
    "vllm_server_base_url": "rollout.server_url",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_enable_sleep_mode": "rollout.sleep",
    "vllm_importance_sampling_cap": "algorithm.objective.mismatch_cap",
    "beta": "algorithm.objective.kl_coef",
    "epsilon": "algorithm.objective.clip_low",
    "epsilon_high": "algorithm.objective.clip_high",
    "delta": "algorithm.objective.dual_clip",
    "loss_type": "algorithm.reduction",
    "scale_rewards": "algorithm.normalize_std",
    "importance_sampling_level": "algorithm.ratio_level",
    "top_entropy_quantile": "algorithm.top_entropy",
    "reward_funcs": "reward.function",
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "torch_dtype": "model.dtype",
    "use_liger_kernel": "model.liger",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "eval_steps": "evaluation.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "report_to": "log.wandb",
    "dataset_name": "data.path",
}

# Ends of verl's dotted paths.
VERL = {
    "actor.optim.lr": "train.lr",
    "optim.lr_warmup_steps": "train.warmup_steps",
    "optim.lr_warmup_steps_ratio": "train.warmup_ratio",
    "optim.weight_decay": "train.weight_decay",
    "actor.grad_clip": "train.grad_clip",
    "data.train_batch_size": "train.prompts_per_step",
    "actor.ppo_mini_batch_size": "train.prompts_per_update",
    "actor.ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "actor.ppo_micro_batch_size_per_gpu": "train.tokens_per_micro_batch",
    "actor.ulysses_sequence_parallel_size": "train.sequence_parallel",
    "trainer.total_epochs": "train.epochs",
    "trainer.total_training_steps": "train.steps",
    "trainer.test_freq": "evaluation.every",
    "trainer.save_freq": "checkpoint.every",
    "trainer.default_local_dir": "output_dir",
    "data.train_files": "data.path",
    "data.val_files": "validation.data.path",
    "data.prompt_key": "data.prompt",
    "data.max_response_length": "rollout.max_response_length",
    "rollout.n": "rollout.group_size",
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "rollout.val_kwargs.temperature": "evaluation.temperature",
    "rollout.val_kwargs.n": "evaluation.samples",
    "actor.clip_ratio": "algorithm.objective.clip_low",
    "actor.clip_ratio_low": "algorithm.objective.clip_low",
    "actor.clip_ratio_high": "algorithm.objective.clip_high",
    "actor.clip_ratio_c": "algorithm.objective.dual_clip",
    "actor.entropy_coeff": "algorithm.objective.entropy_coef",
    "actor.kl_loss_coef": "algorithm.objective.kl_coef",
    "actor.kl_loss_type": "algorithm.objective.kl_estimator",
    "actor.loss_agg_mode": "algorithm.reduction",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "algorithm.kl_ctrl.kl_coef": "algorithm.reward_kl_coef",
    "algorithm.filter_groups.enable": "algorithm.refill",
    "algorithm.lam": "algorithm.recipe",
    "model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "model.use_liger": "model.liger",
    "model.lora_rank": "model.lora.rank",
    "custom_reward_function.path": "reward.function",
}

# Arguments of OpenRLHF's train_ppo_ray.
OPENRLHF = {
    "pretrain": "model.path",
    "save_path": "output_dir",
    "actor_learning_rate": "train.lr",
    "rollout_batch_size": "train.prompts_per_step",
    "n_samples_per_prompt": "rollout.group_size",
    "generate_max_len": "rollout.max_response_length",
    "prompt_max_len": "data.max_prompt_length",
    "max_epochs": "train.epochs",
    "init_kl_coef": "algorithm.reward_kl_coef",
    "eps_clip": "algorithm.objective.clip_low",
    "adam_offload": "train.offload_optimizer",
    "prompt_data": "data.path",
    "input_key": "data.prompt",
    "label_key": "data.answer",
    "advantage_estimator": "algorithm.advantage",
    "max_norm": "train.grad_clip",
    "l2": "train.weight_decay",
    "ring_attn_size": "train.sequence_parallel",
}

# Words of no one trainer.
COMMON = {
    "batch_size": "train.prompts_per_step",
    "train_batch_size": "train.prompts_per_step",
    "mini_batch_size": "train.prompts_per_update",
    "kl_coef": "algorithm.objective.kl_coef",
    "clip_eps": "algorithm.objective.clip_low",
    "max_new_tokens": "rollout.max_response_length",
    "max_tokens": "rollout.max_response_length",
    "max_length": "rollout.max_response_length",
    "model_name": "model.path",
    "num_epochs": "train.epochs",
    "bf16": "model.dtype",
}

# Sizes that others count in sequences or steps.
COUNTED = {
    "train.tokens_per_micro_batch": ", in tokens",
    "train.prompts_per_step": ", in prompts",
    "train.prompts_per_update": ", in prompts",
}


def synonym(key: str) -> str | None:
    """The meaning of an unknown key elsewhere, as in "TRL's beta is algorithm.objective.kl_coef here"."""
    for name, here in VERL.items():
        if key == name or key.endswith(f".{name}"):
            return f"verl's {name} is {here} here{COUNTED.get(here, '')}"
    last = key.rpartition(".")[2].lstrip("-").replace("-", "_")
    for trainer, names in (("TRL", TRL), ("OpenRLHF", OPENRLHF)):
        if last in names:
            return f"{trainer}'s {last} is {names[last]} here{COUNTED.get(names[last], '')}"
    return f"here it is {COMMON[last]}{COUNTED.get(COMMON[last], '')}" if last in COMMON else None
