"""Parts of several commands."""

import argparse
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rlplus.common import activity, rank_variables
from rlplus.common.errors import RunFailed

if TYPE_CHECKING:
    from rlplus.common.terminal import Terminal
    from rlplus.train.config import Config
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
YAML = "YAML file, such as configs/gsm8k-tiny.yaml"
GPU_NAMES = (
    "a100-40g", "a100-80g", "h100", "h200", "rtx3090", "rtx4090", "rtx5090", "a10g", "l40s", "dgx-spark", "mi300x",
)  # fmt: skip
KNOWN_GPUS = f"{', '.join(GPU_NAMES)}, or a size of memory such as 24g, or cpu; default: this machine's, or its CPU"
GPUS_HELP = "how many; default: 1 where --gpu is given, else this machine's"
EVERY_S = 5.0  # interval of the lines of `saying_phases`


def add_configuration(command: argparse.ArgumentParser, what: str = YAML, *, name: str = "config") -> None:
    """Add the arguments config, which messages call `name`, and overrides."""
    command.add_argument("config", metavar=name, help=what)
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as train.lr=1e-6")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer of at least so much."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"want an integer of at least {least}; got {text}")
        return int(text)

    return integer


def quiet_imports(*, ranks: bool = False) -> None:
    """Import the slow libraries, without their banners and warnings, about which a user can do nothing.

    ranks: whether a launcher may have started this process as one of several, else its variables are forgotten.
    Called when the arguments and the configuration are known to be right: what is wrong with them is said at once. A
    variable of the environment that is set already stays, so TORCH_CPP_LOG_LEVEL=INFO, say, brings torch's back.
    """
    if ranks:
        rank_variables.check_launcher()
    else:
        rank_variables.be_alone()
    if "transformers" not in sys.modules:
        terminal().print("loading the libraries")  # it takes seconds, from a disk over the network a minute
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DEEPSPEED_LOG_LEVEL"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM's lines about NUMA are torch's C++ warnings
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed searches for others


def terminal() -> "Terminal":
    """Standard error, on rank 0; the other ranks are silent."""
    from rlplus.common.terminal import Terminal

    console = Terminal(stderr=True)
    console.quiet = rank_variables.rank() != 0
    return console


@contextmanager
def saying_phases(title: str) -> Iterator[None]:
    """Say every few seconds what this process does and how much of it is done, behind the title, from a thread."""
    console = terminal()
    over = threading.Event()

    def say() -> None:
        while not over.wait(EVERY_S):
            console.print(f"{title}  {activity.in_words()}")

    thread = threading.Thread(target=say, name="phases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def naming_stage(number: int, stages: "Sequence[Config]") -> Iterator[None]:
    """Make errors inside name the stage, if there are several."""
    try:
        yield
    except (ValueError, RunFailed) as error:
        if len(stages) == 1:
            raise
        kind = ValueError if isinstance(error, ValueError) else RunFailed
        raise kind(f"stage {number}: {error}") from error


def labels_of(runs: Sequence[str]) -> dict[str, Path]:
    """The folders by their names, or by their paths where names are the same."""
    folders = [Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    same = len(set(names)) < len(names)
    return dict(zip(map(str, folders) if same else names, folders, strict=True))
