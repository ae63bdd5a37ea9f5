"""verl's keys of its PPO trainer, by their ends, with the key here of that meaning; and those without one.

verl 0.9.
"""

NAMES = {
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
    "custom_reward_function.name": "reward.function",
    "data.seed": "train.seed",
    "fsdp_config.full_determinism": "train.deterministic",
    "data.filter_overlong_prompts": "data.max_dropped_share",
    "data.gen_batch_size": "algorithm.refill",
    "optim.lr_scheduler_type": "train.lr_schedule",
    "optim.warmup_style": "train.lr_schedule",
    "optim.min_lr_ratio": "train.lr_min_ratio",
    "optim.betas": "train.betas",
    "optim.clip_grad": "train.grad_clip",
    "actor.use_dynamic_bsz": "train.tokens_per_micro_batch",
    "actor.use_kl_loss": "algorithm.objective.kl_coef",
    "actor.tau_pos": "algorithm.objective.tau_pos",
    "actor.tau_neg": "algorithm.objective.tau_neg",
    "policy_loss.loss_mode": "algorithm.objective.internal",
    "algorithm.use_kl_in_reward": "algorithm.reward_kl_coef",
    "algorithm.kl_penalty": "algorithm.reward_kl_coef",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.refill.max_draws",
    "overlong_buffer.enable": "algorithm.shaping",
    "overlong_buffer.len": "algorithm.shaping.overlong",
    "overlong_buffer.penalty_factor": "algorithm.shaping.overlong",
    "rollout_correction.rollout_is": "algorithm.mismatch_level",
    "rollout_correction.rollout_is_threshold": "algorithm.objective.mismatch_cap",
    "critic.optim.lr": "algorithm.recipe",
    "critic.cliprange_value": "algorithm.recipe",
    "rollout.free_cache_engine": "rollout.sleep",
    "rollout.temperature": "rollout.temperature",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.enforce_eager": "rollout.enforce_eager",
    "rollout.val_kwargs.do_sample": "evaluation.temperature",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "rollout.max_response_length",
    "actor_rollout_ref.model.path": "model.path",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.override_config": "model.overrides",
    "override_config.attn_implementation": "model.attention",
    "model.custom_chat_template": "model.chat_template",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.logger": "log.wandb",
    "trainer.project_name": "log.wandb",
}

