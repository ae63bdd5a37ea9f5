"""The divergence of two heads on the `triton` backend: both logits of a chunk of tokens by the vendor's GEMMs, in fp32,
two row kernels, and the vendor's GEMMs of the gradients.

A row of a chunk takes 8 bytes of scratch a logit; with inputs of half precision 10, as its gradient is not over the
student's logits. It is written once and read three times. The host does not wait.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlplus.kernels import divergence_rows as kernels
from rlplus.loss.backends.triton import on_device
from rlplus.loss.backends.ways import gradient_dtype, width
from rlplus.loss.head import cost
from rlplus.loss.head.head import Gradients, Head, add_dweight, dhidden, fp16_scale, logits_into

DIVERGENCE, WEIGHT, WIDTH = kernels.DIVERGENCE.value, kernels.WEIGHT.value, kernels.WIDTH.value


def divergence(
    head: Head,
    teacher: Head,
    weights: Tensor,
    beta: float,
    scratch_bytes: float,
    needs: list[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """As in `chunked`: -> divergence (N,), gradients of sum(weights * divergence) where needed."""
    found = head.hidden.new_empty(len(head.target), dtype=head.dtype)
    grads = Gradients.zeros(head, needs, weight_grad)
    gradient = any(g.numel() for g in grads)
    scale = fp16_scale(weights) if gradient and gradient_dtype(head) == torch.float16 else None
    with on_device(head.hidden.device):
        for rows, buffers in _chunks(head, scratch_bytes, gradient):
            part, other, V = head.rows(rows), teacher.rows(rows), len(head.weight)
            logits, teacher_logits, out = buffers
            _logits(part, logits[:, :V])
            _logits(other, teacher_logits[:, :V])
            values = found.new_empty(len(part.target), WIDTH)
            rest = (logits, teacher_logits, V, _transform(part), _transform(other), beta)
            kernels.row_divergences(values, *rest)
            found[rows] = values[:, DIVERGENCE]
            if gradient:
                values[:, WEIGHT] = weights[rows] if scale is None else weights[rows] * scale
                kernels.row_gradients(out, values, *rest)
                _add(part, rows, out[:, :V], weights[rows] != 0, scale, grads)
    if scale is not None:
        grads.weight.div_(scale)
        grads.bias.div_(scale)
    return found, grads.finish(head, weight_grad)


def _chunks(head: Head, scratch_bytes: float, gradient: bool) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
    """Rows of a chunk, and buffers (n, W) for the student's logits, the teacher's and the gradient."""
    N, W, dtype = len(head.target), width(head), gradient_dtype(head)
    apart = gradient and dtype != head.dtype
    row = W * (2 * head.dtype.itemsize + apart * dtype.itemsize)
    row += 2 * head.hidden.shape[1] * (head.hidden.dtype.itemsize + head.dtype.itemsize)
    size = min(cost.whole_tiles(scratch_bytes / row), N)
    logits, teacher_logits = (head.hidden.new_empty(size, W, dtype=head.dtype) for _ in range(2))
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
    bias, own = (None if x is None else x.contiguous() for x in (head.bias, head.row_temperature))
    return kernels.Transform(bias, head.temperature, head.softcap, own)


def _add(head: Head, rows: slice, dz: Tensor, counts: Tensor, scale: Tensor | None, grads: Gradients) -> None:
    """Add the products of a chunk's dz (n, V); head: of the chunk; counts (n,): rows that have a gradient."""
    if grads.hidden.numel():
        product = dhidden(dz, head)
        grads.hidden[rows] = (product if scale is None else product / scale).to(grads.hidden.dtype)
        del product
    if grads.weight.numel():
        add_dweight(grads.weight, dz, head.hidden.masked_fill(~counts[:, None], 0.0))
    if grads.bias.numel():
        grads.bias.add_(dz.sum(0, dtype=grads.bias.dtype))
