"""Tiny causal LMs of many families, with random weights, and what is behind the head of each."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rlplus.loss.head.causal_lm import LogitTransform, body_of

SMALL: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
PLAIN = LogitTransform(1.0, None)
GEMMA3N = {
    "vocab_size_per_layer_input": 53, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

# Family (or its class), what its configuration has besides SMALL, and what is behind its head. Scales and softcaps are
# far from 1 and small enough to bend these logits.
FAMILIES: list[tuple[str, dict[str, Any], LogitTransform]] = [
    ("Llama", {}, PLAIN),
    ("Qwen2", {"tie_word_embeddings": True}, PLAIN),
    ("Qwen3", {}, PLAIN),
    ("Mistral", {}, PLAIN),
    ("Mixtral", EXPERTS, PLAIN),
    ("Phi", {}, PLAIN),  # has a bias
    ("Phi3", {}, PLAIN),
    ("Gemma", {}, PLAIN),
    ("Gemma2", {"final_logit_softcapping": 1.5}, LogitTransform(1.0, 1.5)),
    ("Gemma2", {"final_logit_softcapping": None}, PLAIN),
    ("Gemma3", {"final_logit_softcapping": 2.0}, LogitTransform(1.0, 2.0)),
    ("Gemma3n", {"final_logit_softcapping": 2.0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0],
                 "intermediate_size": [48, 48]} | GEMMA3N, LogitTransform(1.0, 2.0)),
    ("Gemma4", {"final_logit_softcapping": 2.0} | GEMMA3N, LogitTransform(1.0, 2.0)),
    ("VaultGemma", {"final_logit_softcapping": 1.5}, LogitTransform(1.0, 1.5)),
    ("NanoChat", {"final_logit_softcapping": 1.0}, LogitTransform(1.0, 1.0)),
    # Its third layer is the first with attention; without one transformers 5.24 fails.
    ("RecurrentGemma", {"logits_soft_cap": 1.0, "lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3},
     LogitTransform(1.0, 1.0)),
    ("Cohere", {"logit_scale": 2.5}, LogitTransform(2.5, None)),
    ("Cohere2", {"logit_scale": 0.25}, LogitTransform(0.25, None)),
    ("Granite", {"logits_scaling": 0.25}, LogitTransform(4.0, None)),
    ("GraniteMoe", {"logits_scaling": 4.0} | EXPERTS, LogitTransform(0.25, None)),
    ("HyperCLOVAX", {"logits_scaling": 0.25}, LogitTransform(0.25, None)),
    ("FalconH1", {"lm_head_multiplier": 3.0, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16,
                  "mamba_d_state": 8}, LogitTransform(3.0, None)),
    ("MiniCPM3", {"dim_model_base": 128, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                  "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 2}, LogitTransform(4.0, None)),
    ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2, "logit_scale": 3.0}, PLAIN),  # the class ignores it
    ("GPT2LMHeadModel", GPT2, PLAIN),
    ("GPTJ", GPT2 | {"rotary_dim": 8}, PLAIN),  # has a bias
    ("GPTNeoX", {}, PLAIN),
    ("Bloom", {"n_layer": 2, "n_head": 2}, PLAIN),
    ("Mamba", {"state_size": 4, "expand": 2}, PLAIN),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, PLAIN),
    ("Olmo2", {}, PLAIN),
    ("Starcoder2", {}, PLAIN),
    ("GptOss", EXPERTS, PLAIN),
    ("Llama4", EXPERTS | {"intermediate_size_mlp": 48, "head_dim": 16}, PLAIN),  # model.base_model is the model itself
]  # fmt: skip

# Families that the plan cannot count: transformers reads a value of a tensor, or keeps none of its attention's.
UNPLANNED = {"GPT2LMHeadModel", "Mpt"}
EXPERT_FAMILIES = {"Mixtral", "GraniteMoe", "GptOss", "Llama4"}


def config_of(family: str, changes: dict[str, Any]) -> Any:
    kind = getattr(transformers, family if family.endswith("Model") else f"{family}ForCausalLM")
    return kind.config_class(**SMALL | changes)


def make(family: str, changes: dict[str, Any]) -> Any:
    kind = getattr(transformers, family if family.endswith("Model") else f"{family}ForCausalLM")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**SMALL | changes)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "bias" in name:
                nn.init.normal_(parameter, std=0.3)
    return model if "num_local_experts" in changes else model.double()  # experts have no fp64 product


def logits_and_hidden(model: Any) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[5, 9, 12, 30, 31, 22, 8]])
    with torch.no_grad():
        return model(input_ids=ids).logits, body_of(model)(input_ids=ids).last_hidden_state