# Names without a counterpart, by what holds here instead.
WITHOUT = {
    "the loss there is of the whole vocabulary, while rollout.top_k, top_p and min_p train the policy that sampled": (
        "rollout.top_p rollout.top_k"
    ),
    "logprobs are of the distribution that sampled, which ends at the end token": (
        "rollout.do_sample rollout.ignore_eos"
    ),
    "evaluations sample from the whole vocabulary": "val_kwargs.top_p val_kwargs.top_k",
    "every step's samples are trained on once, in the order of their prompts": (
        "actor.ppo_epochs actor.shuffle actor.data_loader_seed critic.ppo_epochs critic.shuffle"
    ),
    "weights stay where train.zero_stage and train.offload_params put them; rlplus plan says what fits": (
        "fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy "
        "fsdp_config.reshard_after_forward fsdp_config.fsdp_size fsdp_config.forward_prefetch "
        "fsdp_config.model_dtype fsdp_config.use_orig_params actor.strategy critic.strategy ref.strategy "
        "model.enable_activation_offload model.use_shm"
    ),
    "logprobs are computed in the micro-batches of train.tokens_per_micro_batch": (
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu critic.forward_micro_batch_size_per_gpu "
        "critic.ppo_max_token_len_per_gpu critic.use_dynamic_bsz critic.ppo_mini_batch_size "
        "actor.ppo_micro_batch_size"
    ),
    "samples are packed, and the head is fused, always": (
        "model.use_remove_padding critic.model.use_remove_padding model.use_fused_kernels "
        "model.fused_kernel_options.impl_backend actor.entropy_from_logits_with_chunking "
        "actor.entropy_checkpointing actor.use_torch_compile trainer.balance_batch actor.use_prefix_grouper"
    ),
    "engine arguments go under rollout.vllm, by vLLM's names": (
        "rollout.max_num_batched_tokens rollout.max_num_seqs rollout.max_model_len rollout.enable_chunked_prefill "
        "rollout.enable_prefix_caching rollout.load_format rollout.dtype rollout.disable_log_stats "
        "rollout.swap_space rollout.data_parallel_size rollout.expert_parallel_size rollout.cudagraph_capture_sizes "
        "rollout.layered_summon rollout.quantization rollout.logprobs_mode rollout.scheduling_policy "
        "rollout.skip_tokenizer_init"
    ),
    "the engine's place is rollout.mode": (
        "rollout.mode trainer.hybrid_engine actor_rollout_ref.hybrid_engine rollout.nnodes rollout.n_gpus_per_node"
    ),
    "the engine's logprobs are always compared: rollout.max_logprob_gap": "rollout.calculate_log_probs",
    "sequences are not rejected; algorithm.objective.mismatch_mode mask leaves tokens out": (
        "rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode "
        "rollout_correction.loss_type rollout_correction.rollout_is_batch_normalize"
    ),
    "tools and several turns are a function, rollout.function": (
        "rollout.multi_turn.enable rollout.multi_turn.max_assistant_turns rollout.multi_turn.max_user_turns "
        "rollout.multi_turn.tool_config_path rollout.multi_turn.format rollout.agent.num_workers "
        "rollout.agent.default_agent_loop rollout.agent.agent_loop_config_path data.tool_config_path "
        "data.return_raw_chat data.return_full_prompt"
    ),
    "rows with a longer prompt are dropped and counted, never cut": (
        "data.truncation data.filter_overlong_prompts_workers"
    ),
    "the data's order is shuffled by train.seed, and all rows are used": (
        "data.shuffle data.train_max_samples data.val_max_samples data.val_batch_size data.validation_shuffle "
        "data.dataloader_num_workers data.reward_fn_key data.tokenizer data.use_shm"
    ),
    "only text is trained on": "data.image_key data.video_key data.audio_key actor.freeze_vision_tower",
    "one grader for all rows: reward.kind or reward.function": (
        "reward_model.reward_manager reward.reward_manager.name reward_model.enable reward_model.model.path "
        "reward.reward_model.enable reward.reward_model.model_path reward.num_workers sandbox_fusion.url"
    ),
    "groups are filtered by their rewards": ("algorithm.filter_groups.metric filter_groups.max_inflight_gen_batches"),
    "the coefficient is constant": "algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
    "there is no such preference weighting": "algorithm.use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow",
    "the loss divides by a fixed length of rollout.max_response_length": "actor.loss_scale_factor",
    "it belongs to a loss that is none of the objectives": (
        "policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.kl_cov_ratio "
        "policy_loss.ppo_kl_coef policy_loss.dro_beta"
    ),
    "the value model is the policy's copy, with its settings": (
        "critic.model.path critic.model.tokenizer_path critic.model.enable_gradient_checkpointing "
        "critic.model.fsdp_config.param_offload critic.model.fsdp_config.optimizer_offload "
        "critic.optim.weight_decay critic.optim.lr_warmup_steps_ratio critic.grad_clip critic.loss_agg_mode "
        "trainer.critic_warmup trainer.max_critic_ckpt_to_keep"
    ),
    "the optimizer is AdamW, and a cosine ends with the run": (
        "optim.optimizer optim.optimizer_impl optim.num_cycles optim.total_training_steps "
        "optim.override_optimizer_config optim.zero_indexed_step"
    ),
    "torchrun starts the ranks": (
        "trainer.n_gpus_per_node trainer.nnodes trainer.device trainer.ray_wait_register_center_timeout "
        "actor_rollout_ref.nccl_timeout"
    ),
    "evaluations start at step evaluation.every; rlplus eval measures the model before": (
        "trainer.val_before_train trainer.val_only"
    ),
    "a run resumes with --resume, and keeps its samples by log.samples_every": (
        "trainer.resume_mode trainer.resume_from_path trainer.experiment_name trainer.log_val_generations "
        "trainer.rollout_data_dir trainer.validation_data_dir trainer.default_hdfs_dir "
        "trainer.del_local_ckpt_after_load checkpoint.save_contents checkpoint.load_contents checkpoint.async_save "
        "trainer.esi_redundant_time trainer.use_v1"
    ),
    "LoRA has a rank, alpha and modules": "model.exclude_modules model.lora_adapter_path",
    "the model is read from model.path as it is": "model.external_lib model.hf_config_path model.tokenizer_path",
}
