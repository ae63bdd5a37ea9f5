"""`rlplus.head_of` against the logits of the models themselves: tiny, with random weights, in fp64 where they can."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from causal_lms import FAMILIES, PLAIN, SMALL, logits_and_hidden, make
from torch import Tensor, nn
from torch.nn.functional import linear

from rlplus import head_of
from rlplus.loss.head.causal_lm import LogitTransform, logit_transform


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
