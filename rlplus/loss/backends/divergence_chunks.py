"""The divergence of two heads on the `triton` backend: both logits of a chunk of tokens by the vendor's GEMMs, in fp32,
two row kernels, and the vendor's GEMMs of the gradients.

A row of a chunk takes 8 bytes of scratch a logit; with inputs of half precision 10, as its gradient is not over the
student's logits. It is written once and read three times, and the
host does not wait. A sampled backward pass reads the gradient once more, in fp32, and the host waits for numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.kernels import divergence_rows as kernels
from rlplus.loss.backends.drawn_gradients import gradients_of
from rlplus.loss.backends.triton import on_device
from rlplus.loss.backends.triton_draws import draw
from rlplus.loss.backends.ways import width
from rlplus.loss.head import cost
from rlplus.loss.head.gradient_sum import Gradients, Want, gradient_dtype
from rlplus.loss.head.head import Head, logits_into

DIVERGENCE = kernels.DIVERGENCE.value
WEIGHT = kernels.WEIGHT.value
WIDTH = kernels.WIDTH.value


def divergence(head: Head, teacher: Head, weights: Tensor, beta: float, want: Want) -> tuple[Tensor, Gradients]:
    """As in `chunked`: -> divergence (N,), gradients of sum(weights * divergence)."""
    found = head.hidden.new_empty(len(head.target), dtype=head.dtype)
    grads = gradients_of(head, want, [weights], draw)
    with on_device(head.hidden.device):
        for rows, buffers in _chunks(head, want.scratch_bytes, want.some):
            part = head.rows(rows)
            other = teacher.rows(rows)
            V = len(head.weight)
            logits, teacher_logits, out = buffers
            _logits(part, logits[:, :V])
            _logits(other, teacher_logits[:, :V])
            values = found.new_empty(len(part.target), WIDTH)
            rest = (logits, teacher_logits, V, _transform(part), _transform(other), beta)
            kernels.row_divergences(values, *rest)
            found[rows] = values[:, DIVERGENCE]
            if want.some:
                values[:, WEIGHT] = grads.scaled(weights[rows])
                kernels.row_gradients(out, values, *rest)
                grads.add(rows, part, out[:, :V], weights[rows] != 0, clean=True)
    return found, grads.finish()


def _chunks(head: Head, scratch_bytes: float, gradient: bool) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
    """Rows of a chunk, and buffers (n, W) for the student's logits, the teacher's and the gradient."""
    N = len(head.target)
    W = width(head)
    dtype = gradient_dtype(head) if head.uniform is None else head.dtype
    apart = gradient and dtype != head.dtype
    row = W * (2 * head.dtype.itemsize + apart * dtype.itemsize)
    row += 2 * head.hidden.shape[1] * (head.hidden.dtype.itemsize + head.dtype.itemsize)
    size = min(cost.whole_tiles(scratch_bytes / row), N)
    logits = head.hidden.new_empty(size, W, dtype=head.dtype)
    teacher_logits = torch.empty_like(logits)
    out = head.hidden.new_empty(size, W, dtype=dtype) if apart else logits
    for start in range(0, N, max(size, 1)):
        n = min(size, N - start)
        yield slice(start, start + n), (logits[:n], teacher_logits[:n], out[:n])


def _logits(head: Head, out: Tensor) -> None:
    """hidden weight^T (n, V), in fp32."""
    if head.mixed:
        torch.mm(head.hidden, head.weight.t(), out_dtype=out.dtype, out=out)
    else:
        logits_into(head, out)


def _transform(head: Head) -> kernels.Transform:
    bias = None if head.bias is None else head.bias.contiguous()
    temperature = None if head.row_temperature is None else head.row_temperature.contiguous()
    return kernels.Transform(bias, head.temperature, head.softcap, temperature)
