# Adapters, with fields of the model's configuration.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \
  data.max_prompt_length=1024 data.max_response_length=3072 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
  actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.use_shm=True \
  +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
  +actor_rollout_ref.model.override_config.attn_implementation=eager \
  actor_rollout_ref.rollout.n=6 actor_rollout_ref.rollout.load_format=safetensors \
  actor_rollout_ref.rollout.free_cache_engine=False trainer.default_local_dir=out/lora
