"""Adapters, a cosine with a warm-up, a tracker, and another file of DeepSpeed."""

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

peft_config = LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
args = GRPOConfig(
    output_dir="lora",
    learning_rate=1e-5,
    lr_scheduler_type="cosine_with_min_lr",
    lr_scheduler_kwargs={"min_lr_rate": 0.1},
    warmup_ratio=0.05,
    weight_decay=0.1,
    adam_beta2=0.99,
    max_grad_norm=0.2,
    gradient_checkpointing=False,
    report_to="wandb",
    deepspeed="ds_zero2.json",
    seed=7,
    full_determinism=True,
    model_init_kwargs={"attn_implementation": "flash_attention_2", "dtype": "bfloat16"},
)
GRPOTrainer("Qwen/Qwen2.5-7B", accuracy_reward, args=args, peft_config=peft_config).train()
