"""`rlplus.integrations.openrlhf` on a stand-in for OpenRLHF; tests/peers/test_peers_openrlhf.py has OpenRLHF itself."""

import importlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import openrlhf_cases
import pytest
import stub_modules
from torch import Tensor, nn

from rlplus.loss.operations import logprob_library

NAME = "rlplus.integrations.openrlhf"
RAY = ("openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ray.launcher")


def unpad_and_slice_tensor(sequences: Tensor, attention_mask: Tensor, ring_attn_group: Any) -> tuple[Any, ...]:
    """One row of the tokens, their positions and the tokens after them; no padding for a ring; where they stood."""
    indices = attention_mask.flatten().nonzero().flatten()
    rows = (sequences, (attention_mask.cumsum(-1) - 1).clip(min=0), sequences.roll(-1, 1))
    return *(row.flatten()[indices][None] for row in rows), 0, indices


def gather_and_pad_tensor(
    tensor: Tensor, ring_attn_group: Any, ring_attn_pad_len: int, indices: Tensor, batch: int, seqlen: int
) -> Tensor:
    return tensor.new_zeros(batch * seqlen).index_copy(0, indices, tensor[0]).view(batch, seqlen)


class Actor(nn.Module):
    """OpenRLHF's, of a model that is loaded already: from logits, without MoE, images and rings."""

    def __init__(self, pretrain_or_model: Any, temperature: float = 1.0, is_vlm: bool = False) -> None:
        super().__init__()
        self.model, self.temperature, self.is_vlm, self.packing_samples = pretrain_or_model, temperature, is_vlm, False

    def forward(
        self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, return_output: Any = False,
        allgather_logits: Any = False, return_logprobs: Any = False, ring_attn_group: Any = None,
        packed_seq_lens: Any = None, return_entropy: Any = False, **mm_inputs: Any,
    ) -> Any:  # fmt: skip
        if self.packing_samples:
            tokens, positions, rolled, padding, indices = unpad_and_slice_tensor(sequences, attention_mask, None)
            output = self.model(tokens, attention_mask=None, position_ids=positions)
        else:
            positions = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
            output, rolled = self.model(sequences, attention_mask, positions), sequences.roll(-1, 1)
        logp = (output.logits / self.temperature).log_softmax(-1)
        entropy, logprob = -(logp.exp() * logp).sum(-1), logp.gather(-1, rolled[..., None])[..., 0]
        if self.packing_samples:
            where = (None, padding, indices, *sequences.shape)
            entropy, logprob = gather_and_pad_tensor(entropy, *where), gather_and_pad_tensor(logprob, *where)
        output.entropy = entropy[:, :-1]
        if action_mask is None and not return_logprobs:
            return output
        logprob = logprob[:, :-1]
        if action_mask is not None:
            logprob = logprob[:, -action_mask.shape[1] :] * action_mask.float()
        return (logprob, output) if return_output else logprob


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    packing = {f.__name__: f for f in (unpad_and_slice_tensor, gather_and_pad_tensor)}
    actor = {"Actor": Actor}
    contents = {"openrlhf.models": actor, "openrlhf.models.actor": actor | packing} | dict.fromkeys(RAY, actor)
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.2" if name == "openrlhf" else own(name))
    return stub_modules.install(monkeypatch, contents, NAME)


@pytest.fixture
def ours(modules: dict[str, Any]) -> Any:
    return importlib.import_module(NAME)


@pytest.mark.parametrize("packing", [False, True])
def test_the_logprobs_and_entropies_of_actions(ours: Any, packing: bool) -> None:
    openrlhf_cases.check_actions(Actor, ours.FusedActor, packing)


@pytest.mark.parametrize("packing", [False, True])
def test_the_logprobs_of_every_token(ours: Any, packing: bool) -> None:
    openrlhf_cases.check_every_token(Actor, ours.FusedActor, packing)


def test_prompts_and_padding_stay_out_of_the_head(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, own = [], logprob_library.linear_logprob
    monkeypatch.setattr(
        logprob_library, "linear_logprob", lambda hidden, *rest: (rows.append(len(hidden)), own(hidden, *rest))[1]
    )
    openrlhf_cases.make_actor(ours.FusedActor, True)(**openrlhf_cases.batch())
    assert rows == [int(openrlhf_cases.batch()["action_mask"].sum())]


def test_a_caller_without_masks_gets_logits(ours: Any) -> None:
    inputs = openrlhf_cases.batch()
    del inputs["action_mask"]
    out = openrlhf_cases.make_actor(ours.FusedActor, False)(**inputs, return_output=True)
    assert out.logits.shape == (3, 9, 53)


def test_patch_reaches_the_modules_that_make_actors(ours: Any, modules: dict[str, Any]) -> None:
    ours.patch()
    for name in ("openrlhf.models", *RAY):
        assert modules[name].Actor is ours.FusedActor
    assert modules["openrlhf.models.actor"].Actor is Actor


def test_models_with_images_are_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="want a causal language model; got SimpleNamespace, which takes images"):
        ours.FusedActor(SimpleNamespace(), is_vlm=True)


def test_an_openrlhf_with_another_interface_is_refused(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Actor, "forward", lambda self, sequences: sequences)
    with pytest.raises(
        ImportError, match=r"want OpenRLHF 0\.11\.2, whose .* takes \(self, seq.*; got OpenRLHF 0\.11\.2"
    ):
        importlib.import_module(NAME)
