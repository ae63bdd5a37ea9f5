"""Tiny mixtures of experts with routers that tell tokens apart, in float64 too, and samples with chosen experts."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from rlplus.train.data import Sample, byte_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
NARROW = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
GROUPED = NARROW | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": NARROW | {"num_experts": 6, "head_dim": 8, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "DeepseekV3": GROUPED | LATENT | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
    "Qwen2Moe": NARROW | {"num_experts": 6, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "Glm4Moe": GROUPED | {"n_group": 1, "topk_group": 1, "head_dim": 8, "norm_topk_prob": False},
}


def mixture(family: str = "Qwen3Moe", **changes: Any) -> Any:
    """In float32, with random weights far from 0."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**SMALL | FAMILIES[family] | changes)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.5 if name.endswith("gate.weight") else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                nn.init.normal_(buffer, std=0.1)
    return model


def write_mixture(folder: Path, **changes: Any) -> Path:
    """A model to start a run from, with the byte tokenizer."""
    tokenizer = byte_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    mixture(vocab_size=len(tokenizer), **ids, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def routers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


def chosen_by(model: Any, ids: list[int]) -> tuple[np.ndarray[Any, Any], Tensor]:
    """The experts (tokens, layers, k) of a sequence on its own, and how clear each choice is (tokens, layers)."""
    found: list[Any] = []
    hooks = [r.register_forward_hook(lambda _, __, output: found.append(output)) for r in routers(model)]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    k = found[0][2].shape[1]
    margins = [logits.sort(-1, descending=True).values[:, k - 1 : k + 1].diff().neg()[:, 0] for logits, *_ in found]
    return torch.stack([experts for *_, experts in found], 1).numpy(), torch.stack(margins, 1)


def with_experts(samples: list[Sample], layers: int, experts: int, k: int, every: bool = False) -> list[Sample]:
    """Chosen at random for all tokens but the last; for demonstrations none, unless for every sample."""
    generator = np.random.default_rng(0)
    for sample in samples:
        if every or not sample.external:
            shape = (len(sample.prompt) + len(sample.response) - 1, layers, experts)
            sample.experts = generator.random(shape).argsort(-1)[..., :k].astype(np.uint8)
    return samples
