"""LoRA through peft: adapters in the policy and for the engine, merged weights for the engine and for export.

The frozen weights may have 4 bits, by bitsandbytes: NF4 with quantized scales (Dettmers et al., QLoRA, 2023).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlplus.common.errors import install_command
from rlplus.train.config import LoraConfig

BITS = 4 + (8 + 32 / 256) / 64  # 64 weights share a scale of one byte, and 256 scales a number in fp32


def add_adapters(lm: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Add adapters, the same on every rank, to the model and freeze the rest. ValueError without peft, and for
    targets that do not exist or that are the head or the embeddings: the fused head reads the plain weight.
    """
    if find_spec("peft") is None:
        raise ValueError(f"model.lora needs the package peft, which is not installed: {install_command('lora')}")
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    barred = {name for name, module in lm.named_modules() if module in ends}
    targets = config.target_modules
    named = [] if isinstance(targets, str) else [t for t in targets if any(n.endswith(t) for n in barred)]
    if named:
        raise ValueError(f"model.lora.target_modules: want no embeddings and no head; got {', '.join(named)}")
    if targets == "all-linear":  # named here: peft excludes the head only in models that it knows
        linear = (name for name, module in lm.named_modules() if isinstance(module, nn.Linear))
        targets = [name for name in linear if name not in barred]
    peft = PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft, lm)
    for name, parameter in lm.named_parameters():
        if trained := "lora_" in name:
            parameter.data = parameter.data.to(lm.dtype)  # fp32 beside a base of 4 bits
        parameter.requires_grad_(trained)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Use the model as it was before training."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(lm: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    """(name, parameters, value) of each weight of the model without adapters.

    value() is the weight, W + alpha / rank * B A if there is an adapter; the parameters must be gathered before the
    call.
    """
    adapted: dict[str, Any] = {n: m for n, m in lm.named_modules() if hasattr(m, "get_delta_weight")}
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            continue
        module, base, kind = name.rpartition(".base_layer.")
        if base and kind == "weight" and module in adapted:
            layer = adapted[module]
            parts = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
            yield f"{module}.weight", [parameter, *parts], partial(_merged, layer, parameter)
        else:
            yield name.replace(".base_layer.", "."), [parameter], partial(dequantized, parameter)


@torch.no_grad()
def _merged(layer: Any, base: nn.Parameter) -> Tensor:
    weight = dequantized(base)
    return weight + layer.get_delta_weight("default").to(weight.dtype)


def adapter_weights(lm: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    """(name, parameters, value) of each adapter's A and B, as `merged_weights` has them; names as in peft's files."""
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            yield name.replace(".default.", "."), [parameter], parameter.detach


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
