"""`rlplus.head_of` against the logits of the models themselves: tiny, with random weights, in fp64 where they can."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear

from rlplus import head_of
from rlplus.ops.causal_lm import LogitTransform, logit_transform

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
    ("Phi", {}, PLAIN),  # with a bias
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
    ("RecurrentGemma", {"logits_soft_cap": 1.0, "lru_width": 32, "attention_window_size": 16},
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
    ("GPTJ", GPT2 | {"rotary_dim": 8}, PLAIN),  # with a bias
    ("GPTNeoX", {}, PLAIN),
    ("Bloom", {"n_layer": 2, "n_head": 2}, PLAIN),
    ("Mamba", {"state_size": 4, "expand": 2}, PLAIN),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, PLAIN),
    ("Olmo2", {}, PLAIN),
    ("Starcoder2", {}, PLAIN),
    ("GptOss", EXPERTS, PLAIN),
]  # fmt: skip


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
        return model(input_ids=ids).logits, model.base_model(input_ids=ids).last_hidden_state


@pytest.mark.parametrize(
    ("family", "changes", "want"), FAMILIES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(FAMILIES)]
)
def test_the_head_of_a_family_makes_the_logits_of_its_models(
    family: str, changes: dict[str, Any], want: LogitTransform
) -> None:
    model = make(family, changes)
    logits, hidden = logits_and_hidden(model)
    head = head_of(model)
    assert (head["logit_scale"], head["logit_softcap"]) == want
    assert head["weight"] is model.get_output_embeddings().weight
    got = want(linear(hidden, head["weight"], head["bias"])).double()
    bound = 1e-12 if logits.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(got, logits.double(), rtol=0, atol=bound * float(logits.abs().max()))
    if want != PLAIN:
        assert (linear(hidden, head["weight"], head["bias"]) - logits).abs().max() > 0.2, "it would go unnoticed"
    assert vars(model.base_model).keys() == vars(make(family, changes).base_model).keys(), "the model is as it was"


class _Squared(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return SimpleNamespace(logits=out.logits.abs())


class _Normed(transformers.LlamaForCausalLM):
    """Other layers between body and head."""

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden / hidden.norm(dim=-1, keepdim=True)))


class _Sliced(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=super().forward(*args, **kwargs).logits[..., :50])


class _Failing(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("pixels")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            _Squared,
            r"want logits softcap \* tanh\(scale \* z / softcap\) .*; _Squared computes others, 100 of z = -100",
        ),
        (_Normed, "_Normed changes the hidden states before the head"),
        (_Sliced, r"want one call of the head, and its logits whole; _Sliced has shapes .*\(1, 2, 50\)"),
        (_Failing, r"could not run _Failing\.forward with a stand-in for its body: 'pixels'"),
    ],
)
def test_arithmetic_that_is_not_known_is_refused(kind: Any, message: str) -> None:
    model = kind(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match=message):
        head_of(model)


def test_a_number_of_the_configuration_that_the_class_does_not_use_so_is_refused() -> None:
    """The class has read 0.25 when it was made."""
    model = make("Cohere", {"logit_scale": 0.25})
    model.config.logit_scale = 0.5
    with pytest.raises(ValueError, match=r"want logits .*; CohereForCausalLM computes"):
        head_of(model)


def test_a_scale_before_a_head_with_a_bias_is_refused() -> None:
    model = make("MiniCPM3", next(changes for name, changes, _ in FAMILIES if name == "MiniCPM3"))
    model.lm_head = nn.Linear(32, 53, bias=True)
    with pytest.raises(ValueError, match="want no bias in a head whose hidden states are scaled; MiniCPM3ForCausalLM"):
        head_of(model)


def test_heads_that_are_not_there_or_not_plain_are_refused() -> None:
    with pytest.raises(ValueError, match=r"want a transformers model with .*; Linear has no head"):
        head_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"want a transformers model with .*; LlamaModel has no head"):
        head_of(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)))
    with pytest.raises(ValueError, match="BertLMHeadModel has them elsewhere"):
        head_of(make("BertLMHeadModel", {"is_decoder": True}))


def test_a_head_with_an_adapter_is_refused_and_one_beside_adapters_is_not() -> None:
    peft = pytest.importorskip("peft")
    for targets, plain in (["q_proj"], True), (["lm_head"], False):
        model = make("Cohere", {"logit_scale": 0.25})
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
        if plain:
            assert head_of(wrapped)["weight"] is model.lm_head.weight
            assert head_of(wrapped)["logit_scale"] == 0.25
        else:
            with pytest.raises(
                ValueError, match=r"want the head of CohereForCausalLM a plain torch\.nn\.Linear; got peft\."
            ):
                head_of(wrapped)


def test_a_sharded_weight_is_refused_by_head_of_only() -> None:
    """ZeRO-3 leaves a parameter without elements."""
    model = make("Gemma2", {"final_logit_softcapping": 1.5, "tie_word_embeddings": False})
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"head of Gemma2ForCausalLM whole, \(53, 32\); got \(0,\): under ZeRO-3"):
        head_of(model)
    assert logit_transform(model) == (1.0, 1.5)


def test_nothing_but_shapes_is_needed() -> None:
    """bf16 on the meta device, and under autocast."""
    with torch.device("meta"):
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL)).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert logit_transform(model) == (1.0, 30.0)
