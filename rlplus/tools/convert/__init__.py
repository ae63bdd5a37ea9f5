"""Configurations of other trainers as one of ours: TRL's GRPOConfig in a Python file, verl's command in a shell script.

A script is read, never run. What its settings mean is kept: values are computed, and the other trainer's defaults are
written out where ours differ. What has no counterpart is listed in the file, with the reason.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlplus.common.textfiles import read_text
from rlplus.tools.convert.draft import Draft
from rlplus.tools.convert.python_script import read_python
from rlplus.tools.convert.shell_script import read_shell
from rlplus.tools.convert.trl_arguments import from_trl
from rlplus.tools.convert.verl_overrides import from_verl
from rlplus.train.config import Config, apply_override, commented_yaml, config_from

__all__ = ["Converted", "convert"]

SHELL = ("", ".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".txt")
NO_EFFECT = re.compile(r"(\S+) would have no effect, leave it out: (.*)")


@dataclass(frozen=True)
class Converted:
    """A configuration, its text, and lines about what the user must know: to fill in, not converted, not read."""

    config: Config
    text: str
    lost: tuple[str, ...]
    missing: tuple[str, ...]


def convert(path: Path, gpus: int = 1, overrides: Sequence[str] = ()) -> Converted:
    """The configuration in a script.

    gpus: processes of a TRL run, which its script does not say. overrides: keys of the result, as on a command line.
    ValueError for a script without such a configuration, and for an algorithm that is none of ours.
    """
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
        raise ValueError(f"want a Python file with a GRPOConfig, or a shell script of verl; got {path}: {what}")
    if path.suffix not in (".py", *SHELL):
        raise ValueError(f"want a Python file (.py) or a shell script (.sh); got {path}, which ends in {path.suffix}")
    text = read_text(path)
    try:
        python = path.suffix == ".py"
        draft = from_trl(read_python(text, str(path)), gpus) if python else from_verl(read_shell(text, path))
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be read") from error
    for override in overrides:
        key = override.partition("=")[0].strip()
        reward = key in ("reward.kind", "reward.function")
        if reward:
            for other in ("kind", "function"):
                draft.values["reward"].pop(other, None)
        apply_override(draft.values, override)
        draft.comments[key] = "given"
        draft.missing = [line for line in draft.missing if not line.startswith("reward." if reward else f"{key}:")]
    config = _without_idle_keys(draft)
    head = [f"{path.name}, converted by rlplus convert: {draft.trainer}'s keys are behind the values."]
    head += _listed("Fill in:", draft.missing) + _listed("Not converted:", draft.lost)
    return Converted(
        config, commented_yaml(draft.values, draft.comments, head), tuple(draft.lost), tuple(draft.missing)
    )


def _listed(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _without_idle_keys(draft: Draft) -> Config:
    """The configuration; keys that a run refuses because they would have no effect are left out and listed."""
    while True:
        try:
            return config_from(draft.values, "the converted script")
        except ValueError as error:
            idle = [found for line in str(error).splitlines() if (found := NO_EFFECT.fullmatch(line))]
            if not idle:
                raise
            for key, why in (found.groups() for found in idle):
                draft.drop(key, why)
