"""The model card of an exported model: README.md in its folder, with the metadata that the Hugging Face hub reads."""

from pathlib import Path
from typing import Any

import yaml

from rlplus import __version__
from rlplus.train.config import HUB_PREFIX, Config, split_hub_path


def model_card(config: Config, step: int, best: dict[str, Any] | None) -> str:
    """Markdown: base model, data, algorithm and settings of the run, and how its model is prompted.

    step: the model's. best: step and mean reward of the best validation, None without one.
    """
    train = config.train
    rollout = config.rollout
    reward = config.reward
    rows = {
        "base model": config.model.path or "random weights",
        "data": ", ".join(config.data.paths),
        "algorithm": config.algorithm.preset,
        "steps": f"{step}, each of {train.prompts_per_step} prompts with groups of {rollout.group_size}",
        "learning rate": f"{train.lr:g}, {train.lr_schedule}",
        "longest response": f"{rollout.max_response_length} tokens",
        "reward": reward.description,
    }
    if best is not None:
        rows["best validation"] = f"mean reward {best['reward']:.4g} after step {best['step']}"
    metadata = yaml.safe_dump(_metadata(config), sort_keys=False)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\n{metadata}---\n\n# {Path(config.output_dir).name}\n\n"
        f"Trained with rlplus {__version__}. The run's `config.yaml` has all settings, its `run.json` the versions.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Prompts\n\n{_prompts(config)}\n"
    )


def _metadata(config: Config) -> dict[str, Any]:
    """Only names on the hub: a folder of this machine means nothing there."""
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if config.model.path is not None and not Path(config.model.path).exists():
        found["base_model"] = config.model.path
    names = [split_hub_path(path)[0] for path in config.data.paths if path.startswith(HUB_PREFIX)]
    if names:
        found["datasets"] = list(dict.fromkeys(names))
    return found | {"tags": ["rlplus", "reinforcement-learning"]}


def _prompts(config: Config) -> str:
    data = config.data
    if data.template != "own":
        return f"Questions were put into the template `{data.template}` of rlplus."
    if data.chat:
        lines = ["A prompt was one user message, in the tokenizer's chat template."]
    else:
        lines = ["Prompts were those of the data: text unchanged, messages in the tokenizer's chat template."]
    if data.system_prompt is not None:
        lines.append("The system message was:\n\n> " + data.system_prompt.replace("\n", "\n> "))
    if data.response_prefix is not None:
        lines.append(f"Every response starts with {data.response_prefix!r}, which is given and not generated.")
    return "\n\n".join(lines)
