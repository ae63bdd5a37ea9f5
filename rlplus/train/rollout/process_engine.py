"""A rollout engine in a separate process; if it dies or hangs, it is restarted and the request repeated.

Weights pass through shared memory (`NodeWeights`), which stays until the next push: a new process loads it, and with
the same weights, prompts and seeds it gives the same answers.
"""

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlplus.common import activity
from rlplus.common.errors import RunFailed
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.parcels import NodeWeights, Parcel
from rlplus.train.rollout.protocol import Completion, Request, Sampling
from rlplus.train.rollout.push import GRACE_S, parameter_shapes, rank, ranks_here, watched

WORKER = "rlplus.train.rollout.engine_worker"
ATTEMPTS = 3  # tries per request, in case the request itself crashes the engine
POLL_S = 0.5  # interval of looks at a dead worker whose pipe a child still holds open
STOP_S = 10.0  # limit of an orderly end
START_S = 1800.0  # limit for loading a model, compiling and capturing graphs, which shows no progress
BEAT_S = 0.1  # interval of signs of progress
STACKS_SIGNAL = signal.SIGUSR2  # asks a process for its stacks
STACKS_S = 1.0  # the time for writing them
PROGRESS = "progress"  # a message that is no answer yet
# The launcher's variables are left out: the engine is no rank of the trainer's group.
LAUNCHER = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")

logger = logging.getLogger(__name__)


class _EngineDied(Exception):
    """The process ended, or its engine raised an error that is not the caller's fault. The message says which."""


class ProcessEngine:
    """`settings`: arguments of the engine class that config.engine names. For one thread at a time."""

    def __init__(self, config: RolloutConfig, model_path: str, **settings: Any) -> None:
        path = settings["config_path"] or model_path
        self._shapes, _ = parameter_shapes(path, trust_remote_code=settings["trust_remote_code"])
        if (adapters := settings.get("adapters")) is not None:
            self._shapes = adapters.shapes
        self._timeout_s = config.push_timeout_s
        self._progress_s = config.progress_timeout_s
        inside = config.model_copy(update={"mode": "colocated"})
        self._settings = {"config": inside, "model_path": model_path, **settings}
        self._environment = _environment(config.tensor_parallel_size)
        self._held: tuple[Parcel, int] | None = None  # the last push and its version
        self._failure: str | None = None
        self._closed = self._busy = False  # busy: a question is unanswered, and `close` does not wait
        self._weights = NodeWeights()
        self.name = f"{config.engine} (process)"
        self.restarts = 0
        try:
            self._start()
        except _EngineDied as error:
            raise RunFailed(f"{self.name}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if self._failure:
            raise RuntimeError(self._failure)
        answer: list[list[Completion]] = self._ask("generate", list(requests), sampling)
        return answer

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._held = None
        self._failure = f"the push of version {version} failed half-way: push a whole model before generating"
        with watched(weights, self._shapes, version=version, timeout_s=self._timeout_s) as checked:
            parcel = self._weights.replace(checked)
        self._held = parcel, version
        self._ask("push_weights", *self._held)
        self._failure = None

    def sleep(self) -> None:
        """A no-op: the engine has its GPUs to itself."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._failure = "the engine is closed"
        self._pipe.close()  # which ends the loop on the other side
        deadline = time.monotonic() + (0 if self._busy else STOP_S)
        while not self._dead():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self._kill()
        self._weights.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._closed:
            raise RuntimeError(self._failure)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if attempt > 1:
                    self._restart(loading=method != "push_weights")
                return self._exchange((method, arguments), self._limit_s(method))
            except _EngineDied as error:
                if self._closed:  # another thread closed it and does not want the answer any more
                    raise RuntimeError("the engine was closed") from error
                if attempt == ATTEMPTS:
                    self.close()
                    raise RunFailed(
                        f"rank {rank()}: {self.name} died {ATTEMPTS} times at one {method}; the last time: {error}"
                    ) from error.__cause__
                logger.warning("%s died in %s: %s. Starting it again", self.name, method, error)

    def _restart(self, *, loading: bool) -> None:
        self._pipe.close()
        self._kill()  # it may hang, or live with a broken engine
        self.restarts += 1
        self._start()
        if loading and self._held is not None:
            self._exchange(("push_weights", self._held), self._limit_s("push_weights"))

    def _limit_s(self, method: str) -> float:
        return self._timeout_s + GRACE_S if method == "push_weights" else self._progress_s

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        _limit(self._pipe, self._progress_s)
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=self._environment,
            start_new_session=True,  # a group of its own, killed as one; Ctrl-C reaches the trainer only
        )
        theirs.close()
        try:
            if self._closed:
                raise _EngineDied("closed while it started")
            self._exchange(self._settings, START_S)
        except BaseException:
            self._pipe.close()
            self._kill()
            raise

    def _exchange(self, message: Any, timeout_s: float) -> Any:
        """Send a request and wait for the answer: _EngineDied if none will come; the engine's ValueError is re-raised.

        timeout_s: between two signs of progress, of which the answer is the last.
        """
        self._busy = True
        try:
            if self._dead():  # a child may still hold the pipe, which then takes no more than its buffer
                raise EOFError
            self._pipe.send(message)
            status = PROGRESS
            while status == PROGRESS:
                deadline = time.monotonic() + timeout_s
                while not self._pipe.poll(POLL_S):
                    if self._dead():
                        raise EOFError
                    if time.monotonic() > deadline:
                        raise self._hanging(timeout_s)
                status, answer = self._pipe.recv()
                if status == PROGRESS:
                    activity.rollouts.restore(answer)
        except BlockingIOError as error:  # it hangs half-way through a message
            raise self._hanging(self._progress_s) from error
        except (EOFError, OSError) as error:
            raise _EngineDied(f"process {self.pid} ended with status {self._kill()}") from error
        self._busy = False
        if status == "ok":
            return answer
        if isinstance(answer, (ValueError, RunFailed)):
            raise answer
        raise _EngineDied(f"{type(answer).__name__}: {answer}") from answer

    def _hanging(self, timeout_s: float) -> _EngineDied:
        """First its stacks, from itself to the log."""
        message = f"process {self.pid} hangs: no progress for {timeout_s:g} s"
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "tT":
                return _EngineDied(f"{message}; it is stopped (SIGSTOP, or a debugger)")
            logger.warning("%s. Its stacks:", message)
            os.kill(self.pid, STACKS_SIGNAL)
            time.sleep(STACKS_S)
        except OSError:  # it has ended meanwhile
            pass
        return _EngineDied(message)

    def _dead(self) -> bool:
        """Leaves a dead process a zombie until `_kill`, so that the number of its group stays its own."""
        return (
            self._process.returncode is not None
            or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def _kill(self) -> int:
        """Kill the process and its children; its exit status (negative: the signal that ended it)."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


def _limit(pipe: Connection, timeout_s: float) -> None:
    """A read or write that makes no progress for timeout_s is a BlockingIOError, as it is half-way through a message
    when the other side stops."""
    seconds, rest = divmod(timeout_s, 1)
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(rest * 1e6)))


