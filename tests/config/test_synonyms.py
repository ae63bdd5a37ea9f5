"""Names of other trainers lead to keys that exist."""

from collections.abc import Mapping
from dataclasses import fields

import pytest
from pydantic import BaseModel

from rlplus import Objective
from rlplus.train.config import Config, valid_keys
from rlplus.train.config.loading import _section
from rlplus.train.config.synonyms import COMMON, OPENRLHF, TRL, VERL, WITHOUT, synonym

# train_ppo_ray of OpenRLHF: 0.11, at 3c3be623 of August 2026, and the flat names of 0.8.5 to 0.9.9.
OPENRLHF_ARGUMENTS = """
    actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay actor.aux_loss_coef actor.dual_clip
    actor.entropy_coef actor.eps_clip actor.eps_clip_low_high actor.freeze_visual_encoder
    actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant actor.lr_scheduler
    actor.lr_warmup_ratio actor.max_norm actor.min_lr_ratio actor.model_name_or_path actor.muon.lr
    actor.muon.momentum actor.muon.nesterov actor.muon.no_nesterov actor.muon.ns_steps actor.num_gpus_per_node
    actor.num_nodes actor.optim actor.policy_loss_type actor_init_on_gpu actor_learning_rate actor_num_gpus_per_node
    actor_num_nodes adam_betas adam_offload advantage_estimator agent_func_path algo.advantage.estimator
    algo.advantage.gamma algo.advantage.is_correction_enable algo.advantage.is_correction_threshold
    algo.advantage.is_correction_type algo.advantage.lambd algo.advantage.no_std_norm algo.dynamic_filtering_enable
    algo.dynamic_filtering_range algo.kl.estimator algo.kl.horizon algo.kl.init_coef algo.kl.target algo.kl.use_loss
    apply_chat_template async_queue_size async_train attn_implementation aux_loss_coef bf16 ckpt.best_metric_key
    ckpt.disable_ds ckpt.load_enable ckpt.max_mem ckpt.max_num ckpt.output_dir ckpt.path ckpt.save_hf
    ckpt.save_steps ckpt_path colocate_actor_ref colocate_all_models colocate_critic_reward critic.adam.betas
    critic.adam.eps critic.adam.lr critic.adam.weight_decay critic.freezing_steps critic.lr_scheduler
    critic.lr_warmup_ratio critic.max_norm critic.min_lr_ratio critic.model_name_or_path critic.muon.lr
    critic.muon.momentum critic.muon.nesterov critic.muon.no_nesterov critic.muon.ns_steps critic.num_gpus_per_node
    critic.num_nodes critic.optim critic.save_value_network critic.value_clip critic_learning_rate
    critic_num_gpus_per_node critic_num_nodes critic_pretrain data.apply_chat_template data.dataloader_num_workers
    data.disable_fast_tokenizer data.image_key data.input_key data.input_template data.label_key
    data.max_images_per_prompt data.max_len data.max_samples data.prompt_dataset data.prompt_probs data.prompt_split
    deepcompile deepspeed_enable_sleep disable_ds_ckpt disable_fast_tokenizer ds.adam_offload ds.attn_implementation
    ds.deepcompile ds.enable_sleep ds.experts_implementation ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha
    ds.lora.dropout ds.lora.rank ds.lora.target_modules ds.overlap_comm ds.packing_samples ds.param_dtype
    ds.ring_attn_head_stride ds.ring_attn_size ds.tensor_parallel_size ds.use_liger_kernel ds.use_universal_ckpt
    ds.value_head_prefix ds.zero_stage ds.zpg ds_tensor_parallel_size dual_clip dynamic_filtering
    dynamic_filtering_reward_range ema_beta enable_ema enable_prefix_caching enable_vllm_is_correction enforce_eager
    entropy_loss_coef eps_clip eps_clip_low_high eval.dataset eval.n_samples_per_prompt eval.split eval.steps
    eval.temperature eval_dataset eval_n_samples_per_prompt eval_split eval_steps eval_temperature flash_attn
    freezing_actor_steps full_determinism gamma generate_max_len grad_accum_dtype gradient_checkpointing
    gradient_checkpointing_use_reentrant image_key init_kl_coef input_key input_template kl_estimator kl_horizon
    kl_target l2 label_key lambd load_checkpoint load_in_4bit local_rank logger.logging_steps logger.tensorboard_dir
    logger.wandb.group logger.wandb.key logger.wandb.org logger.wandb.project logger.wandb.run_name logging_steps
    lora_alpha lora_dropout lora_rank lr_scheduler lr_warmup_ratio max_ckpt_mem max_ckpt_num max_epochs max_len
    max_new_tokens max_norm max_samples micro_rollout_batch_size micro_train_batch_size n_samples_per_prompt
    no_advantage_std_norm normalize_reward num_episodes overlap_comm overlong_buffer_len overlong_penalty_factor
    packing_samples param_dtype partial_rollout perf policy_loss_type pretrain prompt_data prompt_data_probs
    prompt_max_len prompt_split ptx_coef ref.num_gpus_per_node ref.num_nodes ref.offload ref_num_gpus_per_node
    ref_num_nodes ref_reward_offload remote_rm_url reward.clip_range reward.model_name_or_path
    reward.normalize_enable reward.num_gpus_per_node reward.num_nodes reward.offload reward.overlong_buffer_len
    reward.overlong_penalty_factor reward.remote_url reward.stop_properly_penalty_coef reward_clip_range
    reward_num_gpus_per_node reward_num_nodes reward_pretrain ring_attn_size ring_head_stride rollout.batch_size
    rollout.max_new_tokens rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt
    rollout.temperature rollout.top_p rollout.vllm_generate_batch_size rollout_batch_size rollout_max_tokens_per_gpu
    save_hf_ckpt save_path save_steps save_value_network seed stop_properly_penalty_coef target_modules temperature
    top_p train.agent_func_path train.async_enable train.async_queue_size train.batch_size train.colocate_actor_ref
    train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable train.ema_beta train.enable_ema
    train.full_determinism_enable train.max_epochs train.max_tokens_per_gpu train.micro_batch_size
    train.num_episodes train.partial_rollout_enable train.seed train_batch_size train_max_tokens_per_gpu
    use_ds_universal_ckpt use_dynamic_batch use_kl_loss use_liger_kernel use_ms use_tensorboard use_wandb value_clip
    value_head_prefix vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager vllm.gpu_memory_utilization
    vllm.num_engines vllm.sync_backend vllm.sync_with_ray vllm.tensor_parallel_size vllm_enable_sleep
    vllm_generate_batch_size vllm_gpu_memory_utilization vllm_is_correction_type vllm_is_truncated_threshold
    vllm_num_engines vllm_sync_backend vllm_sync_with_ray vllm_tensor_parallel_size wandb_group wandb_org
    wandb_project wandb_run_name zero_stage zpg
"""
OBJECTIVE = {f"algorithm.objective.{field.name}" for field in fields(Objective)}


