"""Heads that are split over ranks that are threads, and the results of the ranks as one."""

import os
from typing import Any

import pytest
import torch
from head_cases import Head, run
from thread_ranks import together
from torch import Tensor

from rlplus import Objective
from rlplus.loss.backends import native

V, NAMES = 23, ("weight", "bias")
SPLITS = [(12, 11), (20, 3), (0, 23), (6, 6, 6, 5), (1, 0, 19, 3)]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="ranks are threads: want no GPU"))
CPP = pytest.param("cpp", marks=pytest.mark.skipif(not native.load(), reason="the native library is not built"))


def rows_of(head: Head, split: tuple[int, ...], rank: int) -> Head:
    own = slice(sum(split[:rank]), sum(split[: rank + 1]))
    return head | {name: head[name][own] for name in NAMES}


def whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of the ranks as one: what all know is the same in every bit, the gradients of rows in their order."""
    first, *others = results
    for name in ("loss", "logprob", "entropy", "dhidden"):
        bits = [result[name].nan_to_num(1e30) for result in results]
        assert all(torch.equal(bits[0], other) for other in bits), name
    assert all(first["stats"] == other["stats"] for other in others)
    return first | {name: torch.cat([result[name] for result in results]) for name in ("dweight", "dbias")}


def split_run(
    split: tuple[int, ...], head: Head, constants: dict[str, Tensor], objective: Objective, **options: Any
) -> dict[str, Any]:
    def work(rank: int, group: Any) -> dict[str, Any]:
        return run(rows_of(head, split, rank), constants, objective, group=group, **options)

    return whole(together(len(split), work))
