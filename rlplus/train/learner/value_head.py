"""The head of a value model."""

import torch
from torch import nn
from transformers import PreTrainedModel


def add_value_head(lm: PreTrainedModel, seed: int) -> None:
    """Replace the model's head by one of width 1 without bias: normal of std 1 / (H + 1), the same on every rank."""
    width = lm.get_output_embeddings().in_features
    weight = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / (width + 1)
    head = nn.utils.skip_init(nn.Linear, width, 1, bias=False, device=lm.device, dtype=lm.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    lm.set_output_embeddings(head)
