"""LoRA through peft: adapters in the policy and for the engine, merged weights for the engine and for export."""

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
from rlplus.train.learner.quantized import dequantized


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
            yield f"{module}.weight", [parameter, *parts], _Merged(layer, parameter)
        else:
            yield name.replace(".base_layer.", "."), [parameter], partial(dequantized, parameter)


def adapter_weights(lm: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], Callable[[], Tensor]]]:
    """(name, parameters, value) of each adapter's A and B, as `merged_weights` has them; names as in peft's files."""
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            yield name.replace(".default.", "."), [parameter], parameter.detach


class _Merged:
    def __init__(self, layer: Any, base: nn.Parameter) -> None:
        self.layer = layer
        self.base = base

    @torch.no_grad()
    def __call__(self) -> Tensor:
        base = dequantized(self.base)
        return base + self.layer.get_delta_weight("default").to(base.dtype)
