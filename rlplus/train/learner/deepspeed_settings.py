"""DeepSpeed's configuration of a model, which the planner reads without DeepSpeed."""

from typing import Any

import torch
from transformers import PreTrainedModel

from rlplus.train.config import Config, TrainConfig, merged

IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}


def deepspeed_config(config: Config, parameters: int, grad_clip: float | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration for a model with that many parameters; `train.deepspeed` is merged in last.

    grad_clip: the model's own, in place of both.
    """
    train = config.train
    offload = {
        name: {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        for name, device in (("offload_optimizer", train.offload_optimizer), ("offload_param", train.offload_params))
        if device == "cpu"
    }
    bucket = min(parameters, 500_000_000)  # DeepSpeed's default, 2 GB in fp32, is allocated whatever the model's size
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the update sets the boundaries itself: the number of micro-batches varies
        "gradient_clipping": train.grad_clip,
        "zero_optimization": {
            "stage": train.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            **offload,
        },
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW without a GPU, with offloading, too
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.model.dtype == "bfloat16", "check_grad_overflow": True},
        **IN_FP32,
    }
    return merged(base, train.deepspeed) | ({} if grad_clip is None else {"gradient_clipping": grad_clip})


def check_sharded_head(lm: PreTrainedModel, vocabulary: int, ranks: int) -> None:
    """ValueError for a head (vocabulary, H) that `train.shard_head` cannot leave in ZeRO-3's shards, some rows each."""
    head: Any = lm.get_output_embeddings()
    got = f"{vocabulary} tokens and {ranks} ranks" if vocabulary % ranks else ""
    if head.bias is not None:
        got = "one with a bias"
    if head.weight is getattr(lm.get_input_embeddings(), "weight", None):
        got = "one that is tied to the input embeddings, which are gathered anyway"
    if got:
        raise ValueError(
            "train.shard_head: want a head of its own, without a bias, with a vocabulary that the number of ranks "
            f"divides; got {got}"
        )


def check_resharding(train: TrainConfig, saved: int, now: int) -> None:
    """ValueError if `now` ranks cannot take over what `saved` ranks have written."""
    zero = train.deepspeed.get("zero_optimization", {})
    found = [
        name
        for name in ("elastic_checkpoint", "mics_shard_size", "parameter_alignment")
        if zero.get(name) not in (None, False, -1)
    ]
    found += [name for name in ("offload_optimizer", "offload_param") if (zero.get(name) or {}).get("device") == "nvme"]
    got = f"train.deepspeed.zero_optimization.{found[0]}" if found else ""
    if train.optimizer == "adamw8bit":
        got = "train.optimizer adamw8bit, whose moments share scales across the bounds of other shards"
    if got:
        raise ValueError(
            f"it was written by {saved} ranks with {got}, which {now} cannot divide anew. Resume with {saved} ranks; "
            "with train.steps at the checkpoint's step they write its model, from which a new run can start"
        )


def check_eight_bit(train: TrainConfig, parameters: int, ranks: int) -> None:
    """ValueError for AdamW of 8 bits on a shard of numbers that its kernels, which count them in int32, cannot take."""
    shard = -(-parameters // ranks)
    if train.optimizer == "adamw8bit" and train.zero_stage < 3 and shard >= 2**31:
        raise ValueError(
            "train.optimizer adamw8bit: want fewer than 2^31 trained parameters a rank, by more ranks or zero_stage 3; "
            f"got {shard:,} with zero_stage {train.zero_stage} and ranks {ranks}"
        )
