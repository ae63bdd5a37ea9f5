# Leave-one-out, a cosine, a function of the user's for rewards.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo data.train_files="['a.parquet','b.parquet']" \
  data.train_batch_size=512 data.seed=3 actor_rollout_ref.actor.fsdp_config.full_determinism=True actor_rollout_ref.model.path=Qwen/Qwen2.5-3B \
  actor_rollout_ref.actor.optim.warmup_style=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=sglang \
  custom_reward_function.path=my_reward.py custom_reward_function.name=grade
