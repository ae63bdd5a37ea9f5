"""Checks of the files that a configuration names, before anything slow is imported."""

import logging
import os
import re
import ssl
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request

from rlplus.common.errors import install_command
from rlplus.common.http_limits import urlopen
from rlplus.common.teacher_states import TeacherStates
from rlplus.train.config.benchmarks import BENCHMARKS
from rlplus.train.config.folders import DATA_SUFFIXES
from rlplus.train.config.schema import Config
from rlplus.train.config.sections import TRACKERS, EvaluationConfig

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0  # the hub's own client tries for most of a minute, file by file
SILENT_S = 0.8  # a line says so after such a wait for the hub

_JINJA = re.compile(r"\{[{%]")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_PREFIX = "hf://"
_HUB_DATA = re.compile(rf"{HUB_PREFIX}([\w-][\w.-]*/[\w-][\w.-]*)/([\w-][\w./-]*)")


def check_training_files(config: Config, *, model: bool = True) -> None:
    """ValueError for data, a model or an output folder that `train` could not read or make.

    model: whether there is one to start from already, which a stage makes for the next one.
    """
    if not config.data.paths:
        raise ValueError("want data.path, the prompts to train on; the configuration has none")
    check_data_files(config.data.paths, "data.path")
    for key, section in config.evaluations_read.items():
        _check_problems(section, key)
    if model and config.model.path is not None:
        check_model_path(config.model.path)
    if (teacher := config.algorithm.resolve().recipe.teacher_model) is not None:
        check_model_path(teacher, "algorithm.recipe.teacher")
    if (states := config.algorithm.resolve().recipe.stored_teacher) is not None:
        TeacherStates(states)
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)
    check_output_folder(Path(config.output_dir), "output_dir")


def check_trackers(config: Config) -> None:
    """ValueError where a tracker's package is not installed."""
    for name in TRACKERS:
        if getattr(config.log, name) is not None:
            spec = find_spec(name)
            if spec is None or spec.origin is None:  # no origin: a folder, such as wandb's own in the current directory
                raise ValueError(f"log.{name} needs the package {name}: {install_command(name)}")


def check_evaluation_files(config: Config, model: str | None, key: str = "--model") -> None:
    """ValueError for problems or a model that `eval` could not read.

    model: None = the run's result. key: what messages call the model.
    """
    result = Path(config.output_dir) / "model"
    if model is not None:
        check_model_path(model, key)
    elif not (result / "config.json").is_file():
        here = "" if result.is_absolute() else f" (current directory: {Path.cwd()})"
        raise ValueError(f"want a trained model in {result}, or --model with a folder; got none{here}")
    if config.evaluation.data is None:
        raise ValueError("want evaluation.data, the problems to evaluate on; the configuration has none")
    _check_problems(config.evaluation, "evaluation")
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)


def _check_problems(section: EvaluationConfig, key: str) -> None:
    if section.data is not None and section.data.paths:
        check_data_files(section.data.paths, f"{key}.data.path")
    else:
        check_data_files([BENCHMARKS[name].source for name in section.benchmarks], f"{key}.benchmarks")


def check_data_files(paths: Sequence[str], key: str) -> None:
    """ValueError, with the configuration's key, unless all are files of a known kind, or data sets the hub may have."""
    for source in paths:
        if source.startswith(HUB_PREFIX):
            name, _ = split_hub_path(source)
            if problem := hub_problem(name, "dataset"):
                raise ValueError(f"want a data set as {key} {source}: {problem}")
    for path in [Path(name) for name in paths if not name.startswith(HUB_PREFIX)]:
        if not path.is_file():
            what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
            raise ValueError(f"want a data file; got {key} {path}: {what}")
        if path.suffix not in DATA_SUFFIXES:
            raise ValueError(f"want {key} to end in .jsonl or .parquet; got {path}")


def check_model_path(path: str, key: str = "model.path") -> None:
    """ValueError if there is nothing to load: see `model_problem`."""
    if problem := model_problem(path):
        raise ValueError(f"want {key} a Hugging Face folder or hub name; got {path!r}: {problem}")


