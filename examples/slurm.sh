#!/bin/bash
# A training that is requeued at the end of its time and after pre-emption, and goes on from its checkpoint:
#
#     sbatch examples/slurm.sh run.yaml train.steps=2000
#
#SBATCH --job-name=rlplus
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export first

requeue=no
trap 'requeue=yes; kill -TERM "$step"' USR1 # the job's time is nearly over
trap 'kill -TERM "$step"' TERM              # cancelled; or pre-empted, and then Slurm requeues the job itself

# One torchrun a node, which sends the signal on and waits for the rest of a step and for the checkpoint.
# shellcheck disable=SC2016 # each node has an id of its own
srun --kill-on-bad-exit=0 bash -c 'exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$SLURM_GPUS_ON_NODE" --master_addr "$first" --master_port 29500 --shutdown-timeout 600 \
    -m rlplus train "$@" --resume=auto' rlplus "$@" &
step=$!

wait "$step"
status=$?
while kill -0 "$step" 2> /dev/null; do # a signal ended the wait
    wait "$step"
    status=$?
done
if [[ $requeue == yes && $status -ne 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
