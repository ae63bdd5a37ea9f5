"""DAPO's settings, as far as TRL has them."""

from trl import GRPOConfig

args = GRPOConfig(
    output_dir="dapo",
    loss_type="dapo",
    epsilon=0.2,
    epsilon_high=0.28,
    beta=0.0,
    mask_truncated_completions=True,
    steps_per_generation=4,
    per_device_train_batch_size=16,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
)
