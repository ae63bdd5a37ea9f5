"""The model card of an exported model."""

from pathlib import Path

import yaml
from trainer_runs import run_config

from rlplus import __version__
from rlplus.train.config import Config
from rlplus.train.trainer.card import model_card


def parts(config: Config, best: dict[str, float] | None = None) -> tuple[dict[str, object], str]:
    """The metadata and the text of a card."""
    _, metadata, text = model_card(config, 7, best).split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_card_says_where_the_model_comes_from(tmp_path: Path) -> None:
    data = {"path": ["hf://owner/set/train", "hf://owner/set/more", "own.jsonl"], "chat": True}
    data |= {"system_prompt": "Think.\nThen answer.", "response_prefix": "<think>\n"}
    config = run_config(tmp_path, output="mine", model={"path": "owner/base", "scratch": None}, data=data)
    metadata, text = parts(config, {"step": 5, "reward": 0.25})
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/base",
        "datasets": ["owner/set"],
        "tags": ["rlplus", "reinforcement-learning"],
    }
    assert text.startswith(f"\n# mine\n\nTrained with rlplus {__version__}. ")
    assert "| steps | 7, each of 4 prompts with groups of 4 |\n" in text
    assert "| best validation | mean reward 0.25 after step 5 |\n" in text
    assert "A prompt was one user message" in text
    assert "\n> Think.\n> Then answer.\n" in text
    assert r"starts with '<think>\n', which is given" in text


def test_folders_and_files_are_no_names_on_the_hub(tmp_path: Path) -> None:
    metadata, text = parts(run_config(tmp_path, model={"path": str(tmp_path), "scratch": None}))
    assert metadata.keys() == {"library_name", "pipeline_tag", "tags"}
    assert f"| base model | {tmp_path} |" in text
    assert "best validation" not in text
    assert "| base model | random weights |" in parts(run_config(tmp_path))[1]
