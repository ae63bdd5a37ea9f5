"""`rlplus.integrations.verl` on a stand-in for verl; tests/peers/test_peers_verl.py has verl itself."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import stub_modules
import torch
from torch import Tensor

from rlplus import Objective, policy_loss, token_weights

NAME = "rlplus.integrations.verl"


class FusedLinearForPPO:
    def forward(self, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0) -> Any:
        raise AssertionError("verl's own")


def agg_loss(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: Any = 1, batch_num_tokens: Any = None,
    global_batch_size: Any = None, loss_scale_factor: Any = None,
) -> Tensor:  # fmt: skip
    assert loss_agg_mode == "seq-mean-token-mean"
    return ((loss_mat * loss_mask).sum(-1) / loss_mask.sum(-1)).sum() / len(loss_mat) * dp_size


class Batch(dict[str, Tensor]):
    """The part of a TensorDict that is used."""

    def select(self, *names: str) -> "Batch":
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> "Batch":
        return self


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    registry: dict[str, Any] = {"gspo": None, "luffy": "verl's own"}

    def register_policy_loss(name: str) -> Any:
        return lambda function: registry.setdefault(name, function)

    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss = registry[config.loss_mode]
        tensors = {name: data[name] for name in ("old_log_prob", "advantages", "response_mask")}
        return loss(log_prob=model_output, loss_agg_mode="seq-mean-token-mean", config=config, **tensors)

    algorithms = {"register_policy_loss": register_policy_loss, "agg_loss": agg_loss, "POLICY_LOSS_REGISTRY": registry}
    fused = type("FusedLinearForPPO", (FusedLinearForPPO,), {"forward": FusedLinearForPPO.forward})
    contents: dict[str, dict[str, Any]] = {
        "verl": {"__version__": "0.9.1"},
        "verl.trainer.ppo.core_algos": algorithms,
        "verl.utils.experimental.torch_functional": {"FusedLinearForPPO": fused},
        "verl.workers.utils.losses": {"ppo_loss": ppo_loss},
        "verl.workers.engine_workers": {"ppo_loss": ppo_loss},
    }
    return stub_modules.install(monkeypatch, contents, NAME)


def test_presets_with_demonstrations_are_policy_losses(modules: dict[str, Any]) -> None:
    importlib.import_module(NAME)
    registry = modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY
    assert {"rlplus", "rlplus-no-mis", "grpo-sft"} <= registry.keys()
    assert registry["luffy"] == "verl's own"
    assert "grpo" not in registry, "which has no demonstrations"


@pytest.mark.parametrize("per_token", [False, True])
def test_the_column_external_reaches_the_loss(modules: dict[str, Any], per_token: bool) -> None:
    importlib.import_module(NAME)
    g = torch.Generator().manual_seed(0)
    logprob, old, advantage = (-torch.rand(3, 4, generator=g, dtype=torch.float64) for _ in range(3))
    logprob.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    external = torch.tensor([0, 1, 1])
    given = external[:, None].expand(3, 4) if per_token else external
    data = Batch(old_log_prob=old, advantages=advantage, response_mask=mask, external=given)
    config = SimpleNamespace(loss_mode="rlplus", global_batch_info={"dp_size": 2})
    inputs = {"old_logprob": old, "advantage": advantage, "token_weight": 2 * token_weights(mask, "sequence")}
    for column, home in (True, "losses"), (True, "engine_workers"), (False, "losses"):
        data = data if column else data.select("old_log_prob", "advantages", "response_mask")
        module = modules["verl.workers.engine_workers" if home == "engine_workers" else "verl.workers.utils.losses"]
        loss, metrics = module.ppo_loss(config=config, model_output=logprob, data=data)
        outside = external[:, None].expand(3, 4).bool() if column else None
        want, _ = policy_loss(logprob, **inputs, external=outside, objective=Objective())
        torch.testing.assert_close(loss, want)
        assert metrics["actor/external_share"] == (5 / 8 if column else 0.0)


def test_the_samplers_weights_multiply_the_advantages(modules: dict[str, Any]) -> None:
    """`rollout_is_weights` of verl's rollout correction, one per token."""
    importlib.import_module(NAME)
    loss_of = modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY["rlplus"]
    g = torch.Generator().manual_seed(0)
    logprob, old, advantage, weights = (-torch.rand(3, 4, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.ones(3, 4)
    config = SimpleNamespace(global_batch_info={"dp_size": 1})
    given = {"old_log_prob": old, "log_prob": logprob, "advantages": advantage, "response_mask": mask}
    loss, _ = loss_of(**given, loss_agg_mode="seq-mean-token-mean", config=config, rollout_is_weights=-weights)
    inputs = {"old_logprob": old, "token_weight": token_weights(mask, "sequence"), "objective": Objective()}
    torch.testing.assert_close(loss, policy_loss(logprob, advantage=-advantage * weights, **inputs)[0])


def test_fused_linear_is_the_fused_operation(modules: dict[str, Any]) -> None:
    importlib.import_module(NAME)
    hidden, weight = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3], [10, 0, 5]], dtype=torch.int32)
    fused = modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO()
    logprob, entropy = fused.forward(hidden, weight, ids, temperature=0.5)
    logp = (hidden @ weight.T / 0.5).log_softmax(-1)
    torch.testing.assert_close(logprob, logp.gather(-1, ids.long()[..., None])[..., 0])
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))


def test_a_verl_with_another_interface_is_refused(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused = modules["verl.utils.experimental.torch_functional"].FusedLinearForPPO
    monkeypatch.setattr(fused, "forward", lambda self, hidden: hidden)
    with pytest.raises(ImportError, match=r"want verl 0\.9, whose .* takes \(self, hidden_.*; got verl 0\.9\.1"):
        importlib.import_module(NAME)
    assert "rlplus" not in modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY
