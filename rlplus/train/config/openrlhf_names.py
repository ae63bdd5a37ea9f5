"""OpenRLHF's arguments of train_ppo_ray, by the key here with their meaning; and those without one.

OpenRLHF 0.11 has the dotted names, earlier versions the flat ones. Those that end as the key here are left out.
"""

NAMES = {
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
    "full_determinism": "train.deterministic",
    "train.full_determinism_enable": "train.deterministic",
    "prompt_data": "data.path",
    "input_key": "data.prompt",
    "label_key": "data.answer",
    "advantage_estimator": "algorithm.advantage",
    "max_norm": "train.grad_clip",
    "l2": "train.weight_decay",
    "ring_attn_size": "train.sequence_parallel",
    "micro_train_batch_size": "train.tokens_per_micro_batch",
    "train_max_tokens_per_gpu": "train.tokens_per_micro_batch",
    "train_batch_size": "train.prompts_per_update",
    "num_episodes": "train.epochs",
    "adam_betas": "train.betas",
    "lr_scheduler": "train.lr_schedule",
    "lr_warmup_ratio": "train.warmup_ratio",
    "grad_accum_dtype": "train.deepspeed",
    "async_train": "train.overlap",
    "async_queue_size": "train.overlap",
    "critic_learning_rate": "algorithm.recipe",
    "lambd": "algorithm.recipe",
    "value_clip": "algorithm.recipe",
    "eps_clip_low_high": "algorithm.objective.clip_high",
    "entropy_loss_coef": "algorithm.objective.entropy_coef",
    "policy_loss_type": "algorithm.objective.internal",
    "use_kl_loss": "algorithm.objective.kl_coef",
    "enable_vllm_is_correction": "algorithm.objective.mismatch_cap",
    "vllm_is_truncated_threshold": "algorithm.objective.mismatch_cap",
    "vllm_is_correction_type": "algorithm.objective.mismatch_mode",
    "no_advantage_std_norm": "algorithm.normalize_std",
    "dynamic_filtering": "algorithm.refill",
    "dynamic_filtering_reward_range": "algorithm.refill.low",
    "overlong_buffer_len": "algorithm.shaping.overlong",
    "overlong_penalty_factor": "algorithm.shaping.overlong",
    "remote_rm_url": "reward.function",
    "agent_func_path": "rollout.function",
    "apply_chat_template": "data.chat",
    "max_len": "data.max_prompt_length",
    "max_samples": "data.limit",
    "attn_implementation": "model.attention",
    "flash_attn": "model.attention",
    "param_dtype": "model.dtype",
    "use_liger_kernel": "model.liger",
    "load_in_4bit": "model.lora.quantization",
    "lora_alpha": "model.lora.alpha",
    "lora_rank": "model.lora.rank",
    "max_ckpt_num": "checkpoint.keep",
    "save_steps": "checkpoint.every",
    "eval_dataset": "evaluation.data.path",
    "eval_n_samples_per_prompt": "evaluation.samples",
    "eval_steps": "evaluation.every",
    "eval_temperature": "evaluation.temperature",
    "use_wandb": "log.wandb",
    "wandb_project": "log.wandb",
    "vllm_enable_sleep": "rollout.sleep",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "actor.adam.lr": "train.lr",
    "actor.adam.betas": "train.betas",
    "actor.adam.weight_decay": "train.weight_decay",
    "actor.lr_scheduler": "train.lr_schedule",
    "actor.lr_warmup_ratio": "train.warmup_ratio",
    "actor.min_lr_ratio": "train.lr_min_ratio",
    "actor.max_norm": "train.grad_clip",
    "actor.model_name_or_path": "model.path",
    "actor.eps_clip": "algorithm.objective.clip_low",
    "actor.eps_clip_low_high": "algorithm.objective.clip_high",
    "actor.dual_clip": "algorithm.objective.dual_clip",
    "actor.entropy_coef": "algorithm.objective.entropy_coef",
    "actor.loss_agg_mode": "algorithm.reduction",
    "actor.policy_loss_type": "algorithm.objective.internal",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing",
    "algo.advantage.estimator": "algorithm.advantage",
    "algo.advantage.gamma": "algorithm.recipe",
    "algo.advantage.lambd": "algorithm.recipe",
    "algo.advantage.no_std_norm": "algorithm.normalize_std",
    "algo.advantage.is_correction_enable": "algorithm.objective.mismatch_cap",
    "algo.advantage.is_correction_level": "algorithm.mismatch_level",
    "algo.advantage.is_correction_mode": "algorithm.objective.mismatch_mode",
    "algo.advantage.is_correction_threshold": "algorithm.objective.mismatch_cap",
    "algo.advantage.is_correction_type": "algorithm.objective.mismatch_mode",
    "algo.dynamic_filtering_enable": "algorithm.refill",
    "algo.dynamic_filtering_range": "algorithm.refill.low",
    "algo.kl.estimator": "algorithm.objective.kl_estimator",
    "algo.kl.init_coef": "algorithm.reward_kl_coef",
    "algo.kl.use_loss": "algorithm.objective.kl_coef",
    "algo.kl.unbiased_gradient": "algorithm.objective.kl_estimator",
    "ckpt.output_dir": "output_dir",
    "ckpt.max_num": "checkpoint.keep",
    "ckpt.save_steps": "checkpoint.every",
    "critic.adam.lr": "algorithm.recipe",
    "critic.value_clip": "algorithm.recipe",
    "data.apply_chat_template": "data.chat",
    "data.input_key": "data.prompt",
    "data.label_key": "data.answer",
    "data.max_len": "data.max_prompt_length",
    "data.max_samples": "data.limit",
    "data.prompt_dataset": "data.path",
    "ds.adam_offload": "train.offload_optimizer",
    "ds.attn_implementation": "model.attention",
    "ds.grad_accum_dtype": "train.deepspeed",
    "ds.load_in_4bit": "model.lora.quantization",
    "ds.lora.alpha": "model.lora.alpha",
    "ds.lora.rank": "model.lora.rank",
    "ds.lora.target_modules": "model.lora.target_modules",
    "ds.param_dtype": "model.dtype",
    "ds.ring_attn_size": "train.sequence_parallel",
    "ds.use_liger_kernel": "model.liger",
    "ds.zero_stage": "train.zero_stage",
    "eval.dataset": "evaluation.data.path",
    "eval.n_samples_per_prompt": "evaluation.samples",
    "eval.steps": "evaluation.every",
    "eval.temperature": "evaluation.temperature",
    "logger.wandb.project": "log.wandb",
    "reward.overlong_buffer_len": "algorithm.shaping.overlong",
    "reward.overlong_penalty_factor": "algorithm.shaping.overlong",
    "reward.remote_url": "reward.function",
    "rollout.batch_size": "train.prompts_per_step",
    "rollout.max_new_tokens": "rollout.max_response_length",
    "rollout.n_samples_per_prompt": "rollout.group_size",
    "train.agent_func_path": "rollout.function",
    "train.async_enable": "train.overlap",
    "train.async_queue_size": "train.overlap",
    "train.batch_size": "train.prompts_per_update",
    "train.max_epochs": "train.epochs",
    "train.max_tokens_per_gpu": "train.tokens_per_micro_batch",
    "train.micro_batch_size": "train.tokens_per_micro_batch",
    "train.num_episodes": "train.epochs",
    "vllm.enable_sleep": "rollout.sleep",
    "vllm.enforce_eager": "rollout.enforce_eager",
    "vllm.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm.tensor_parallel_size": "rollout.tensor_parallel_size",
}

