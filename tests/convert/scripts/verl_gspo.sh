# GSPO.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \
  actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 \
  actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.rollout.top_p=1.0
