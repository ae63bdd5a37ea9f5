"""`rlplus.integrations.prime_rl` on a checkout of prime-rl: its fused heads, its losses, its tests of the heads.

    PRIME_RL=path/to/prime-rl pytest -m peers tests/peers/test_peers_prime_rl.py

It needs Python 3.12, and beside rlplus the imports of those modules: transformers 5.6.2, beartype, jaxtyping, wandb,
loguru, prime-pydantic-config, renderers, verifiers. The package of prime-rl's models is replaced by an empty one: it
imports every model, and they want flash-attn.
"""

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import own_tests
import pytest
import torch
from torch import Tensor

from rlplus import Objective, policy_loss

pytestmark = pytest.mark.peers
CHECKOUT = own_tests.checkout("PRIME_RL")
LOSSES, HEADS = "prime_rl.trainer.rl.loss", "prime_rl.trainer.models.layers"
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 2.0])


@pytest.fixture(scope="module")
def theirs() -> Any:
    """`forward` of the heads before the drop-in is imported, and the modules."""
    sys.path[:0] = [str(CHECKOUT / "src"), str(CHECKOUT / "packages/prime-rl-configs/src")]
    models = ModuleType("prime_rl.trainer.models")
    models.__path__ = [str(CHECKOUT / "src/prime_rl/trainer/models")]
    sys.modules[models.__name__] = models
    head, gemma = (importlib.import_module(f"{HEADS}.{name}") for name in ("lm_head", "lm_head_gemma"))
    models.cast_float_and_contiguous = head.cast_float_and_contiguous  # type: ignore[attr-defined]
    own = {None: head.FusedOutputLinear.forward, 2.0: gemma.GemmaFusedOutputLinear.forward}
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        # A checkout that is not installed has no metadata.
        patch.setattr(importlib.metadata, "version", lambda name: "0.8.0" if name == "prime-rl" else version(name))
        importlib.import_module("rlplus.integrations.prime_rl")
    return own, head.FusedOutputLinear, gemma.GemmaFusedOutputLinear, importlib.import_module(LOSSES)


@SOFTCAPS
def test_the_heads_compute_the_same_and_more_exactly(theirs: Any, softcap: float | None) -> None:
    own, plain, gemma, _ = theirs
    torch.manual_seed(0)
    head = plain(16, 301, 8) if softcap is None else gemma(16, 301, 8, softcap)
    hidden = torch.randn(2, 9, 16, requires_grad=True)
    labels, temperature = torch.randint(301, (2, 9)), 0.5 + torch.rand(2, 9)
    slope = torch.randn(2, 9)

    def run(forward: Any, *given: Tensor) -> list[Tensor]:
        out = forward(head, given[0], labels, temperature=temperature.to(given[0]))
        gradients = torch.autograd.grad((slope.to(given[0]) * out["logprobs"]).sum(), given)
        return [out["logprobs"].detach(), out["entropy"].detach(), *gradients]

    def definition(head: Any, hidden: Tensor, labels: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        logits = hidden @ weight.T
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        logp = (logits / temperature[..., None]).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return {"logprobs": logp.gather(-1, labels[..., None])[..., 0], "entropy": entropy}

    ours, before = (run(f, hidden, head.weight) for f in (type(head).forward, own[softcap]))
    weight = head.weight.detach().double().requires_grad_()
    exact = run(definition, hidden.detach().double().requires_grad_(), weight)
    for a, b, want in zip(ours, before, exact, strict=True):
        bound = 2 * (b.double() - want).abs().max() + 8e-7 * want.abs().max()
        assert (a.double() - want).abs().max() <= bound


@pytest.mark.parametrize("name", ["rlplus", "grpo"])
def test_their_sum_over_sequences_with_our_loss(theirs: Any, name: str) -> None:
    losses = theirs[-1]
    settings = importlib.import_module("prime_rl.configs.trainer")
    config = settings.CustomLossConfig(
        import_path="rlplus.integrations.prime_rl.loss", kwargs={"objective": name, "kl_coef": 0.0}
    )
    g = torch.Generator().manual_seed(0)
    lengths = (5, 7)
    logprob = [(-torch.rand(n, generator=g)).requires_grad_() for n in lengths]
    old, advantage = ([-torch.rand(n, generator=g) for n in lengths] for _ in range(2))
    mask = [torch.arange(n) > 0 for n in lengths]
    weights = [torch.ones(5), torch.tensor([1.0, -1, -1, 0, -0.5, -1, -1])]  # the second is a demonstration
    scaled, metrics = losses.compute_loss(
        logprob, old, None, advantage, mask, weights, None, None,
        rl_loss_fn=losses.setup_rl_loss_fn(config), rl_scale=10, ce_scale=1, ref_kl_scale=1,
    )  # fmt: skip
    want, _ = policy_loss(
        torch.cat(logprob), old_logprob=torch.cat(old), advantage=torch.cat(advantage),
        token_weight=torch.cat(mask) * torch.cat(weights).abs() / 10, external=torch.cat(weights) < 0,
        objective=Objective.preset(name),
    )  # fmt: skip
    torch.testing.assert_close(scaled, want)
    torch.testing.assert_close(torch.autograd.grad(scaled, logprob), torch.autograd.grad(want, logprob))
    assert metrics["external_share"].tolist() == [0.0, 1.0]


def test_their_own_tests_of_the_heads_pass_with_ours(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their tests on the CPU; the others need a GPU or prime-rl's models."""
    own, plain, *_ = theirs
    path = CHECKOUT / "tests/unit/train/rl/test_fused_lm_head.py"
    monkeypatch.setitem(sys.modules, "prime_rl.trainer.models.llama", ModuleType("llama"))
    sys.modules["prime_rl.trainer.models.llama"].LlamaForCausalLM = None  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("their_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_") and name.endswith("_cpu")]
    assert len(tests) > 1
    assert plain.forward is not own[None]
    for test in tests:
        test()
