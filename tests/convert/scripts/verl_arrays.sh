#!/usr/bin/env bash
# Dr.GRPO, with the overrides in arrays; one value is only known when the script runs.
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B}
NODES=${NNODES:-2}
DATA=(
    data.train_files=$HOME/data/train.parquet
    data.train_batch_size=128   # prompts
    data.val_files=$HOME/data/test.parquet
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.clip_ratio_high=0.3
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    algorithm.norm_adv_by_std_in_grpo=False
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.n=$SAMPLES \
    actor_rollout_ref.rollout.temperature=0.8 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.nnodes=$NODES trainer.test_freq=10 "$@"
