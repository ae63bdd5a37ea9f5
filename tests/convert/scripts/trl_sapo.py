"""SAPO's soft gate."""

from trl import GRPOConfig

args = GRPOConfig(
    output_dir="sapo",
    loss_type="sapo",
    sapo_temperature_pos=1.5,
    sapo_temperature_neg=2.0,
    steps_per_generation=2,
    entropy_coef=0.001,
)
