#!/usr/bin/env bash
# Settings that depend on how the script is called, in arrays and in a text, with a configuration of verl's.
ENGINE=${1:-vllm}
EXTRA="trainer.logger=console trainer.val_before_train=False"
ARGS=(
    algorithm.adv_estimator=grpo
    data.train_files=train.parquet data.max_response_length=$((2 ** 11))
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.rollout.n=8
)
ARGS+=(actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01)
if [ "$ENGINE" = vllm ]; then
    temperature=0.7
    ARGS+=(actor_rollout_ref.rollout.gpu_memory_utilization=0.8)
else
    temperature=0.9
fi
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \
    "${ARGS[@]}" $EXTRA actor_rollout_ref.rollout.temperature=$temperature \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 2>&1 | tee run.log
