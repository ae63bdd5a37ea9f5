"""TRL's arguments of GRPOConfig, by the key here with their meaning; and those without one.

TRL 1.16, with transformers 5.24's TrainingArguments.
"""

NAMES = {
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
    "entropy_coef": "algorithm.objective.entropy_coef",
    "temperature": "rollout.temperature",
    "output_dir": "output_dir",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "weight_decay": "train.weight_decay",
    "seed": "train.seed",
    "trust_remote_code": "model.trust_remote_code",
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
    "warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_ratio",
    "lr_scheduler_kwargs": "train.lr_min_ratio",
    "activation_checkpointing": "model.gradient_checkpointing",
    "bf16": "model.dtype",
    "torch_compile": "train.compile",
    "full_determinism": "train.deterministic",
    "steps_per_generation": "train.prompts_per_step",
    "use_vllm": "rollout.engine",
    "vllm_server_host": "rollout.server_url",
    "vllm_server_port": "rollout.server_url",
    "vllm_importance_sampling_correction": "algorithm.objective.mismatch_cap",
    "vllm_importance_sampling_mode": "algorithm.mismatch_level",
    "vllm_importance_sampling_clip_max": "algorithm.objective.mismatch_cap",
    "vllm_importance_sampling_clip_min": "algorithm.objective.mismatch_low",
    "use_bias_correction_kl": "algorithm.objective.kl_estimator",
    "sapo_temperature_pos": "algorithm.objective.tau_pos",
    "sapo_temperature_neg": "algorithm.objective.tau_neg",
    "reward_weights": "reward.function",
    "max_prompt_length": "data.max_prompt_length",
    "save_strategy": "checkpoint.every",
    "project": "log.wandb",
    "deepspeed": "train.zero_stage",
    "model_init_kwargs": "model.dtype",
}

# Names without a counterpart, by what holds here instead.
WITHOUT = {
    "the loss there is of the whole vocabulary, while rollout.top_k, top_p and min_p train the policy that sampled": (
        "top_p top_k min_p"
    ),
    "logprobs are of the distribution that sampled: temperature, top_k, top_p and min_p alone shape it": (
        "repetition_penalty generation_kwargs vllm_structured_outputs_regex"
    ),
    "every step's samples are trained on once": "num_iterations",
    "the reference is the model at the start": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "a response that was cut is trained on, with the reward of reward.cut_off or algorithm.shaping.overlong": (
        "mask_truncated_completions"
    ),
    "sequences are not masked; algorithm.objective.mismatch_mode mask leaves tokens out": ("off_policy_mask_threshold"),
    "the coefficient is constant: algorithm.objective.entropy_coef": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "VESPO is none of the objectives": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    "rewards are summed, then normalised": "multi_objective_aggregation",
    "tools and several turns are a function, rollout.function": "max_tool_calling_iterations",
    "the loss is the objective's alone": (
        "router_aux_loss_coef label_smoothing_factor neftune_noise_alpha average_tokens_across_devices"
    ),
    "logits are fp32 in the fused head anyway": "cast_lm_head_to_fp32",
    "the trainer does so anyway": (
        "disable_dropout shuffle_dataset remove_unused_columns ds3_gather_for_generation log_on_each_node "
        "logging_first_step use_cache ddp_find_unused_parameters dataloader_in_order ignore_data_skip "
        "restore_callback_states_from_checkpoint"
    ),
    "the chat template has no further arguments; data.system_prompt and model.chat_template change it": (
        "chat_template_kwargs"
    ),
    "samples are packed: nothing is padded to a multiple": (
        "pad_to_multiple_of group_by_length train_sampling_strategy length_column_name"
    ),
    "the engine takes its length from data.max_prompt_length and rollout.max_response_length": (
        "vllm_max_model_length"
    ),
    "weights reach a server as rollout.transfer says": "vllm_group_port vllm_server_timeout",
    "engine arguments go under rollout.vllm": (
        "vllm_model_impl cache_implementation use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged"
    ),
    "samples are kept by log.samples_every, metrics of each step in metrics.jsonl": (
        "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo "
        "logging_steps logging_strategy logging_nan_inf_filter include_num_input_tokens_seen log_level "
        "log_level_replica disable_tqdm run_name trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "evaluations are pass@k on problems: evaluation.data, evaluation.every, evaluation.samples": (
        "eval_strategy eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "batch_eval_metrics num_generations_eval do_eval do_predict do_train"
    ),
    "validation.every chooses the best checkpoint": ("load_best_model_at_end metric_for_best_model greater_is_better"),
    "a checkpoint is complete, and a run resumes with --resume": (
        "save_only_model save_on_each_node enable_jit_checkpoint resume_from_checkpoint"
    ),
    "`rlplus push` uploads a finished run, and nothing else does": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "the optimizer is AdamW with an epsilon of 1e-8": "optim optim_args optim_target_modules adam_epsilon",
    "weights are bfloat16 or float32: model.dtype": "fp16 fp16_full_eval bf16_full_eval tf32",
    "DeepSpeed places the model: train.zero_stage, train.offload_optimizer": (
        "fsdp fsdp_config parallelism_config accelerator_config ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend"
    ),
    "train.collective_timeout_s limits how long ranks wait": "ddp_timeout",
    "train.seed seeds everything": "data_seed",
    "train.compile has no further settings": "torch_compile_backend torch_compile_mode",
    "checkpointing and Liger's kernels have no further settings": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs liger_kernel_config"
    ),
    "rlplus plan says beforehand what fits": "auto_find_batch_size torch_empty_cache_steps skip_memory_metrics",
    "the launcher and the machine decide it": (
        "local_rank use_cpu debug label_names dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context"
    ),
}
