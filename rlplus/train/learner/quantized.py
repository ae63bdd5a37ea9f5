"""Frozen weights of 4 bits, by bitsandbytes: NF4 with quantized scales (Dettmers et al., QLoRA, 2023)."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlplus.common.errors import install_command

BITS = 4 + (8 + 32 / 256) / 64  # 64 weights share a scale of one byte, and 256 scales a number in fp32


def check_installed(key: str) -> None:
    """ValueError without bitsandbytes, which a key of the configuration needs."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{key} needs the package bitsandbytes, which is not installed: {install_command('qlora')}")


def quantize(lm: PreTrainedModel, device: torch.device) -> None:
    """Replace each linear layer but the head by one of NF4 on the device, which computes in its weight's dtype.

    ValueError for weights that are not finite, which NF4 would hide, and for a model most of whose weights are in no
    `nn.Linear`, as the experts of a mixture are.
    """
    check_installed("model.lora.quantization")
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = lm.get_output_embeddings()
    _check_layers(lm)
    for name, old in [*lm.named_modules()]:
        if type(old) is not nn.Linear or old is head:
            continue
        if not old.weight.isfinite().all():
            raise ValueError(f"want finite weights to quantize; got NaN or infinity in parameter {name}.weight")
        new: Any = Linear4bit(
            old.in_features,
            old.out_features,
            bias=False,
            compute_dtype=old.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        data = old.weight.data.to(device)
        new.weight = Params4bit(data, requires_grad=False, quant_type="nf4", module=new).to(data.device)
        new.bias = old.bias
        new.support_avx512bf16_for_cpu = False  # else a CPU's forward pass in eval mode rearranges the weight
        lm.set_submodule(name, new.train(old.training))
    lm.is_loaded_in_4bit = True  # peft asks for it


def _check_layers(lm: PreTrainedModel) -> None:
    ends = {id(layer.weight) for layer in (lm.get_input_embeddings(), lm.get_output_embeddings())}
    linear = {id(layer.weight) for layer in lm.modules() if type(layer) is nn.Linear} - ends
    matrices = {id(p): (name, p) for name, p in lm.named_parameters() if p.ndim > 1 and id(p) not in ends}
    left = [(p.numel(), name) for key, (name, p) in matrices.items() if key not in linear]
    if 2 * sum(count for count, _ in left) > sum(p.numel() for _, p in matrices.values()):
        raise ValueError(
            "model.lora.quantization: want a model whose weights are mostly in linear layers (torch.nn.Linear); got "
            f"{type(lm).__name__} with {max(left)[1]}, which would stay as it is"
        )


def dequantized(parameter: Tensor) -> Tensor:
    """The weight that a parameter stands for: NF4's in the dtype that it computes in, any other as it is."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, state)
    return weight
