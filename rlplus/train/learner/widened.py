"""A model whose layers compute in a wider dtype for a while, to measure what rounding costs its logprobs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rounding to `dtype` can be seen."""
    return torch.float64 if dtype == torch.float32 else torch.float32


@contextmanager
def widened(lm: PreTrainedModel) -> Iterator[None]:
    """Let the layers of a causal LM compute in the wider dtype inside, without gradients.

    Weights keep their values: each module's are converted while it runs, which takes the memory of one module at a
    time, and works under ZeRO-3, whose hooks have gathered them by then. The head and modules with weights of three or
    more axes (experts, convolutions), whose kernels may know one dtype only, get their inputs in their own dtype, and
    quantized weights stay as they are.
    """
    narrow = lm.dtype
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()  # a lookup, which rounds nothing, and the head
    patched = []
    for module in lm.modules():
        own: list[Any] = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if own:
            widens = module not in ends and all(len(getattr(p, "ds_shape", p.shape)) < 3 for p in own)
            patched.append((module, vars(module).get("forward")))
            run = _forward_wide if widens else _forward_narrow
            module.forward = partial(run, module.forward, own, narrow)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, before in patched:
            if before is None:
                del module.forward
            else:
                module.forward = before


def _forward_wide(forward: Callable[..., Any], own: list[Any], narrow: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), narrow, wider(narrow))
    kept = [p.data for p in own]
    try:
        for p in own:
            p.data = _cast(p.data, narrow, wider(narrow))
        return forward(*args, **kwargs)
    finally:
        for p, data in zip(own, kept, strict=True):
            p.data = data


def _forward_narrow(forward: Callable[..., Any], own: list[Any], narrow: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast((args, kwargs), wider(narrow), own[0].dtype)
    return _cast(forward(*args, **kwargs), narrow, wider(narrow))


def _cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value

    return tree_map(cast, values)
