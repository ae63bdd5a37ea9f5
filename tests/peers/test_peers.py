"""The losses of TRL and verl, called as these trainers call them, against ours: value and gradient, in fp64.

They need an environment of their own: `make test-peers`.
"""

from collections import defaultdict
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplus import Objective, policy_loss, token_weights

pytestmark = pytest.mark.peers
TRL = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: make test-peers")
VERL = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed: make test-peers")
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


def sample(on_policy: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """logprob (4, 6), mask, and per-token inputs: one sequence is shorter, one advantage 0, two are negative."""
    g = torch.Generator().manual_seed(5)
    logprob, step, ref, engine = (torch.rand(4, 6, generator=g, dtype=torch.float64) for _ in range(4))
    logprob = -0.02 - 3 * logprob
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    old = logprob.clone() if on_policy else logprob - 1.5 * (step - 0.5)
    inputs = {"old_logprob": old, "ref_logprob": logprob + ref - 0.5, "engine_logprob": old - 1.6 * (engine - 0.5)}
    inputs["advantage"] = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)[:, None].expand(4, 6)
    return logprob.requires_grad_(), mask, inputs


def check(theirs: Tensor, logprob: Tensor, mask: Tensor, reduction: Any, o: Objective, **inputs: Tensor) -> None:
    weight = token_weights(mask, reduction, max_length=6).double()
    external = torch.full_like(mask, "advantage" not in inputs)
    advantage = inputs.pop("advantage", torch.zeros_like(logprob))
    ours, _ = policy_loss(logprob, **inputs, advantage=advantage, token_weight=weight, external=external, objective=o)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    got, want = (torch.autograd.grad(loss, logprob)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, want, **CLOSE)
    assert want.abs().max() > 0.01


# ---- TRL


class OneProcess(SimpleNamespace):
    """The part of Hugging Face's accelerator that losses use."""

    num_processes, parallelism_config = 1, None

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, dim: int, pad_index: float) -> Tensor:
        return value


