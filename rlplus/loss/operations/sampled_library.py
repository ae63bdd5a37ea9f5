"""`linear_logprob` with a sampled backward pass as torch sees it; in the way of `library.py`.

The forward pass returns the elements that the backward pass adds up, so their number is known when it has run.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlplus.loss.backends import sampled
from rlplus.loss.backends.backend_interface import Slopes
from rlplus.loss.guard.faults import advising
from rlplus.loss.guard.precision import full_precision
from rlplus.loss.head.gradient_sum import Needs, Want
from rlplus.loss.head.head import Head
from rlplus.loss.operations.library import (
    checked_shards,
    differentiate,
    drawer_of,
    empty_gradients,
    in_one_dtype,
    in_own_dtypes,
    keep_for_backward,
)
from rlplus.loss.operations.op_arguments import schema, unpack


@torch.library.custom_op(
    "rlplus::sampled_logprob",
    mutates_args=(),
    schema=f"({schema(Head)}, float scratch_bytes, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def sampled_logprob(*arguments: Any) -> tuple[Tensor, ...]:
    """-> as `linear_logprob`, and the elements of the backward pass, see `sampled.Elements`."""
    head, scratch_bytes, backend = unpack(arguments, Head)
    shards = checked_shards(head, backend, scratch_bytes, "sampled logprob", head.threshold)
    with full_precision(head.hidden.device), advising(backend):
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
    with full_precision(head.hidden.device), advising(backend):
        rounded, inner = in_one_dtype(head, want)
        gradients = sampled.gradients(rounded, elements, Slopes(dlogprob, dentropy), inner)
        return in_own_dtypes(gradients, head, want, inner)


@sampled_logprob_backward.register_fake
def _(dlogprob, dentropy, *arguments):  # type: ignore[no-untyped-def]
    head, *_, needs = unpack(arguments[4:], Head)
    return empty_gradients(head, needs)


sampled_logprob.register_autograd(partial(differentiate, sampled_logprob_backward), setup_context=keep_for_backward)
