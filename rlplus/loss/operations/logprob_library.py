"""`linear_logprob` with its exact backward pass as torch sees it; in the way of `library.py`.

The logits do not depend on the loss: the last rows' logits stay between the passes, as many as fit, and only the
others are computed again. So the backward pass has two GEMMs, or one if the head is frozen.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import implementation, kept_tokens
from rlplus.loss.guard.faults import advising
from rlplus.loss.guard.precision import full_precision
from rlplus.loss.head.head import Head
from rlplus.loss.operations.library import (
    check_logprob_rows,
    check_targets,
    differentiate,
    empty_gradients,
    in_one_dtype,
    keep_for_backward,
    sharded,
    shards_of,
    telling,
)
from rlplus.loss.operations.op_arguments import schema, unpack


@torch.library.custom_op(
    "rlplus::linear_logprob",
    mutates_args=(),
    schema=f"({schema(Head)}, float scratch_bytes, str backend, bool stores) -> (Tensor, Tensor, Tensor, Tensor)",
)
def linear_logprob(*arguments: Any) -> tuple[Tensor, ...]:
    """-> logprob (N,), NaN where the target is IGNORED, entropy (N,), and what is stored of the last rows.

    stores: whether a backward pass may follow.
    """
    head, scratch_bytes, backend, stores = unpack(arguments, Head)
    with telling(head):
        on = check_logprob_rows(head)
    shards = shards_of(head, backend, scratch_bytes, on, ("logprob",), {})
    check_targets(head, len(head.weight) if shards is None else sum(shards.lengths), on)
    del on
    head, blocks = head.rounded(), implementation(backend)
    stored = _new_stored(head, scratch_bytes, backend, stores)
    split = len(head.target) - len(stored[0])
    with full_precision(head.hidden.device), advising(backend):
        if shards is not None:
            found = [sharded().logprob(blocks, shards, head)]
        elif head.kept_offsets is not None:
            found = [kept_tokens.logprob(blocks.logprob, head, scratch_bytes)]
        else:
            first = [blocks.logprob(head.rows(slice(split)), scratch_bytes)] if split or not len(head.target) else []
            last = [blocks.logprob(head.rows(slice(split, None)), scratch_bytes, stored)] if len(stored[0]) else []
            found = [*first, *last]
    logprob, entropy = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
    return logprob, entropy, *stored


def _new_stored(head: Head, scratch_bytes: float, backend: str, stores: bool) -> tuple[Tensor, Tensor]:
    """Memory for the logits of as many rows as fit scratch_bytes, and for numbers of these rows."""
    rows = 0
    if stores and not head.group and head.kept_offsets is None:
        row = sum(x.shape[1] * x.itemsize for x in implementation(backend).new_stored(head, 0))
        rows = min(len(head.target), int(scratch_bytes // row))
    return implementation(backend).new_stored(head, rows)


@linear_logprob.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    head, scratch_bytes, backend, stores = unpack(arguments, Head)
    rows = (head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2))
    return *rows, *_new_stored(head, scratch_bytes, backend, stores)


@torch.library.custom_op(
    "rlplus::linear_logprob_backward",
    mutates_args=(),
    schema="(Tensor dlogprob, Tensor dentropy, Tensor stored_logits, Tensor stored_numbers, "
    f"{schema(Head)}, float scratch_bytes, str backend, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def linear_logprob_backward(dlogprob: Tensor, dentropy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """-> dhidden, dweight, dbias, without elements where not needed."""
    stored = arguments[:2]
    head, scratch_bytes, backend, needs = unpack(arguments[2:], Head)
    blocks, call = implementation(backend), ("logprob, backward", needs[0])
    slopes = {"dlogprob": dlogprob, "dentropy": dentropy}
    everywhere = torch.ones_like(head.target, dtype=torch.bool) if head.group else None
    shards = shards_of(head, backend, scratch_bytes, everywhere, call, slopes)

    def whole(head: Head, dlogprob: Tensor, dentropy: Tensor, *where: Any) -> Any:
        if shards is not None:
            return sharded().logprob_backward(blocks, shards, head, dlogprob, dentropy, *where)
        return _whole_backward(blocks, head, (dlogprob, dentropy), scratch_bytes, stored, *where)

    def compute(head: Head, *where: Any) -> tuple[Any, ...]:
        if head.kept_offsets is None:
            return (whole(head, dlogprob, dentropy, *where),)
        return (kept_tokens.logprob_backward(whole, head, dlogprob, dentropy, scratch_bytes, *where),)

    with full_precision(head.hidden.device), advising(backend):
        return in_one_dtype(compute, head, list(needs), None)  # type: ignore[return-value]


def _whole_backward(
    blocks: Any, head: Head, slopes: tuple[Tensor, Tensor], scratch_bytes: float, stored: tuple[Tensor, Tensor],
    needs: list[bool], weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of rows of which the last ones are stored; weight's has one sum over both parts."""
    split = len(head.target) - len(stored[0])
    if not len(stored[0]):
        return blocks.logprob_backward(head, *slopes, scratch_bytes, needs, weight_grad)
    if not split:
        return blocks.logprob_backward(head, *slopes, scratch_bytes, needs, weight_grad, stored)
    total = weight_grad
    if total is None and needs[1]:
        total = head.hidden.new_zeros(head.weight.shape, dtype=head.dtype)
    where = scratch_bytes, [needs[0], False, needs[2]], total
    parts = []
    for rows, known in ((slice(split), None), (slice(split, None), stored)):
        parts.append(blocks.logprob_backward(head.rows(rows), *(x[rows] for x in slopes), *where, known))
    dhidden, dbias = torch.cat([part[0] for part in parts]), parts[0][2] + parts[1][2]
    dweight = total.to(head.hidden.dtype) if needs[1] else parts[0][1]  # type: ignore[union-attr]
    return dhidden, dweight, dbias


@linear_logprob_backward.register_fake
def _(dlogprob, dentropy, *arguments):  # type: ignore[no-untyped-def]
    head, *_, needs = unpack(arguments[2:], Head)
    return empty_gradients(head, needs)


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *rest, _, needs = given  # without `stores`
    return linear_logprob_backward(*rest, needs)


linear_logprob.register_autograd(partial(differentiate, _backward), setup_context=keep_for_backward)
