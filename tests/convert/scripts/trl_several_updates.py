"""One generation for four updates, whose number is limited."""

from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

config = GRPOConfig(
    "runs/several",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    steps_per_generation=8,
    num_iterations=2,
    max_steps=400,
    beta=0.01,
    use_bias_correction_kl=False,
    save_steps=100,
)
GRPOTrainer(model="meta-llama/Llama-3.2-1B", reward_funcs=accuracy_reward, args=config).train()