@pytest.mark.parametrize("names", [TRL, VERL, OPENRLHF, COMMON], ids=["TRL", "verl", "OpenRLHF", "common"])
def test_every_name_leads_to_a_key(names: Mapping[str, str]) -> None:
    for key in names.values():
        section: type[BaseModel] | None = Config
        for part in [] if key in OBJECTIVE else key.split("."):
            assert section is not None, key
            assert part in section.model_fields, key
            section = _section(section.model_fields[part].annotation)


def test_paths_count_from_their_end_and_flags_lose_their_dashes() -> None:
    assert synonym("actor_rollout_ref.rollout.n") == "verl's rollout.n is rollout.group_size here"
    assert synonym("rollout.n") == "verl's rollout.n is rollout.group_size here"
    assert synonym("x.rollouts.n") is None
    assert synonym("n-samples-per-prompt") == "OpenRLHF's n_samples_per_prompt is rollout.group_size here"
    assert synonym("kl_coef") == "here it is algorithm.objective.kl_coef"
    assert synonym("rollout.push_folder") == "here it is rollout.transfer", "0.3.0 had it"
    assert synonym("train.memory") == "here it is train.max_scratch_mb", "0.3.0 had it"
    assert synonym("reward.memory") is None
    assert synonym("anything") is None


def test_sizes_say_what_they_count() -> None:
    """8 sequences a device are no 8 tokens, and a batch of 1024 completions no 1024 prompts."""
    assert synonym("per_device_train_batch_size") == (
        "TRL's per_device_train_batch_size is train.tokens_per_micro_batch here, in tokens"
    )
    assert synonym("data.train_batch_size") == "verl's data.train_batch_size is train.prompts_per_step here, in prompts"
    assert synonym("mini_batch_size") == "here it is train.prompts_per_update, in prompts"


def test_a_penalty_in_the_reward_is_not_one_in_the_loss() -> None:
    assert synonym("algorithm.kl_ctrl.kl_coef") == ("verl's algorithm.kl_ctrl.kl_coef is algorithm.reward_kl_coef here")


def test_a_name_without_a_counterpart_has_a_reason() -> None:
    reason = "has no counterpart here: the loss there is of the whole vocabulary, "
    reason += "while rollout.top_k, top_p and min_p train the policy that sampled"
    assert synonym("top_p") == f"TRL's top_p {reason}"
    assert synonym("actor_rollout_ref.rollout.top_p") == f"verl's rollout.top_p {reason}"
    assert synonym("--algo.kl.init_coef") == "OpenRLHF's algo.kl.init_coef is algorithm.reward_kl_coef here"
    assert synonym("--train.batch_size") == "OpenRLHF's train.batch_size is train.prompts_per_update here, in prompts"
    assert synonym("train.batch_size") == "here it is train.prompts_per_step, in prompts"
    assert str(synonym("--vllm.num_engines")).startswith("OpenRLHF's vllm.num_engines has no counterpart here: ")


def test_every_argument_of_openrlhf_has_a_name_here_or_a_reason() -> None:
    ours = {key.rpartition(".")[2] for key in valid_keys()}
    bare = [
        name for name in OPENRLHF_ARGUMENTS.split() if synonym(name) is None and name.rpartition(".")[2] not in ours
    ]
    assert bare == []
    assert OPENRLHF.keys() & WITHOUT["OpenRLHF"].keys() == set()
    assert synonym("train.micro_train_batch_size") == (
        "OpenRLHF's micro_train_batch_size is train.tokens_per_micro_batch here, in tokens"
    )