def model_problem(path: str) -> str | None:
    """The reason why a model cannot be loaded: a folder without one, or neither a folder nor a possible hub name."""
    if Path(path).is_dir():
        if (Path(path) / "config.json").is_file():
            return None
        inner = Path(path) / "model"  # a run's output folder
        hint = f"; {inner} has one" if (inner / "config.json").is_file() else ""
        return f"the folder has no config.json{hint}"
    if Path(path).exists():
        return "it is a file of data, for --data" if path.endswith(DATA_SUFFIXES) else "it is a file"
    if not _HUB_NAME.fullmatch(path):
        return f"no such folder (current directory: {Path.cwd()})"
    problem = hub_problem(path)
    return problem and f"no such folder; {problem}"


def shipped_architecture(path: str) -> Path | None:
    """The config.json that comes with a shipped configuration, for plans without a network; never for training."""
    file = Path(__file__).parents[2] / "configs/models" / f"{path.replace('/', '--')}.json"
    return file if file.is_file() else None


def split_hub_path(path: str) -> tuple[str, str]:
    """hf://owner/name/rest -> ("owner/name", "rest"); ValueError for another form."""
    if not (match := _HUB_DATA.fullmatch(path)):
        raise ValueError(f"want a data set of the hub as {HUB_PREFIX}owner/name/split; got {path}")
    return match[1], match[2]


def hub_problem(name: str, kind: Literal["model", "dataset"] = "model") -> str | None:
    """The reason why neither the hub nor the cache can provide it; None if loading may be tried.

    If the hub cannot be reached but the cache has it, logs that and sets HF_HUB_OFFLINE, for huggingface_hub's first
    import: otherwise every file would be requested several times.
    """
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    problem = "HF_HUB_OFFLINE is set" if offline else _unreachable()
    if problem is None:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = Path(HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if not any(cached.glob("*/config.json" if kind == "model" else "*/*")):
        instead = "a folder" if kind == "model" else "a file"
        return f"{problem}, and the cache {HF_HUB_CACHE} does not have it: download it there, or give {instead}"
    logger.warning("%s: taking %s from the cache in %s", problem, name, cached)
    return None


def _unreachable() -> str | None:
    """Send one request to the hub, through the proxies of the environment; any answer will do. Logs a long wait."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    waiting = Timer(SILENT_S, logger.warning, (f"waiting for {hub}, {HUB_TIMEOUT_S} s at most",))
    waiting.start()
    try:
        urlopen(Request(hub, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        # Its own client may have other certificates than Python's.
        return None if isinstance(reason, ssl.SSLError) else f"{hub} cannot be reached ({reason})"
    finally:
        waiting.cancel()
    return None


def read_chat_template(template: str) -> str:
    """The text of model.chat_template: the value itself if it has Jinja's braces, else the file that it names."""
    if _JINJA.search(template):
        return template
    path = Path(template).expanduser()
    wanted = f"want model.chat_template a Jinja template or its file; got {template!r}"
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else f"no such file (current directory: {Path.cwd()})"
        raise ValueError(f"{wanted}: {what}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{wanted}: not UTF-8 text: {error}") from error
    if not _JINJA.search(text):
        raise ValueError(f"{wanted}: the file has none of Jinja's braces, so the messages would be left out")
    return text


def check_output_folder(folder: Path, key: str) -> None:
    """ValueError if a file has the name of the folder or of one of its parents, or nothing can be written there."""
    for parent in (folder, *folder.parents):
        if parent.is_dir():
            try:
                with TemporaryDirectory(prefix=".rlplus-", dir=parent):
                    return
            except OSError as error:
                what = f"{parent} cannot be written ({error.strerror})"
                raise ValueError(f"want {key} a folder to write to; got {folder}: {what}") from error
        if parent.exists() or parent.is_symlink():
            raise ValueError(f"want {key} a folder; got {folder}: {parent} is a file")
