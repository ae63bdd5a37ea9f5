"""The tables of what-fits.md: on how many GPUs a model trains, by the search of `rlplus init` with the plan's formulas.

`python docs/generate.py --plan` writes them, in a few minutes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import output
from rlplus.tools.init.fitting import FULL, LORA, OFFLOADED, QLORA, Found, find_fitting
from rlplus.tools.plan import make_cluster
from rlplus.tools.plan.planned_model import Model

# Qwen2.5's config.json, by the size that its name says.
SHARED = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
NAMES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
MODELS = {
    "0.5B": (896, 24, 4864, 14, 2, 151936, True),
    "1.5B": (1536, 28, 8960, 12, 2, 151936, True),
    "3B": (2048, 36, 11008, 16, 2, 151936, True),
    "7B": (3584, 28, 18944, 28, 4, 152064, False),
    "14B": (5120, 48, 13824, 40, 8, 152064, False),
    "32B": (5120, 64, 27648, 40, 8, 152064, False),
}
CARDS = (24, 40, 48, 80)  # GiB
GPUS = (1, 2, 4, 8)
TUNINGS = {"full": FULL, "lora": LORA, "qlora": QLORA, "offloaded": OFFLOADED}
FIXED = {"rollout": {"max_response_length": 2048}}


def fewest(size: str, tuning: str, cards: Iterable[int] = CARDS) -> Iterator[str]:
    """A cell per size of memory: the fewest GPUs on which the model fits, and what that takes."""
    models: dict[str, Model] = {}
    with TemporaryDirectory() as folder:
        values = SHARED | dict(zip(NAMES, MODELS[size], strict=True))
        (Path(folder) / "config.json").write_text(json.dumps(values))
        for card in cards:
            found = (
                find_fitting(_base(folder), FIXED, make_cluster(gpus, f"{card}g"), [TUNINGS[tuning]], models)
                for gpus in GPUS
            )
            yield _cell(next((each for each in found if each), None))


def _base(folder: str) -> dict[str, Any]:
    return {
        "output_dir": "out",
        "model": {"path": folder, "gradient_checkpointing": True},
        "data": {"path": "train.jsonl"},
        "reward": {"kind": "math_verify"},
        "rollout": {"group_size": 8},
        "algorithm": {"preset": "grpo"},
        "train": {"epochs": 1, "prompts_per_step": 64, "prompts_per_update": 32},
    }


def _cell(found: Found | None) -> str:
    if found is None:
        return f"not on {GPUS[-1]}"
    stage, engine = found.config.train.zero_stage, found.config.rollout.tensor_parallel_size
    offloaded = found.config.train.offload_params == "cpu"
    parts = [f"ZeRO {stage}"] if stage > 1 and not offloaded else []
    parts += [f"{engine} per engine"] if engine > 1 else []
    parts += [f"{found.plan.memory.host / 2**30:.0f} GiB of the node"] if offloaded else []
    gpus = str(found.plan.cluster.gpus)
    return f"{gpus} ({', '.join(parts)})" if parts else gpus


def table(tuning: str) -> str:
    """The GPUs that each model needs, by their memory."""
    header = ("model", *(f"{card} GB" for card in CARDS))
    return output.lines(header, ([size, *fewest(size, tuning)] for size in MODELS)).strip()
