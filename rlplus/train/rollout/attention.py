"""Attention of one new token per sequence, for models whose query heads share keys and values."""

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rlplus_sdpa"  # its name in transformers


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa` without its copies of shared keys and values, one per query head, under a mask.

    query (B, H, T, D), key and value (B, K, S, D), attention_mask (B or 1, H or 1, T, S) -> (B, T, H, D). For T = 1 the
    H / K query heads that share keys are passed as so many queries of one head: (B, K, H / K, D).
    """
    shared = getattr(module, "num_key_value_groups", 1)
    one_mask = attention_mask is not None and attention_mask.shape[1] == 1  # all heads share it
    if shared == 1 or query.shape[2] > 1 or not one_mask or options.get("position_bias") is not None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return whole
    queries = query.squeeze(2).unflatten(1, (-1, shared))
    out, _ = sdpa_attention_forward(None, queries, key, value, attention_mask, **options)
    return out.transpose(1, 2).flatten(1, 2).unsqueeze(1), None


def attend_without_copies(model: Any) -> None:
    """Replace transformers' `sdpa` by `attend` in this model, if it uses that."""
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
