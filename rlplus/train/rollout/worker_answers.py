"""Answers of a server's workers to its trainer, through a pipe of the trainer: each says what became of each call.

vLLM reads the answers of its workers up to the first that failed, and takes those it left for answers to its next call;
of a server of several engines (data parallel) it gives the first one's only. So a worker of ours lets no call fail, and
says in the pipe what did. Like `parcels`, it is opened through /proc, by processes of the same user on one machine. It
also shows whether the trainer is still there.
"""

import json
import os
import select
import stat
import time
from contextlib import suppress
from typing import Any

ANSWERS_S = 30.0  # limit for all workers' answers, which are written before the server says that a call has ended
MOST = 300  # characters of a failure, of 12 bytes at most: a write of up to 4096 is not mixed with another worker's


class Answers:
    """The trainer's end. `fd` is what workers write to, until it is closed."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._read, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._text = b""

    def take(self, call: str) -> list[dict[str, Any]]:
        """Each worker's answer to a call that has ended, failures too; OSError where one does not come."""
        answers: list[dict[str, Any]] = []
        deadline = time.monotonic() + ANSWERS_S
        while len(answers) < self._workers:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(
                    f"want {self._workers} workers' answers to {call}; got {len(answers)} in {ANSWERS_S:g} s. Are "
                    "they all on this machine? Was the server started again? Its log says more"
                )
            *lines, self._text = (self._text + os.read(self._read, 2**16)).split(b"\n")
            answers += map(_read, lines)
        if others := {answer["call"] for answer in answers} - {call}:
            raise OSError(f"want its workers' answers to {call}; got one to {others.pop()}: does another program push?")
        return answers

    def check(self, call: str) -> list[dict[str, Any]]:
        """`take`; OSError with the failures among the answers."""
        answers = self.take(call)
        if failures := sorted({answer["failure"] for answer in answers} - {""}):
            raise OSError(f"{call}: {'; '.join(failures)}")
        return answers

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self._read)
            os.close(self.fd)
        self.fd = -1


def _read(line: bytes) -> dict[str, Any]:
    """An answer. OSError for anything else: another program of this user may write to the pipe."""
    with suppress(ValueError, RecursionError):
        answer = json.loads(line)
        if isinstance(answer, dict) and all(isinstance(answer.get(name), str) for name in ("call", "failure")):
            return answer
    raise OSError(f"want a worker's answer, JSON with call and failure, in this process's pipe; got {line[:MOST]!r}")


class Trainer:
    """A worker's end: process pid, which has an `Answers` under fd. ValueError if it cannot be opened."""

    def __init__(self, run: str, pid: int, fd: int) -> None:
        self.run = run
        self.pid = int(pid)
        path = f"/proc/{self.pid}/fd/{int(fd)}"  # numbers: a request may hold anything
        try:
            self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(
                f"want the trainer's pipe at {path}: both processes on one machine, in one container, of one user; got "
                f"{error.strerror}"
            ) from error
        self._process = -1
        try:
            if not stat.S_ISFIFO(os.fstat(self._pipe).st_mode):
                raise ValueError(f"want a pipe at {path}; got something else")
            self._process = os.pidfd_open(self.pid)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise ValueError(f"want to watch process {self.pid} (pidfd_open); got {error.strerror}") from error

    def alive(self) -> bool:
        """Whether the process lives and has not closed its end, which a child of it may hold for longer."""
        poll = select.poll()
        poll.register(self._pipe, 0)  # an error, that there is no reader, is always told
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def tell(self, call: str, failure: str = "", **more: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended meanwhile
            os.write(self._pipe, json.dumps({"call": call, "failure": failure[:MOST], **more}).encode() + b"\n")

    def close(self) -> None:
        for fd in (self._pipe, self._process):
            if fd >= 0:
                os.close(fd)
        self._pipe = self._process = -1
