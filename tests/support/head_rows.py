"""Rows of logits through the kernels, for tests: statistics in every way, and the gradient."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlplus.kernels import exponentials, row_values
from rlplus.kernels import linear_logprob as kernels
from rlplus.kernels.tiling import STATISTICS, Block

LOGPROB, ENTROPY, REFERENCE = row_values.LOGPROB.value, row_values.ENTROPY.value, row_values.REFERENCE.value
DLOGPROB, DENTROPY, WIDTH = row_values.DLOGPROB.value, row_values.DENTROPY.value, row_values.WIDTH.value
BLOCK_V = STATISTICS.BLOCK_V


def begun(logits: Tensor, V: int, target: Tensor, *transform: Any) -> Tensor:
    """values (n, WIDTH) as `target_logits` leaves them; hidden states of one column that are the targets' logits."""
    known = (target >= 0) & (target < V)
    own = logits.gather(1, target.where(known, 0)[:, None])
    values, bias = logits.new_full((len(target), WIDTH), torch.nan), transform[0] if transform else None
    weight = logits.new_ones(V, 1)
    kernels.target_logits(values, own, weight, target, bias, *(transform[1:] or (1.0,)))
    return values


def statistics(
    logits: Tensor, target: Tensor, V: int | None = None, transform: tuple[Any, ...] = (None, 1.0), parts: int = 1,
    block: Block = STATISTICS, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """values (n, WIDTH) of rows of V logits, by so many programs a row."""
    V = V or logits.shape[1]
    values = begun(logits, V, target, *transform)
    partial = logits.new_full((parts, kernels.PARTIALS.value, len(target)), torch.nan)
    exponentials.row_exponentials(partial, kept, values, logits, V, target, *transform, block=block)
    kernels.finish_rows(values, partial, V, target)
    return values


def in_one(logits: Tensor, target: Tensor) -> Tensor:
    return statistics(logits, target)


def in_parts(logits: Tensor, target: Tensor) -> Tensor:
    return statistics(logits, target, parts=3)


def by_blocks(logits: Tensor, target: Tensor) -> Tensor:
    """Blocks of the vocabulary one after another: half a kernel's block, one and a bit, the rest."""
    V = logits.shape[1]
    values = begun(logits, V, target)
    so_far = logits.new_zeros(1, kernels.PARTIALS.value, len(target))
    so_far[0, 0] = values[:, REFERENCE]
    ends = [0, *(end for end in (BLOCK_V // 2, 2 * BLOCK_V) if end < V), V]
    for start, end in pairwise(ends):
        block = logits[:, start:end].contiguous()
        rest = (end - start, target - start, None, 1.0)
        exponentials.row_exponentials(so_far, None, values, block, *rest, carry=True)
    kernels.finish_rows(values, so_far, V, target)
    return values


WAYS = {"row": in_one, "parts of rows": in_parts, "blocks": by_blocks}


def closed(values: Tensor, e: Tensor, V: int, target: Tensor, *rest: Any, entropy: bool = False) -> Tensor:
    """The gradient of the logits (n, V) that exponentials stand for, which are closed on the way."""
    factor, own = values.new_full((2, len(values)), torch.nan)
    exponentials.close_rows(factor, own, values, e, V, target, *rest, entropy=entropy)
    return with_own(e[:, :V].float() * factor[:, None], own, target)


def with_own(gradient: Tensor, own: Tensor, target: Tensor) -> Tensor:
    """gradient (n, V), in which the targets' elements are 0, and these elements (n,)."""
    known = (target >= 0) & (target < gradient.shape[1])
    at = known.nonzero().squeeze(1), target[known]
    assert not gradient[at].any()
    assert not own[~known].any()
    gradient[at] = own[known]
    return gradient
