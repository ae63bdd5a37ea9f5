# PPO with a critic: the default estimator.
python3 -m verl.trainer.main_ppo data.train_files=train.parquet data.train_batch_size=256 \
  data.max_prompt_length=512 data.max_response_length=256 \
  actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.clip_ratio=0.1 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  critic.optim.lr=1e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.ppo_micro_batch_size_per_gpu=4 \
  algorithm.lam=0.95 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.002 \
  trainer.total_training_steps=100
