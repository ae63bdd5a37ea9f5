"""Tables of settings, values that change, an evaluation's data in front, and what surrounds the config."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


class Game:
    """An environment."""


def accuracy_reward(completions, **kwargs):
    return [float(len(text) > 3) for text in completions]


base = dict(learning_rate=1e-5, max_completion_length=256)
more = {"beta": 0.02, "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "auto"}}
problems = load_dataset("HuggingFaceH4/aime_2024", split="train")
steps = 100
steps *= 5
config = GRPOConfig("around", max_steps=steps, gradient_accumulation_steps=2**3, **base, **more)
rows = load_dataset("openai/gsm8k", "main")
rows = rows.map(lambda row: {"prompt": row["question"]})
GRPOTrainer(
    "Qwen/Qwen2.5-0.5B",
    accuracy_reward,
    args=config,
    train_dataset=rows["train"],
    eval_dataset=problems,
    environment_factory=Game,
    peft_config=LoraConfig(r=16, use_rslora=True),
).train()
