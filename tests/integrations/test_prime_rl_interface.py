"""`rlplus.integrations.prime_rl` on a stand-in for prime-rl 0.8, which needs CUDA and Python 3.12."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
import stub_modules
import torch
from torch import Tensor, nn

from rlplus import Objective, policy_loss

NAME = "rlplus.integrations.prime_rl"


class PrimeLmOutput(TypedDict, total=False):
    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    loss: Tensor | None


class FusedOutputLinear(nn.Linear):
    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, hidden_states: Any, labels: Any = None, temperature: Any = None) -> Any:
        raise AssertionError("prime-rl's own")


class GemmaFusedOutputLinear(FusedOutputLinear):
    def __init__(self, in_features: int, out_features: int, chunk_size: int, softcap: float) -> None:
        super().__init__(in_features, out_features, chunk_size)
        self.softcap = softcap


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(FusedOutputLinear, "forward", FusedOutputLinear.forward)  # undone after the test
    monkeypatch.setattr(GemmaFusedOutputLinear, "forward", FusedOutputLinear.forward)
    layers = "prime_rl.trainer.models.layers"
    contents = {
        f"{layers}.lm_head": {"FusedOutputLinear": FusedOutputLinear, "PrimeLmOutput": PrimeLmOutput},
        f"{layers}.lm_head_gemma": {"GemmaFusedOutputLinear": GemmaFusedOutputLinear},
        "prime_rl.trainer.rl.loss": {"LossInputs": LossInputs, "LossOutputs": LossOutputs},
    }
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0" if name == "prime-rl" else own(name))
    return stub_modules.install(monkeypatch, contents, NAME)


@pytest.fixture
def ours(modules: dict[str, Any]) -> Any:
    return importlib.import_module(NAME)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_fused_heads_are_the_fused_operation(ours: Any, softcap: float | None) -> None:
    torch.manual_seed(0)
    head = FusedOutputLinear(8, 11, 4) if softcap is None else GemmaFusedOutputLinear(8, 11, 4, softcap)
    head.double()
    hidden = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    labels, temperature = torch.tensor([[1, 2, 3], [10, 0, 5]]), torch.tensor([[0.5, 1.0, 1.0], [0.7, 0.7, 2.0]])
    out = head(hidden, labels, temperature=temperature)
    logits = hidden @ head.weight.T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logp = (logits / temperature[..., None]).log_softmax(-1)
    want = logp.gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(out["logprobs"], want)
    torch.testing.assert_close(out["entropy"], -(logp.exp() * logp).sum(-1).detach())
    slope = torch.randn(2, 3, dtype=torch.float64)
    got, expected = (
        torch.autograd.grad((slope * value).sum(), (hidden, head.weight)) for value in (out["logprobs"], want)
    )
    torch.testing.assert_close(got, expected)


def inputs(weights: list[float] | None) -> LossInputs:
    g = torch.Generator().manual_seed(0)
    logprob, inference, advantage = (-torch.rand(6, generator=g) for _ in range(3))
    return LossInputs(
        trainer_logprobs=logprob.requires_grad_(),
        inference_logprobs=inference,
        ref_logprobs=None,
        advantages=advantage + 0.5,
        loss_mask=torch.tensor([False, True, True, True, True, True]),
        loss_weights=None if weights is None else torch.tensor(weights),
    )


def check(ours: Any, given: LossInputs, weight: list[float], external: list[int], **kwargs: Any) -> Any:
    objective = Objective(**{name: value for name, value in kwargs.items() if name != "objective"})
    got = ours.loss(given, **kwargs)
    want, _ = policy_loss(
        given.trainer_logprobs,
        old_logprob=given.inference_logprobs,
        advantage=given.advantages,
        token_weight=torch.tensor(weight).float(),
        external=torch.tensor(external),
        objective=objective,
    )
    torch.testing.assert_close(got.loss, want)
    gradients = [torch.autograd.grad(value, given.trainer_logprobs)[0] for value in (got.loss, want)]
    torch.testing.assert_close(*gradients)
    return got.metrics


def test_the_loss_is_a_sum_over_the_masked_tokens(ours: Any) -> None:
    metrics = check(ours, inputs(None), [0, 1, 1, 1, 1, 1], [0] * 6)
    assert metrics["external_share"] == 0


def test_negative_weights_are_demonstrations(ours: Any) -> None:
    metrics = check(ours, inputs([1, 1, 0.5, 0, -1, -2]), [0, 1, 0.5, 0, 1, 2], [0, 0, 0, 0, 1, 1])
    assert metrics["external_share"] == 0.5
    assert all(value.ndim == 0 for value in metrics.values())


def test_fields_of_the_objective_can_be_changed(ours: Any) -> None:
    check(ours, inputs([1, 1, 1, 1, 1, -1]), [0, 1, 1, 1, 1, 1], [0] * 5 + [1], objective="rlplus", gamma=2.0)


def test_kl_and_entropy_of_a_preset_are_left_out(ours: Any) -> None:
    for name, field in (("simplerl", "kl_coef"), ("grpo-official", "entropy_coef")):
        assert getattr(Objective.preset(name), field)
        assert ours.loss(inputs(None), objective=name).loss.isfinite()


def test_a_prime_rl_with_another_interface_is_refused(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules["prime_rl.trainer.rl.loss"], "LossOutputs", lambda loss: None)
    with pytest.raises(ImportError, match=r"want prime-rl 0\.8, whose .* takes \(loss, metrics\); got .* 0\.8\.0"):
        importlib.import_module(NAME)
    assert FusedOutputLinear.forward.__module__ == __name__
