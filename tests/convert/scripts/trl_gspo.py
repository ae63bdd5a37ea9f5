"""GSPO: the ratio of a sequence, clipped close to 1."""

from trl import GRPOConfig

training_args = GRPOConfig(
    output_dir="gspo",
    importance_sampling_level="sequence",
    loss_type="grpo",
    beta=0.0,
    epsilon=3e-4,
    epsilon_high=4e-4,
    gradient_accumulation_steps=1,
    steps_per_generation=4,
)
