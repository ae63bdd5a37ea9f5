"""A run's folder: shared by all ranks, written by one run at a time, resumed only by the run that it holds."""

import errno
import fcntl
import hashlib
import logging
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlplus import agree, checkpoint
from rlplus.config import Config
from rlplus.data import Example

# What may differ between a checkpoint's configuration and the one that resumes it.
MAY_CHANGE = {"output_dir", "checkpoint", "evaluation", "train.steps", "train.generated_tokens", "train.max_nonfinite"}
MAY_CHANGE |= {"train.collective_timeout_s"}
MAY_CHANGE |= {f"rollout.{name}" for name in ("push_bucket_mb", "push_timeout_s", "push_folder", "server_url")}
MAY_CHANGE |= {"rollout.progress_timeout_s"}
MAY_CHANGE |= {f"rollout.{name}" for name in ("sleep", "gpu_memory_utilization", "kv_cache_memory_mb", "enforce_eager")}
# For a run that was out of memory: these change a step's results by rounding only.
MAY_CHANGE |= {f"train.{name}" for name in ("memory", "max_scratch_mb", "tokens_per_micro_batch")}
MAY_CHANGE |= {"model.gradient_checkpointing"}
MAY_CHANGE |= {"rollout.max_logprob_gap", "reward.workers", "reward.timeout_s", "reward.memory_mb"}
MAY_CHANGE |= {"reward.on_failure"}

logger = logging.getLogger(__name__)


def check_shared(folder: Path, last: Path | None) -> None:
    """ValueError where ranks do not see the same checkpoint: some would start anew, and train on other steps."""
    names = agree.gathered(None if last is None else last.name)
    if len(set(names)) > 1:
        seen = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ValueError(f"want {folder} on a file system that all ranks share; its newest checkpoint is {seen}")


def lock(folder: Path, stack: ExitStack) -> None:
    """Hold the folder until the stack closes; ValueError on all ranks while another run writes into it.

    The kernel frees a killed run's lock.
    """
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            fcntl.flock(stack.enter_context((folder / ".lock").open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            failure = ValueError(
                f"another run is writing into {folder}: wait for its end, or choose another output_dir. Ranks "
                "whose launcher was killed go on training: look for them"
            )
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                failure = error
            else:
                logger.warning("no locks in %s (%s): nothing keeps another run out of it", folder, error)
    if what := agree.failures(failure):
        raise ValueError(what)


def fingerprint(examples: Sequence[Example]) -> str:
    """A hash of the data as loaded, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        for tokens in (example.prompt, example.demonstration or ()):
            digest.update(array("q", [len(tokens), *tokens]).tobytes())
        digest.update(example.answer.encode() + b"\0")
    return digest.hexdigest()


def read_state(last: Path, config: Config, examples: str) -> dict[str, Any]:
    """The state of the checkpoint `last`; ValueError where `config`, or data of another fingerprint, do not fit it."""
    state = checkpoint.read_state(last)
    try:
        written = Config.model_validate(state["config"])  # a key that is newer than the checkpoint has its default
    except (KeyError, ValueError) as error:
        raise ValueError(f"{last} holds a configuration that this version does not read: {error}") from error
    changed = _differences(written.model_dump(mode="json"), config.model_dump(mode="json"))
    if changed:
        raise ValueError(f"{last} was written with another configuration: {'; '.join(changed)}")
    if state.get("examples", examples) != examples:
        raise ValueError(f"{last} was written by a run on other data than {config.data.path}: it has changed")
    return state


def _differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(saved.keys() | now.keys()):
        name, was, is_ = f"{prefix}{key}", saved.get(key), now.get(key)
        if name in MAY_CHANGE or was == is_:
            continue
        if isinstance(was, dict) and isinstance(is_, dict):
            found += _differences(was, is_, f"{name}.")
        else:
            found.append(f"{name} was {was!r}, is {is_!r}")
    return found
