"""pytest plugin: the installed TRL under its checkout's tests, with our drop-in's `patch()` if PATCHED is "yes".

A test that names a model or a data set without a stand-in (trl_standins.py) is skipped with the name. One that does not
end within PATIENCE_S seconds of processor time fails.
"""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import pytest
import torch
from trl import import_utils
from trl.trainer import grpo_trainer

PATIENCE_S = 300
OWNERS = ("trl-internal-testing/", "Qwen/", "HuggingFaceTB/")  # the owners of what TRL's tests download

if not hasattr(import_utils, "is_joblib_available"):  # TRL 1.10's tests ask for it; TRL 1.16 has it no longer
    import_utils.is_joblib_available = lambda: find_spec("joblib") is not None

if os.environ["PATCHED"] == "yes":
    from rlplus.integrations import trl

    trl.patch()
    assert grpo_trainer.add_fused_lm_head.__module__.startswith("rlplus.")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = {text for text in (*texts(item.function.__code__), *given) if isinstance(text, str)}
        missing = sorted(name for name in named if name.startswith(OWNERS) and not Path(name).is_dir())
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: no stand-in for {', '.join(missing)}"))
        needs = {mark.kwargs["reason"] for mark in item.iter_markers("skipif")}
        if "test requires liger-kernel" in needs and not torch.cuda.is_available():
            # Without a GPU it would fail, and leave Liger's kernels in transformers for the tests after it.
            item.add_marker(pytest.mark.skip(reason="not applicable: Liger's kernels need a GPU"))


def texts(code: CodeType) -> Iterator[Any]:
    """The constants of a function and of the functions in it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from texts(constant)
        else:
            yield from constant if isinstance(constant, tuple) else (constant,)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"want a test that ends within {PATIENCE_S} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