def _environment(gpus: int) -> dict[str, str]:
    """This process's environment without the launcher's variables; visible GPUs: those after the trainer's ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    package = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    if dist.is_initialized():
        environment["RANK"] = str(dist.get_rank())  # shown in messages
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        ranks = ranks_here()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
        first = ranks + local * gpus
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + gpus])
    return environment


class _Heartbeat:
    """Replaces an engine's `Clock`: sends each sign of progress to the trainer, which ends a hanging engine."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._last = 0.0

    def at(self, _: str) -> None:
        if time.monotonic() - self._last >= BEAT_S:
            self._pipe.send((PROGRESS, activity.rollouts.state()))
            self._last = time.monotonic()

    @contextmanager
    def running(self, _: str) -> Iterator[None]:
        yield


def serve(pipe: Connection) -> None:
    """The engine's side: create the engine, then answer until the pipe is closed."""
    from rlplus.train.rollout import make_engine

    settings = pipe.recv()
    engine: Any = None

    def answer(question: Any) -> None:
        nonlocal engine
        try:
            if engine is None:
                engine = make_engine(**question)
                result = None
                engine.clock = _Heartbeat(pipe)
            else:
                method, arguments = question
                result = getattr(engine, method)(*arguments)
            pipe.send(("ok", result))
        except Exception as error:
            pipe.send(("error", _sendable(error)))

    answer(settings)
    while engine is not None:
        try:
            question = pipe.recv()
        except (EOFError, ConnectionError):
            engine.close()
            return
        answer(question)


def _sendable(error: Exception) -> Exception:
    """The error, or its text if its class cannot be pickled or restored."""
    try:
        return error if isinstance(pickle.loads(pickle.dumps(error)), type(error)) else RuntimeError(repr(error))
    except Exception:
        return RuntimeError(repr(error))
