"""Several rewards with weights, on a file, with a colocated engine that sleeps."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

FILES = "data/train.jsonl"


def short(completions, **kwargs):
    return [-len(text) / 1000 for text in completions]


rewards = [accuracy_reward, short]
config = GRPOConfig(
    output_dir="rewards",
    reward_weights=[1.0, 0.2],
    use_vllm=True,
    vllm_gpu_memory_utilization=0.6,
    vllm_tensor_parallel_size=2,
    vllm_enable_sleep_mode=True,
    vllm_importance_sampling_correction=False,
    top_entropy_quantile=0.2,
    delta=4.0,
    steps_per_generation=2,
)
data = load_dataset("json", data_files=FILES, split="train")
GRPOTrainer(model="Qwen/Qwen3-4B", reward_funcs=rewards, args=config, train_dataset=data).train()
