"""The transfer of weights from the trainer to an engine: checked, with a deadline between two signs of progress."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlplus.common.errors import RunFailed
from rlplus.train.rollout.protocol import whole_model

GRACE_S = 15.0  # an overdue body gets an exception; a process that cannot raise it ends this much later
EXIT_OVERDUE = 70
STDERR = 2
# Arguments that vLLM is started with, so that its workers have the engine that takes our weights.
BACKEND = "rlplus"
EXTENSION = "rlplus.train.rollout.receiver.Extension"
RECEIVER: dict[str, Any] = {"worker_extension_cls": EXTENSION, "weight_transfer_config": {"backend": BACKEND}}


class Clock:
    """Ends a body that shows no progress for timeout_s. body: its name in the message, key: the setting's.

    The stacks of all threads go to stderr, then RunFailed interrupts what Python can interrupt in the main thread.
    If Python cannot interrupt it (a collective waiting for a dead rank), the process exits after a grace period.
    """

    def __init__(self, body: str, key: str, timeout_s: float) -> None:
        self._body = body
        self._key = key
        self._timeout_s = timeout_s
        self._ending = threading.Lock()

    def at(self, waiting_for: str) -> None:
        """Report progress: from now on the body has timeout_s for `waiting_for`."""
        self._waiting_for = waiting_for
        self._deadline = time.monotonic() + self._timeout_s

    @contextmanager
    def running(self, waiting_for: str) -> Iterator[None]:
        """Watch the body from a thread."""
        self._done = threading.Event()
        self.at(waiting_for)
        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGALRM, self._overdue) if main else None
        try:
            threading.Thread(target=self._watch, args=(self._done, main), daemon=True).start()
            yield
        finally:
            try:
                if main:  # first: an alarm that comes now is for a body that is over; one that is due is raised here
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
            finally:
                self._stop()
                if main:
                    signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)  # None: one that Python did not set

    def _stop(self) -> None:
        with self._ending:
            self._done.set()

    def _overdue(self, *_: Any) -> None:
        raise RunFailed(self._message)

    @property
    def _message(self) -> str:
        return (
            f"rank {rank()}: {self._body} waited more than {self._timeout_s:g} s for {self._waiting_for} "
            f"({self._key}). Look for a rank or an engine that died or hangs"
        )

    def _watch(self, done: threading.Event, interrupt: bool) -> None:
        """Watch one body; `done` is its own event, as another body may already have followed it."""
        while not done.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                break
        with self._ending:
            if done.is_set():
                return
            sys.stderr.write(f"rlplus: {self._message}. Stacks of process {os.getpid()}:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(STDERR)
            if interrupt:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not (interrupt and done.wait(GRACE_S)):
            os._exit(EXIT_OVERDUE)


def rank() -> int:
    """This process's rank, for messages, also before torch.distributed is initialized."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def parameter_shapes(path: str, *, trust_remote_code: bool) -> tuple[dict[str, torch.Size], int]:
    """Names and shapes of a push's tensors for the model of a config.json, in order; and the vocabulary's size."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with whole_model(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes, model.get_input_embeddings().num_embeddings


class Expected:
    """The parameters of a push that have not come yet. ValueError at one that does not fit."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._missing = set(shapes)

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, detached, while they fit. Lazy: under ZeRO-3 the iterator gathers a few at a time."""
        for name, weight in weights:
            if name not in self._shapes:
                raise ValueError(f"want the model's parameter names; got {name!r}, which it does not have")
            if name not in self._missing:
                raise ValueError(f"want every parameter once; {name!r} came twice")
            if weight.shape != self._shapes[name]:
                raise ValueError(f"want {name} of shape {tuple(self._shapes[name])}; got {tuple(weight.shape)}")
            self._missing.remove(name)
            yield name, weight.detach()

    def finish(self) -> None:
        """ValueError where one did not come."""
        if left := sorted(self._missing):
            raise ValueError(f"want every parameter; {len(left)} did not come: {', '.join(left[:5])}")


def checked_weights(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, detached, while they fit shapes; ValueError at a misfit, and at the end for a missing one."""
    expected = Expected(shapes)
    yield from expected.checked(weights)
    expected.finish()


@contextmanager
def watched(
    weights: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], *, version: int, timeout_s: float
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """`checked_weights` for the body to exhaust; RunFailed when it stays at one parameter for more than timeout_s.

    The message names rank, parameter and who did not answer. As `Clock` does it: where the body cannot be interrupted
    the process ends.
    """
    clock = Clock(f"the push of version {version}", "rollout.push_timeout_s", timeout_s)
    with clock.running("the push to begin"):
        yield _timed(checked_weights(weights, shapes), shapes, clock)


def _timed(
    weights: Iterator[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], clock: Clock
) -> Iterator[tuple[str, Tensor]]:
    expected = dict.fromkeys(shapes)  # trainer and engine name parameters in the same order
    while True:
        clock.at(f"the trainer to gather {next(iter(expected), 'the end')}")
        item = next(weights, None)
        if item is None:
            clock.at(f"the engine to finish after {list(shapes)[-1]}")
            return
        expected.pop(item[0])
        clock.at(f"the engine to load {item[0]}")
        yield item


def ranks_here() -> int:
    """Ranks on this machine: torchrun and the DeepSpeed launcher have different names for it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
