"""Replayed experts: the trainer's own choice changes no bit, another one gives float64's output and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import quick
import torch
from causal_lms import make
from mixtures import FAMILIES, chosen_by, mixture, routers, with_experts
from torch import Tensor
from update_cases import batch_of_samples

from rlplus.common.chosen_experts import joined, small_type
from rlplus.train.data import MicroBatch, Sample, pack
from rlplus.train.learner.packed_model import PackedModel
from rlplus.train.rollout.expert_routing import routers_of

WAYS = {"masks": {}, "apart": {"masks": False}, "checkpointing": {"checkpointing": True}}


def samples_of(model: Any, every: bool = False) -> list[Sample]:
    """Prompts and responses of several lengths; rollouts have random experts."""
    samples = batch_of_samples()
    for sample in samples:
        sample.prompt, sample.response = ([t % 50 + 2 for t in ids] for ids in (sample.prompt, sample.response))
    router = routers(model)[0]
    return with_experts(samples, len(routers(model)), router.num_experts, router.top_k, every)


def batches_of(samples: list[Sample], multiple: int = 1) -> list[MicroBatch]:
    weights = [torch.ones(len(s.response)) for s in samples]
    return pack(samples, weights, row_length=24, tokens_per_micro_batch=72, pad_id=0, multiple=multiple)


def loss(batch: MicroBatch) -> Callable[..., Tensor]:
    def op(hidden: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
        logp = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
        return logp.gather(1, batch.target[:, None]).sum()

    return op


def gradients(model: Any, batches: list[MicroBatch], *, replay: bool, checkpointing: bool = False, **way: Any) -> Any:
    """The losses, and the gradient of each parameter, by a copy of the model."""
    model = copy.deepcopy(model)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    packed = PackedModel(model, None, replay=replay, **way)
    losses = []
    for batch in batches:
        losses.append(packed(batch, loss(batch)))
        losses[-1].backward()
    return [float(each.detach()) for each in losses], {name: p.grad for name, p in model.named_parameters()}


def replayed(router: Any, hidden: Tensor, experts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The router written out: its weights of these experts, or of those it chooses, in the dtype of hidden."""
    name = type(router).__name__
    z = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    score = torch.sigmoid(z) if name[:4] in ("Deep", "Glm4") else z.exp() / z.exp().sum(-1, keepdim=True)
    if experts is None:
        choice = score + getattr(router, "e_score_correction_bias", 0.0)
        if (groups := getattr(router, "num_group", 1)) > 1:
            best = choice.view(-1, groups, choice.shape[1] // groups).sort(-1, descending=True).values[..., :2].sum(-1)
            own = best.repeat_interleave(choice.shape[1] // groups, 1) == best.max(-1, keepdim=True).values
            choice = choice.where(own, -torch.inf)
        experts = choice.argsort(-1, descending=True)[:, : router.top_k]
    weights = torch.stack([score[row, experts[row]] for row in range(len(z))])
    if name == "MixtralTopKRouter" or router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return z, weights * getattr(router, "routed_scaling_factor", 1.0), experts


def exact_gradients(model: Any, samples: list[Sample]) -> tuple[float, dict[str, Tensor]]:
    """In float64, a sequence at a time, by the formulas above and transformers' loop over experts."""
    exact = type(model)(model.config).double().eval()
    exact.set_experts_implementation("eager")
    exact.load_state_dict({name: weight.double() for name, weight in model.state_dict().items()})
    total = 0.0
    for sample in samples:
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        for layer, router in enumerate(routers(exact)):
            known = None
            if sample.experts is not None:
                given = torch.tensor(sample.experts[:, layer].astype(np.int64))
                known = torch.cat([given, torch.arange(given.shape[1])[None]])  # the last token predicts nothing
            router.forward = lambda hidden, router=router, known=known: replayed(router, hidden, known)
        logits = exact(ids).logits[0, len(sample.prompt) - 1 : -1]
        value = logits.log_softmax(-1).gather(1, torch.tensor(sample.response)[:, None]).sum()
        value.backward()
        total += float(value.detach())
    return total, {name: p.grad for name, p in exact.named_parameters()}


@pytest.mark.parametrize(
    ("family", "way"), quick.only([(f, "masks") for f in FAMILIES], [(f, w) for f in FAMILIES for w in WAYS])
)
def test_a_replayed_choice_has_the_loss_and_the_gradients_of_float64(family: str, way: str) -> None:
    """All weights', the routers' among them; rows mix samples with experts and demonstrations without."""
    model = mixture(family)
    samples = samples_of(model)
    want, exact = exact_gradients(model, samples)
    losses, got = gradients(model, batches_of(samples), replay=True, **WAYS[way])
    assert sum(losses) == pytest.approx(want, rel=1e-5)
    for name, gradient in exact.items():
        bound = {"rtol": 1e-4, "atol": 1e-5 * float(gradient.abs().max())}
        torch.testing.assert_close(got[name].double(), gradient, msg=name, **bound)
        assert gradient.any(), "the comparison can fail"
    losses, own = gradients(model, batches_of(samples), replay=False, **WAYS[way])
    assert sum(losses) != pytest.approx(want, rel=1e-4)
    name = next(name for name in exact if name.endswith("gate.weight"))
    assert not torch.allclose(own[name].double(), exact[name], rtol=1e-2)


@pytest.mark.parametrize(
    ("family", "way"),
    quick.only(
        [("Qwen3Moe", "checkpointing"), *((f, "masks") for f in FAMILIES)], [(f, w) for f in FAMILIES for w in WAYS]
    ),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_the_own_choice_changes_no_bit(family: str, way: str, dtype: torch.dtype) -> None:
    model = mixture(family).to(dtype)
    samples = samples_of(model)
    for sample in samples:
        sample.experts = None
    batches = batches_of(samples)
    losses, want = gradients(model, batches, replay=False, **WAYS[way])
    for batch in batches:
        found: list[Tensor] = []
        hooks = [r.register_forward_hook(lambda _, __, output, to=found: to.append(output[2])) for r in routers(model)]
        PackedModel(model, None, masks=WAYS[way].get("masks"))(batch, loss(batch))
        for hook in hooks:
            hook.remove()
        batch.experts = torch.stack(found, 1).to(torch.uint8).unflatten(0, batch.input_ids.shape)
    again, got = gradients(model, batches, replay=True, **WAYS[way])
    assert again == losses
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_nothing_is_replayed_behind_a_pass_without_gradients() -> None:
    """A second module around the same weights, or the next pass, would see the experts of other tokens."""
    model = mixture()
    samples = samples_of(model)
    ids = torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        before = model.model(ids).last_hidden_state
        packed = PackedModel(model, None, replay=True)
        for batch in batches_of(samples):
            packed(batch, loss(batch))
        assert torch.equal(model.model(ids).last_hidden_state, before)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_experts_stay_with_their_tokens_in_rows_and_shards(parts: int) -> None:
    samples = samples_of(mixture())
    for i, sample in enumerate(samples):
        sample.prompt, sample.response = [i] * len(sample.prompt), [i] * len(sample.response)
        if sample.experts is not None:
            sample.experts[...] = np.arange(len(sample.experts))[:, None, None]
    seen = dict.fromkeys(range(len(samples)), 0)
    for batch in batches_of(samples, multiple=4):
        for shard in [batch.shard(i, parts) for i in range(parts)] if parts > 1 else [batch, batch.as_one_row()]:
            assert shard.experts is not None
            assert shard.experts.shape[:2] == shard.input_ids.shape
            each = (shard.input_ids, shard.position_ids, shard.experts)
            tokens = zip(*(t.flatten(0, 1).tolist() for t in each), strict=True)
            for token, position, experts in tokens:
                given = samples[token].experts
                known = given is not None and position < len(given)
                if position or known:  # padding has token 0, whose first position it repeats
                    assert experts == [[position if known else 255] * 2] * 3 or token == 0
                seen[token] += known
    rows = {i: 0 if s.experts is None else len(s.experts) for i, s in enumerate(samples)}
    assert {i: count // (2 if parts == 1 else 1) for i, count in seen.items() if i} == {
        i: n for i, n in rows.items() if i
    }


def test_a_teachers_prompt_has_no_experts() -> None:
    sample = samples_of(mixture(), every=True)[0]
    sample.teacher_prompt = [3, *sample.prompt]
    (batch,) = batches_of([sample])
    assert batch.experts is not None
    assert batch.teacher is not None
    assert batch.teacher.experts is None


def test_rows_of_a_sequence_that_goes_on() -> None:
    """The first part keeps the experts of the weights that sampled it."""
    old, new = (np.full((n, 3, 2), value, dtype=np.uint8) for n, value in ((4, 1), (9, 2)))
    assert joined(old, new)[:, 0, 0].tolist() == [1] * 4 + [2] * 5
    assert joined(None, new) is new


def test_the_type_has_room_for_an_unknown_expert() -> None:
    assert small_type(255) == np.uint8, "the last expert is 254"
    assert small_type(256) == np.int16


@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_a_model_without_known_routers_is_refused(family: str) -> None:
    model = make(family, {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "GptOss" else {})
    message = f"routing_replay: want a mixture of experts of Mixtral, .* or Glm4Moe, .*; got {family}ForCausalLM"
    with pytest.raises(ValueError, match=message):
        PackedModel(model, None, replay=True)


def test_experts_of_another_model_are_refused() -> None:
    model = mixture()
    samples = with_experts(samples_of(model), 2, 6, 2)
    message = (
        "want the engine's experts of 3 layers, 2 for each token, as the policy has them; got 2 layers, 2 for each"
    )
    with pytest.raises(ValueError, match=message):
        gradients(model, batches_of(samples), replay=True)


def test_experts_of_more_tokens_than_a_sample_has_are_refused() -> None:
    sample = samples_of(mixture(), every=True)[0]
    tokens = len(sample.prompt) + len(sample.response)
    sample.response = sample.response[:-2]
    with pytest.raises(
        ValueError, match=f"sample 0: want the experts of {tokens - 2} tokens at most; got {tokens - 1}"
    ):
        batches_of([sample])


def test_a_router_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later transformers might have it."""
    model = mixture()
    for router in routers_of(model):
        forward = router.forward
        monkeypatch.setattr(router, "forward", lambda hidden, f=forward: (lambda z, w, e: (z, w * 1.01, e))(*f(hidden)))
    with pytest.raises(ValueError, match=r"want a Qwen3MoeTopKRouter whose weights are .*; got others in layer 0"):
        gradients(model, batches_of(samples_of(model)), replay=True)


def test_a_router_of_broken_weights_is_said_to_be_broken() -> None:
    """Not to be another version's: NaN is unlike itself."""
    model = mixture()
    batches = batches_of(samples_of(model))
    with torch.no_grad():
        routers_of(model)[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="want finite logits of the router in layer 0"):
        gradients(model, batches, replay=True)


def test_the_choice_of_a_plain_model_is_clear_here() -> None:
    """So that float32 and float64 choose alike, which the other tests rest on."""
    for family in FAMILIES:
        _, margin = chosen_by(mixture(family), [5, 9, 12, 30, 31, 22, 8, 2, 40])
        assert float(margin.min()) > 1e-4
