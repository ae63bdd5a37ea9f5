"""CISPO, whose bound is of the ratio itself."""

from trl import GRPOConfig

args = GRPOConfig(
    output_dir="cispo", loss_type="cispo", epsilon_high=5.0, scale_rewards="batch", steps_per_generation=2
)
