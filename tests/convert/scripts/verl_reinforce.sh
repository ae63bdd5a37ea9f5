# REINFORCE++: a batch's advantages, with the divergence in the loss through k2.
export N=8
python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=reinforce_plus_plus \
  data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \
  actor_rollout_ref.rollout.n=$N \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type=mse \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
  algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0 \
  trainer.val_before_train=False
