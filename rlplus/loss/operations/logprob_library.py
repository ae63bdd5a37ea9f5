"""`linear_logprob` as torch sees it; in the way of `library.py`.

The logits do not depend on the loss. So for an exact backward pass the last rows' logits stay between the passes, as
many as fit, and only the others are computed again: it has two GEMMs, or one if the head is frozen. For a sampled one
the forward pass returns the elements to add up, whose number is known when it has run.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import Slopes, Stored, implementation, kept_tokens, sampled
from rlplus.loss.guard.scope import guarded
from rlplus.loss.head.gradient_sum import Gradients, Needs, Want
from rlplus.loss.head.head import Head
from rlplus.loss.operations.library import (
    checked_shards,
    differentiate,
    drawer_of,
    empty_gradients,
    in_one_dtype,
    in_own_dtypes,
    keep_for_backward,
    schema,
    sharded,
    shards_of,
    unpack,
)


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
    shards = checked_shards(head, backend, scratch_bytes, "logprob")
    head = head.rounded()
    blocks = implementation(backend)
    stored = _new_stored(head, scratch_bytes, backend, stores)
    split = len(head.target) - len(stored[0])
    with guarded(head.hidden.device, backend):
        if shards is not None:
            found = [sharded().logprob(blocks, shards, head)]
        elif head.kept_offsets is not None:
            found = [kept_tokens.logprob(blocks.logprob, head, scratch_bytes)]
        else:
            first = [blocks.logprob(head.rows(slice(split)), scratch_bytes)] if split or not len(head.target) else []
            last = [blocks.logprob(head.rows(slice(split, None)), scratch_bytes, stored)] if len(stored[0]) else []
            found = [*first, *last]
    if len(found) == 1:
        return *found[0], *stored
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), *stored


def _new_stored(head: Head, scratch_bytes: float, backend: str, stores: bool) -> Stored:
    """Memory for the logits of as many rows as fit scratch_bytes, and for numbers of these rows."""
    rows = 0
    if stores and not head.group and head.kept_offsets is None:
        row = sum(x.shape[1] * x.itemsize for x in implementation(backend).new_stored(head, 0))
        rows = min(len(head.target), int(scratch_bytes // row))
    return implementation(backend).new_stored(head, rows)


@linear_logprob.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    head, scratch_bytes, backend, stores = unpack(arguments, Head)
    return head.new_column(), head.new_column(), *_new_stored(head, scratch_bytes, backend, stores)


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
    slopes = Slopes(dlogprob, dentropy)
    everywhere = torch.ones_like(head.target, dtype=torch.bool)
    per_token = {"dlogprob": dlogprob, "dentropy": dentropy}
    shards = shards_of(head, backend, scratch_bytes, everywhere, ("logprob, backward", needs[0]), per_token)
    want = Want(scratch_bytes, Needs(*needs))
    with guarded(head.hidden.device, backend):
        rounded, inner = in_one_dtype(head, want)
        compute = partial(_whole_vocabulary, backend, shards, stored)
        if head.kept_offsets is None:
            gradients = compute(rounded, slopes, inner)
        else:
            gradients = kept_tokens.logprob_backward(compute, rounded, slopes, inner)
        return in_own_dtypes(gradients, head, want, inner)


def _whole_vocabulary(backend: str, shards: Any, stored: Stored, head: Head, slopes: Slopes, want: Want) -> Gradients:
    """The gradients of a head without kept tokens, of whose rows the last ones are stored."""
    blocks = implementation(backend)
    if shards is not None:
        return sharded().logprob_backward(blocks, shards, head, slopes, want)
    split = len(head.target) - len(stored[0])
    if not len(stored[0]) or not split:
        return blocks.logprob_backward(head, slopes, want, stored if len(stored[0]) else None)
    total = want.weight_grad  # one sum over both parts
    if want.needs.weight:
        total = head.hidden.new_zeros(head.weight.shape, dtype=head.dtype)
    first = slice(split)
    last = slice(split, None)
    inner = want.into(total)
    dhidden, dweight, dbias = blocks.logprob_backward(head.rows(first), slopes.rows(first), inner)
    last_dhidden, _, last_dbias = blocks.logprob_backward(head.rows(last), slopes.rows(last), inner, stored)
    if want.needs.weight and total is not None:
        dweight = total.to(head.hidden.dtype)
    return torch.cat([dhidden, last_dhidden]), dweight, dbias + last_dbias


@linear_logprob_backward.register_fake
def _(dlogprob, dentropy, *arguments):  # type: ignore[no-untyped-def]
    head, *_, needs = unpack(arguments[2:], Head)
    return empty_gradients(head, needs)


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *rest, _, needs = given  # without `stores`
    return linear_logprob_backward(*rest, needs)


linear_logprob.register_autograd(partial(differentiate, _backward), setup_context=keep_for_backward)


# ---- with a sampled backward pass


@torch.library.custom_op(
    "rlplus::sampled_logprob",
    mutates_args=(),
    schema=f"({schema(Head)}, float scratch_bytes, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def sampled_logprob(*arguments: Any) -> tuple[Tensor, ...]:
    """-> as `linear_logprob`, and the elements of the backward pass, see `sampled.Elements`."""
    head, scratch_bytes, backend = unpack(arguments, Head)
    shards = checked_shards(head, backend, scratch_bytes, "sampled logprob", head.threshold)
    with guarded(head.hidden.device, backend):
        everywhere = torch.ones_like(head.target, dtype=torch.bool)  # where no logprob has a gradient, an entropy may
        known = sampled.forward(*drawer_of(backend, shards, head.rounded()), everywhere, scratch_bytes)
    return known.logprob, known.entropy, *known.elements


@sampled_logprob.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    head, *_ = unpack(arguments, Head)
    size = torch.library.get_ctx().new_dynamic_size()
    rows = [head.hidden.new_empty(len(head.target), dtype=head.dtype) for _ in range(2)]
    numbers = [head.target.new_empty(size) for _ in range(2)]
    return *rows, *numbers, *(head.hidden.new_empty(size, dtype=head.dtype) for _ in range(2))


@torch.library.custom_op(
    "rlplus::sampled_logprob_backward",
    mutates_args=(),
    schema="(Tensor dlogprob, Tensor dentropy, Tensor row, Tensor token, Tensor of_logprob, Tensor of_entropy, "
    f"{schema(Head)}, float scratch_bytes, str backend, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def sampled_logprob_backward(dlogprob: Tensor, dentropy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """-> dhidden, dweight, dbias, without elements where not needed."""
    elements = sampled.Elements(*arguments[:4])
    head, scratch_bytes, backend, needs = unpack(arguments[4:], Head)
    want = Want(scratch_bytes, Needs(*needs))
    with guarded(head.hidden.device, backend):
        rounded, inner = in_one_dtype(head, want)
        gradients = sampled.gradients(rounded, elements, Slopes(dlogprob, dentropy), inner)
        return in_own_dtypes(gradients, head, want, inner)


@sampled_logprob_backward.register_fake
def _(dlogprob, dentropy, *arguments):  # type: ignore[no-untyped-def]
    head, *_, needs = unpack(arguments[4:], Head)
    return empty_gradients(head, needs)


sampled_logprob.register_autograd(partial(differentiate, sampled_logprob_backward), setup_context=keep_for_backward)
