"""Sums of gradients in fp32 whatever the weights' dtype: over a weight's uses, over micro-batches, over ranks.

DeepSpeed 0.19 accumulates in fp32 if it is asked to (`deepspeed_settings.IN_FP32`), but takes a parameter's gradient in
the weights' dtype. There the head's, which is summed in fp32, would be rounded, and so would the sum of two uses of one
weight. Other layers' own products are in the weights' dtype: a micro-batch's gradient of them is rounded once, by
PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine
from torch import Tensor


@contextmanager
def without_bf16_optimizer() -> Iterator[None]:
    """Make DeepSpeed accumulate in fp32 at ZeRO-1 with the optimizer of ZeRO-2, as it does with offloading.

    Its choice, BF16_Optimizer, keeps an fp32 gradient of the whole model between updates, too, while the engine
    generates, and reduces it to all ranks.
    """
    choose = DeepSpeedEngine._do_optimizer_sanity_check

    def chosen(engine: DeepSpeedEngine, optimizer: Any) -> Any:
        kind = choose(engine, optimizer)
        return ZERO_OPTIMIZATION if kind == BFLOAT16 else kind

    DeepSpeedEngine._do_optimizer_sanity_check = chosen
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = choose


def in_fp32(engine: DeepSpeedEngine) -> bool:
    """Whether gradients of half-precision weights accumulate in fp32, which `train.deepspeed` can switch off."""
    weights, accumulated = engine.get_data_types()
    return bool(accumulated == torch.float32 != weights)


def take_fp32_gradients(engine: DeepSpeedEngine) -> None:
    """Make autograd sum the trainable parameters' gradients in fp32, and DeepSpeed take them so."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    if engine.zero_optimization_stage() == 2:  # ZeRO-1's bucket is in fp32, ZeRO-3's in the communication dtype
        engine.optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32


def with_head_gradient(engine: DeepSpeedEngine, op: Callable[..., Any]) -> Callable[..., Any]:
    """The head's computation, op(hidden, weight, weight_grad=, ...) -> a named tuple with `loss`, with a weight_grad.

    In ZeRO-1 that is the sum over micro-batches, and the loss has no gradient of weight. ZeRO-2 and ZeRO-3 reduce each
    micro-batch's gradient, so it is a new one, which the loss's backward pass returns.
    """

    def computed(hidden: Tensor, weight: Any, **options: Any) -> Any:
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return op(hidden, weight, **options)
        if engine.zero_optimization_stage() == 1:
            if weight.grad_accum is None:
                weight.grad_accum = torch.zeros_like(weight, dtype=torch.float32)
            return op(hidden, weight, weight_grad=weight.grad_accum, **options)
        gradient = torch.zeros_like(weight, dtype=torch.float32)
        out = op(hidden, weight, weight_grad=gradient, **options)
        return out._replace(loss=_Attach.apply(out.loss, weight, gradient))

    return computed


class _Attach(torch.autograd.Function):
    """The loss, whose gradient in weight is given, in fp32; as in `weight_grad` without later factors of the loss."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = ctx.gradient
        ctx.gradient = None
        return slopes[0], gradient, None
