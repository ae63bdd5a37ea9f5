"""Batches in TRL's units: completions on each process, accumulated."""

import trl

PER_DEVICE, GROUP = 4, 8
GROUP_SIZE = 16
BATCH = 2 * 4
args = trl.GRPOConfig(
    output_dir="runs/accumulated",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=16,
    num_generations=GROUP_SIZE,
    max_prompt_length=512,
    max_completion_length=2 * 1024,
    learning_rate=5e-6,
    num_train_epochs=1,
    save_steps=50,
    save_total_limit=3,
)
trainer = trl.GRPOTrainer("Qwen/Qwen2.5-3B", [trl.rewards.accuracy_reward], args=args)