def trl_grpo(
    loss_type: str,
    logprob: Tensor,
    mask: Tensor,
    inputs: dict[str, Tensor],
    weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """GRPOTrainer's loss in evaluation, where nothing is divided by the number of accumulated micro-batches."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
    )
    trainer: Any = SimpleNamespace(
        args=args, loss_type=loss_type, model=SimpleNamespace(training=False), accelerator=OneProcess(),
        _metrics={"eval": defaultdict(list)}, _entropy_bonus_enabled=False, aux_loss_enabled=False, beta=0.0,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        epsilon_low=0.2, epsilon_high=0.2, use_vllm=weight is not None, max_completion_length=6,
        vllm_importance_sampling_correction=weight is not None,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, torch.ones_like(logprob), None),
    )  # fmt: skip
    for name, value in options.items():
        assert hasattr(args, name) or hasattr(trainer, name), name
        setattr(args if hasattr(args, name) else trainer, name, value)
    ids = torch.zeros(logprob.shape, dtype=torch.int64)
    batch = {
        **{"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask.long()},
        **{"advantages": inputs["advantage"][:, 0], "old_per_token_logps": inputs["old_logprob"]},
        **{"ref_per_token_logps": inputs["ref_logprob"], "num_items_in_batch": mask.sum()},
        "importance_sampling_ratio": weight,
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, trainer.model, batch)
    return loss


GRPO_LOSSES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [  # TRL's loss, reduction, options of both
    ("grpo", "sequence", {}, {"internal": "clip"}),
    ("dapo", "token", {"epsilon_high": 0.28}, {"internal": "clip", "clip_high": 0.28}),
    ("dr_grpo", "constant", {}, {"internal": "clip"}),
    ("cispo", "token", {"epsilon_high": 1.4}, {"internal": "cispo", "clip_high": 0.4}),
    ("sapo", "sequence", {}, {"internal": "sapo"}),
    ("sapo", "sequence", {"sapo_temperature_neg": 2.0}, {"internal": "sapo", "tau_neg": 2.0}),
    ("dapo", "token", {"beta": 0.3}, {"internal": "clip", "kl_coef": 0.3}),
    (
        *("dapo", "token", {"beta": 0.3, "use_bias_correction_kl": True}),
        {"internal": "clip", "kl_coef": 0.3, "kl_estimator": "k3-unbiased"},
    ),
]


@TRL
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("name", "reduction", "options", "fields"), GRPO_LOSSES)
def test_the_losses_of_trl(
    name: str, reduction: Any, options: dict[str, Any], fields: dict[str, Any], on_policy: bool
) -> None:
    logprob, mask, inputs = sample(on_policy)
    theirs = trl_grpo(name, logprob, mask, inputs, **options)
    check(theirs, logprob, mask, reduction, Objective(**fields), **inputs)


@TRL
def test_dft_of_trl() -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    logprob, mask, _ = sample(True)
    outputs = SimpleNamespace(log_probs=logprob * mask, label_mask=mask, entropy=logprob, is_top1=mask)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(loss_type="dft", average_tokens_across_devices=False), accelerator=OneProcess(),
        model=SimpleNamespace(training=False), aux_loss_enabled=False, compute_loss_func=None, label_smoother=None,
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    theirs = SFTTrainer.compute_loss(trainer, lambda **_: outputs, {}, num_items_in_batch=mask.sum())
    check(theirs, logprob, mask, "token", Objective(external="dft", gamma=0.0), old_logprob=None)


# ---- verl


def verl_loss(
    name: str, logprob: Tensor, mask: Tensor, inputs: dict[str, Tensor], weight: Tensor | None = None, **options: Any
) -> Tensor:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)
    rest = inputs["advantage"], mask.double(), config.loss_agg_mode, config, weight
    loss: Tensor = get_policy_loss_fn(name)(inputs["old_logprob"], logprob, *rest)[0]
    return loss


VERL_LOSSES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("vanilla", "token", {"clip_ratio_c": 1.6}, {"internal": "clip", "dual_clip": 1.6}),
    ("vanilla", "token", {"clip_ratio_c": 1e9, "clip_ratio_high": 0.28}, {"internal": "clip", "clip_high": 0.28}),
    # clip_ratio_low 1 leaves its cispo without a lower bound, like the paper's.
    ("cispo", "token", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.4}, {"internal": "cispo", "clip_high": 0.4}),
    ("sapo", "sequence", {"tau_neg": 2.0}, {"internal": "sapo", "tau_neg": 2.0}),
    ("dppo_tv", "token", {"clip_ratio_c": 20.0}, {"internal": "dppo"}),
    (
        *("dppo_tv", "token", {"clip_ratio_c": 1.5, "clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
        {"internal": "dppo", "ratio_cap": 1.5, "clip_low": 0.05, "clip_high": 0.1},
    ),
]


@VERL
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("name", "reduction", "options", "fields"), VERL_LOSSES)
def test_the_losses_of_verl(
    name: str, reduction: Any, options: dict[str, Any], fields: dict[str, Any], on_policy: bool
) -> None:
    logprob, mask, inputs = sample(on_policy)
    theirs = verl_loss(name, logprob, mask, inputs, **options)
    check(theirs, logprob, mask, reduction, Objective(**fields), **inputs)


@pytest.mark.parametrize("peer", [pytest.param("trl", marks=TRL), pytest.param("verl", marks=VERL)])
def test_gspo_as_an_old_logprob_that_gives_the_sequences_ratio(peer: str) -> None:
    """By `rlplus.train.learner.batch`. TRL's gradient goes through the mean, verl's through each token."""
    logprob, mask, inputs = sample(False)
    if peer == "trl":
        options = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.03}
        theirs = trl_grpo("grpo", logprob, mask, inputs, **options)
    else:
        options = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.05, "clip_ratio_high": 0.03}
        theirs = verl_loss("gspo", logprob, mask, inputs, **options)
    log_ratio = ((logprob - inputs["old_logprob"]) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    inputs["old_logprob"] = (logprob - log_ratio).detach()
    check(theirs, logprob, mask, "sequence", Objective("clip", clip_low=0.05, clip_high=0.03), **inputs)


@VERL
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_estimators_of_verl(estimator: str) -> None:
    from verl.trainer.ppo.core_algos import kl_penalty

    logprob, mask, inputs = sample(False)
    theirs = (kl_penalty(logprob, inputs["ref_logprob"], estimator) * mask).sum() / mask.sum()
    inputs["advantage"] = torch.zeros_like(logprob)
    check(theirs, logprob, mask, "token", Objective(kl_coef=1.0, kl_estimator=estimator), **inputs)


@VERL
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("threshold", "fields"), [(1.3, {}), ("0.6_1.3", {"mismatch_mode": "mask"})])
def test_the_mismatch_weights_of_verl(threshold: Any, fields: dict[str, Any], on_policy: bool) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    logprob, mask, inputs = sample(on_policy)
    gap = (inputs["old_logprob"] - inputs["engine_logprob"]).detach()
    weight, _ = compute_rollout_correction_weights(gap, mask.double(), "token", threshold)
    theirs = verl_loss("vanilla", logprob, mask, inputs, weight, clip_ratio_c=1e9)
    low = 0.6 if fields else 0.0
    objective = Objective("clip", mismatch_cap=1.3, mismatch_low=low, **fields)
    check(theirs, logprob, mask, "token", objective, **inputs)


@TRL
def test_trl_weighs_the_surrogate_and_not_the_kl_penalty() -> None:
    logprob, mask, inputs = sample(False)
    weight = (inputs["old_logprob"] - inputs["engine_logprob"]).detach().exp().clamp(0.6, 1.3)
    theirs = trl_grpo("dapo", logprob, mask, inputs, weight, beta=0.3)
    objective = Objective("clip", kl_coef=0.3, mismatch_cap=1.3, mismatch_low=0.6)
    check(theirs, logprob, mask, "token", objective, **inputs)
