"""Comparisons of `FusedActor` with the Actor that it derives from: OpenRLHF's, or the stand-in for it."""

from typing import Any

import torch
from causal_lms import make
from torch import Tensor

TEMPERATURE = 0.7
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def make_actor(kind: Any, packing: bool, temperature: float = TEMPERATURE) -> Any:
    actor = kind(make("Qwen2", {"tie_word_embeddings": True}).float(), temperature=temperature)
    actor.packing_samples = packing  # this and the next: as where the Actor loads the model itself
    actor.model.config.use_cache = False
    return actor


def batch() -> dict[str, Tensor]:
    """Three sequences of 9 tokens as OpenRLHF has them, prompts on the left: padded on both sides, 5 action columns."""
    sequences = torch.randint(1, 53, (3, 9), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9, [0, 0, 0, 1, 1, 1, 1, 0, 0]])
    action_mask = attention_mask[:, -5:].clone()
    action_mask[1, 2] = 0  # inserted by a tool
    action_mask[2, :2] = 0
    return {"sequences": sequences, "attention_mask": attention_mask, "action_mask": action_mask}


def results(actor: Any, inputs: dict[str, Tensor], shown: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Logprob, entropy where `shown`, and the gradients of a sum over both."""
    logprob, out = actor(**inputs, return_output=True, return_entropy=True, **options)
    entropy = out.entropy[:, -logprob.shape[1] :]
    slope = torch.randn(logprob.shape, generator=torch.Generator().manual_seed(1)) * shown
    (slope * (logprob + 0.5 * entropy)).sum().backward()
    gradients = {name: p.grad for name, p in actor.model.named_parameters()}
    assert gradients["model.embed_tokens.weight"].abs().max() > 0.01
    return logprob * shown, entropy * shown, *gradients.values()


def check_actions(own: Any, fused: Any, packing: bool) -> None:
    """The arguments of a policy loss, and a pass without gradient, as for the old and the reference policy."""
    inputs = batch()
    ours, theirs = make_actor(fused, packing), make_actor(own, packing)
    shown = inputs["action_mask"].float()
    torch.testing.assert_close(results(ours, inputs, shown), results(theirs, inputs, shown), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs), theirs(**inputs), **CLOSE)


def check_every_token(own: Any, fused: Any, packing: bool) -> None:
    """The logprobs that SFT and DPO ask for."""
    inputs = batch()
    del inputs["action_mask"]
    shown = (inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]).float()
    got, want = (results(make_actor(kind, packing), inputs, shown, return_logprobs=True) for kind in (fused, own))
    torch.testing.assert_close(got, want, **CLOSE)
