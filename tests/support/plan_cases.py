"""The model, the configurations and the measurements that the tests of the plan share."""

import gc
from pathlib import Path
from unittest import mock

import torch
from transformers import Qwen2Config

from rlplus.tools import plan
from rlplus.tools.plan import Cluster, Plan, read_model
from rlplus.tools.plan.cluster import Gpu
from rlplus.tools.plan.planned_model import Model
from rlplus.train.config import Config, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
IN_BF16 = "train.deepspeed={data_types: {grad_accum_dtype: bf16}, communication_data_type: bf16}"
PAPER = CONFIGS / "qwen2.5-math-7b.yaml"
CPU = Cluster(1, Gpu("cpu", 2**40))
QWEN_7B = {  # Qwen/Qwen2.5-Math-7B's config.json
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QLORA = (
    "algorithm.preset=grpo", "model.gradient_checkpointing=true", "data.max_prompt_length=1024",
    "rollout.max_response_length=2048", "train.tokens_per_micro_batch=3072",
    "train.max_scratch_mb=320", "evaluation.every=0",
)  # fmt: skip
PROCESS = ("rollout.sleep=false", "rollout.mode=process")
SERVER = ("rollout.sleep=false", "rollout.mode=server", "rollout.server_url=http://localhost:1")


def thin_model(**changes) -> Qwen2Config:
    values = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    return Qwen2Config(**(values | changes))


def paper(*overrides: str) -> Config:
    """The paper's configuration; its architecture is the copy that comes with rlplus, as tests have no network."""
    return load_config(PAPER, overrides)


_models: dict[str, tuple[Model, str]] = {}


def make_plan(config: Config, cluster: Cluster) -> Plan:
    """`rlplus.tools.plan.make_plan`, but each model is built once."""

    def read_once(config: Config) -> tuple[Model, str]:
        recipe = config.algorithm.resolve().recipe
        key = f"{config.model.model_dump_json()} {recipe.learners} {recipe.teacher_model}"
        if key not in _models:
            _models[key] = read_model(config)
        return _models[key]

    with mock.patch.object(plan, "read_model", read_once):
        return plan.make_plan(config, cluster)


def real_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a tensor of this process has."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Not subclasses: a compiler's stand-ins, which other tests of the process leave behind, have no memory.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def everything_known() -> list[torch.Tensor]:
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == "cpu"]


def alive_beyond(before: dict[int, int]) -> int:
    return sum(size for address, size in real_storages().items() if address not in before)