# Names without a counterpart, by what holds here instead.
WITHOUT = {
    "the loss there is of the whole vocabulary, while rollout.top_k, top_p and min_p train the policy that sampled": (
        "rollout.top_p top_p"
    ),
    "torchrun starts the ranks, and an engine's place is rollout.mode": (
        "actor.num_gpus_per_node actor.num_nodes ref.num_gpus_per_node ref.num_nodes critic.num_gpus_per_node "
        "critic.num_nodes reward.num_gpus_per_node reward.num_nodes vllm.num_engines vllm.sync_backend "
        "vllm.sync_with_ray train.colocate_all train.colocate_actor_ref train.colocate_critic_reward local_rank "
        "vllm_num_engines vllm_sync_backend vllm_sync_with_ray colocate_all_models colocate_actor_ref "
        "colocate_critic_reward actor_num_gpus_per_node actor_num_nodes ref_num_gpus_per_node ref_num_nodes "
        "critic_num_gpus_per_node critic_num_nodes reward_num_gpus_per_node reward_num_nodes"
    ),
    "the reward is a grader: reward.kind or reward.function": (
        "reward.model_name_or_path reward.normalize_enable reward.clip_range reward.offload reward_pretrain "
        "normalize_reward reward_clip_range"
    ),
    "reward.cut_off zero is its 0; algorithm.shaping.overlong lowers the reward of long responses": (
        "reward.stop_properly_penalty_coef stop_properly_penalty_coef"
    ),
    "the coefficient is constant": "algo.kl.horizon algo.kl.target kl_horizon kl_target",
    "the weight has one bound: algorithm.objective.mismatch_cap": "algo.advantage.is_correction_gating",
    "the value model is the policy's copy, trained from the first step": (
        "critic.model_name_or_path critic.freezing_steps critic.save_value_network ds.value_head_prefix "
        "critic_pretrain freezing_actor_steps save_value_network value_head_prefix"
    ),
    "the value model's optimizer differs from the policy's in algorithm.recipe.lr only": (
        "critic.optim critic.adam.betas critic.adam.eps critic.adam.weight_decay critic.lr_scheduler "
        "critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm critic.muon.lr critic.muon.momentum "
        "critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov"
    ),
    "the optimizer is AdamW, with torch's epsilon": (
        "actor.optim actor.adam.eps actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov "
        "actor.muon.no_nesterov"
    ),
    "the loss is the objective's alone": "actor.aux_loss_coef aux_loss_coef ptx_coef",
    "only text is trained on": ("data.image_key data.max_images_per_prompt actor.freeze_visual_encoder image_key"),
    "the data are one list of files, in which data.prompt names a column": (
        "data.prompt_probs data.prompt_split data.input_template data.disable_fast_tokenizer "
        "data.dataloader_num_workers eval.split use_ms prompt_data_probs prompt_split input_template "
        "disable_fast_tokenizer eval_split"
    ),
    "a checkpoint is complete, and a run resumes with --resume": (
        "ckpt.best_metric_key ckpt.disable_ds ckpt.load_enable ckpt.max_mem ckpt.path ckpt.save_hf disable_ds_ckpt "
        "load_checkpoint max_ckpt_mem ckpt_path save_hf_ckpt"
    ),
    "samples are packed always": (
        "ds.packing_samples packing_samples train.dynamic_batch_enable rollout.max_tokens_per_gpu "
        "rollout.micro_batch_size rollout.vllm_generate_batch_size micro_rollout_batch_size use_dynamic_batch "
        "rollout_max_tokens_per_gpu vllm_generate_batch_size"
    ),
    "other settings of DeepSpeed go under train.deepspeed": (
        "ds.overlap_comm ds.zpg ds.deepcompile ds.use_universal_ckpt ds.ring_attn_head_stride "
        "ds.tensor_parallel_size ds.experts_implementation ds.enable_sleep zpg overlap_comm deepcompile "
        "use_ds_universal_ckpt ring_head_stride ds_tensor_parallel_size deepspeed_enable_sleep actor_init_on_gpu"
    ),
    "LoRA has a rank, alpha and modules": "ds.lora.dropout lora_dropout",
    "engine arguments go under rollout.vllm, by vLLM's names": "vllm.enable_prefix_caching enable_prefix_caching",
    "weights are not averaged over steps": "train.ema_beta train.enable_ema ema_beta enable_ema",
    "every step is logged, in metrics.jsonl": (
        "logger.logging_steps logger.tensorboard_dir logger.wandb.group logger.wandb.key logger.wandb.org "
        "logger.wandb.run_name logging_steps use_tensorboard wandb_group wandb_org wandb_run_name perf"
    ),
    "train.seed seeds everything": "train.seed",
    "the reference is placed by the run": "ref.offload ref_reward_offload",
    "checkpointing has no further settings": (
        "actor.gradient_checkpointing_reentrant gradient_checkpointing_use_reentrant"
    ),
    "a response pauses after rollout.segment tokens, not at a push": "train.partial_rollout_enable partial_rollout",
}
