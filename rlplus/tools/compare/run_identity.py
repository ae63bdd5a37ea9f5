"""The identity of a comparison's run, in a sealed file: its configuration, preset, data and predecessors."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlplus.common.durable import is_sealed
from rlplus.common.textfiles import read_text
from rlplus.train.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, as_of_now

ASKED = "asked.json"  # written into a run's folder at its start


def read_asked(folder: Path) -> dict[str, Any] | None:
    """The identity of the run in a folder, as `Runner._asked` gives it; None where there is none of this version.

    ValueError for a damaged file, so that no run is deleted for it.
    """
    path = folder / ASKED
    if not path.is_file():
        return None
    try:
        sealed = is_sealed(path.read_bytes(), path)
        asked = json.loads(read_text(path))
        if "checksum" in asked and not sealed:
            raise ValueError("its checksum cannot be read")
        return _validated({key: value for key, value in asked.items() if key != "checksum"})
    except ValidationError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = str(error).removeprefix(f"{path} is damaged: ")
        raise ValueError(f"{path} is damaged: {what}. Remove {folder}, and this run is made again") from error


def _validated(asked: dict[str, Any]) -> dict[str, Any]:
    """The file's values with a validated configuration, in which keys newer than the file have what it was then."""
    before = None if asked["before"] is None else _validated(asked["before"])
    return asked | {"config": without_own(Config.model_validate(as_of_now(asked["config"]))), "before": before}


def trained_part(asked: dict[str, Any]) -> dict[str, Any]:
    """The identity of a run's model."""
    config = asked["config"].model_copy(update={"evaluation": EvaluationConfig()})
    return asked | {"config": config, "before": asked["before"] and trained_part(asked["before"])}


def without_own(config: Config) -> Config:
    """The configuration without what changes no result: logs, checkpoints and the number of reward workers."""
    plain = {"log": LogConfig(), "checkpoint": CheckpointConfig()}
    reward = config.reward.stated.model_copy(update={"workers": 1})
    return config.model_copy(update=plain | {"reward": reward})
