"""Reward functions that hang, crash, print, leave processes behind or forge replies, and what their tests share."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlplus.train.config import RewardConfig
from rlplus.train.data import Example

GRADERS = r"""
import ctypes, os, re, signal, subprocess, sys, threading, time

poisoned = False

def hang():
    while True:
        time.sleep(600)

def burn():
    while True:
        pass

def note(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    with open(path) as file:
        return len(file.readlines())

def on_all_descriptors(data):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, data)
        except OSError:
            pass

def later(action, seconds=0.1):
    threading.Timer(seconds, action).start()

def descendants(path):
    before = len(open(path).read().split()) if os.path.exists(path) else 0
    note_and_wait = f"import os, time; open({path!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    command = [sys.executable, "-c", note_and_wait]
    double = f"import subprocess; subprocess.Popen({command!r})"
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.run([sys.executable, "-c", double])
    subprocess.run([sys.executable, "-c", double], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(command[0], command)
        os._exit(0)
    while not os.path.exists(path) or len(open(path).read().split()) < before + 5:
        time.sleep(0.01)

def grade(text, answer):
    global poisoned
    command, _, argument = text.partition(" ")
    if command == "sleep":
        hang()
    if command == "hop" and os.fork() == 0:  # a chain of processes, each started by one that ends
        ctypes.CDLL(None).prctl(15, argument.encode())
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
    if command == "nap":
        time.sleep(float(argument))
    if command == "burn":
        burn()
    if command == "burn-in-a-child":
        subprocess.run([sys.executable, "-c", "while True: pass"])
    if command == "regex":  # holds the interpreter lock for ages
        return float(re.match(r"(a+)+$", "a" * 40 + "b") is None)
    if command == "exit":
        os._exit(3)
    if command == "hog":
        return float(len(bytearray(1 << 40)))
    if command == "list":
        block = []
        while True:
            block.append(bytearray(1 << 20))
    if command == "raise":
        raise KeyError(argument)
    if command == "nan":
        return float("nan")
    if command == "none":
        return None
    if command == "pid":
        return float(os.getpid())
    if command == "poison":
        poisoned = True
    if poisoned:
        raise RuntimeError("this process is spoilt")
    if command.startswith("first-"):  # fails in the first process that grades it
        if note(argument) == 1:
            grade(command.removeprefix("first-"), answer)
        return 1.0
    if command == "segfault":
        ctypes.string_at(0)
    if command == "ignore-own-signal":  # how shells end what they started
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    if command == "write":
        on_all_descriptors(argument.encode().decode("unicode_escape").encode("latin-1") * 3)
        return 0.0
    if command == "flood-replies":
        while True:
            on_all_descriptors(b"x" * 65536)
    if command == "write-later":
        later(lambda: on_all_descriptors(b"[0, 1.0, \"ok\", \"\"]\n"))
    if command == "close":
        os.closerange(3, 64)
    if command == "stop-later":
        later(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if command == "print":
        os.write(1, argument.encode().decode("unicode_escape").encode("latin-1"))
        return 1.0
    if command == "flood":
        for _ in range(64):
            os.write(1, b"y" * 65535 + b"\n")
        return 1.0
    if command.startswith("descendants"):
        descendants(argument)
        if command == "descendants-then-burn":
            burn()
        if command == "descendants-then-exit":
            os._exit(3)
        return 1.0
    print("a print of the grader")
    return float(text == answer)

not_callable = 3
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")


def reward_config(**changes: object) -> RewardConfig:
    fields: dict[str, object] = {
        "pattern": None,
        "require_think": False,
        "workers": 2,
        "timeout_s": 20.0,
        "memory_mb": 512,
    }
    return RewardConfig(**(fields | changes))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def example(index: int, demonstration: str | None) -> Example:
    tokens = None if demonstration is None else (*map(ord, demonstration), 0)
    return Example(index=index, prompt=(1,), answer="7", demonstration=tokens)


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token)
