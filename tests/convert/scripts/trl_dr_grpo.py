"""Dr.GRPO: no standard deviation, and a constant divisor."""

from trl import GRPOConfig, GRPOTrainer

training = dict(max_completion_length=3000, temperature=0.9)
config = GRPOConfig(output_dir="dr", loss_type="dr_grpo", scale_rewards=False, bf16=False, **training)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-Math-1.5B", reward_funcs="some/reward-model", args=config)
