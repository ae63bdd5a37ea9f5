"""`rlplus.integrations.verl` inside verl: its `ppo_loss` with our objectives, its models with our operation.

It needs an environment of its own: `make test-peers`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlplus import Objective, policy_loss, token_weights

pytest.importorskip("verl")

import processes
from tensordict import TensorDict
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils
from verl.utils.experimental.torch_functional import FusedLinearForPPO, FusedLinearForPPOFunction
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils import losses

from rlplus.integrations import verl as integration

pytestmark = pytest.mark.peers
PROMPTS, RESPONSES = [3, 1, 2], [4, 6, 2]
MODES = [
    ("token-mean", "token"),
    ("seq-mean-token-mean", "sequence"),
    ("seq-mean-token-sum-norm", "constant"),
]


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def batch(external: bool | None) -> tuple[TensorDict, Tensor, dict[str, Tensor]]:
    """A micro-batch as verl's workers have it, the model's logprobs of all tokens, and the batch's fields, padded."""
    g = torch.Generator().manual_seed(5)

    def rows(lengths: list[int]) -> list[Tensor]:
        return [torch.randn(n, generator=g) for n in lengths]

    def ids(lengths: list[int]) -> Tensor:
        return jagged([torch.arange(n) for n in lengths])

    old = [-row.abs() for row in rows(RESPONSES)]
    mask = [torch.ones(n) for n in RESPONSES]
    mask[1][2] = 0.0
    fields = {"old_log_probs": old, "advantages": rows(RESPONSES), "response_mask": mask}
    if external is not None:
        fields["external"] = [torch.full((n,), float(external and i != 2)) for i, n in enumerate(RESPONSES)]
    data = TensorDict(
        {name: jagged(value) for name, value in fields.items()}
        | {"prompts": ids(PROMPTS), "responses": ids(RESPONSES)},
        batch_size=3,
    )
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    everything = jagged([-row.abs() for row in rows([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])])
    return data, everything, {name: padded(value) for name, value in fields.items()}


def config(mode: str, agg: str, **changes: Any) -> Any:
    loss = PolicyLossConfig(loss_mode=mode)
    return ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=agg, policy_loss=loss, **changes
    )


def responses_of(everything: Tensor) -> Tensor:
    """The logprobs of the responses: a position's belongs to the token after it."""
    rows = zip(everything.unbind(), PROMPTS, strict=True)
    return padded([row[prompt - 1 : -1] for row, prompt in rows])


@pytest.mark.parametrize(("agg", "reduction"), MODES)
@pytest.mark.parametrize("preset", ["rlplus", "luffy"])
def test_ppo_loss_with_our_objective(preset: str, agg: str, reduction: Any) -> None:
    data, everything, fields = batch(True)
    values = everything.values().clone().requires_grad_()
    model = torch.nested.nested_tensor_from_jagged(values, everything.offsets())
    theirs, metrics = losses.ppo_loss(config(preset, agg), {"log_probs": model}, data)
    theirs.backward()

    logprob = responses_of(everything).requires_grad_()
    objective = Objective(external="shaped", gamma=0.0) if preset == "luffy" else Objective()
    mask = fields["response_mask"]
    ours, stats = policy_loss(
        logprob, old_logprob=fields["old_log_probs"], advantage=fields["advantages"],
        token_weight=token_weights(mask, reduction, max_length=6), external=fields["external"] != 0,
        objective=objective,
    )  # fmt: skip
    ours.backward()
    torch.testing.assert_close(theirs, ours)
    got = responses_of(torch.nested.nested_tensor_from_jagged(values.grad, everything.offsets()))
    torch.testing.assert_close(got, logprob.grad)
    assert stats["tokens_external"] == 9
    assert metrics["actor/external_share"].aggregate() == pytest.approx(9 / 11)


def test_other_losses_of_verl_and_batches_without_the_column_are_as_before() -> None:
    data, everything, fields = batch(None)
    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla
    both = [
        losses.ppo_loss(config(name, "token-mean"), {"log_probs": everything}, data)[0]
        for name in ("vanilla", "rlplus")
    ]
    mask, logprob = fields["response_mask"], responses_of(everything)
    inputs = {"old_logprob": fields["old_log_probs"], "advantage": fields["advantages"]}
    for loss, objective in zip(both, (Objective("clip", dual_clip=3.0), Objective()), strict=True):
        want, _ = policy_loss(logprob, **inputs, token_weight=mask / mask.sum(), objective=objective)
        torch.testing.assert_close(loss, want)


def test_weights_of_the_rollouts_mismatch_multiply_the_surrogate() -> None:
    data, everything, _ = batch(True)
    weight = [0.5 * row.exp() for row in data["old_log_probs"].unbind()]
    plain, _ = losses.ppo_loss(config("rlplus", "token-mean"), {"log_probs": everything}, data)
    data["rollout_is_weights"] = jagged(weight)
    weighted, _ = losses.ppo_loss(config("rlplus", "token-mean"), {"log_probs": everything}, data)
    data["advantages"] = jagged([a * w for a, w in zip(data["advantages"].unbind(), weight, strict=True)])
    del data["rollout_is_weights"]
    again, _ = losses.ppo_loss(config("rlplus", "token-mean"), {"log_probs": everything}, data)
    torch.testing.assert_close(weighted, again)
    assert not torch.isclose(weighted, plain)


def test_a_model_of_verl_computes_logprobs_by_the_fused_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    from causal_lms import make

    model = make("Qwen2", {"tie_word_embeddings": True}).float()
    monkeypatch.setattr(type(model), "forward", type(model).forward)  # verl patches the class
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
    ids = torch.randint(0, 53, (2, 9), generator=torch.Generator().manual_seed(0))
    slope = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    results = []
    for forward in (integration.fused_forward, None):
        if forward is None:
            hidden = model.model(input_ids=ids).last_hidden_state
            logprob, entropy = FusedLinearForPPOFunction.apply(hidden, model.lm_head.weight, ids.roll(-1, -1), 0.7, 512)
        else:
            assert FusedLinearForPPO.forward is forward
            out = model(input_ids=ids, temperature=0.7, return_dict=True)
            logprob, entropy = out.log_probs, out.entropy
        (slope * (logprob + entropy)).sum().backward()
        results.append((logprob, entropy, {k: p.grad.clone() for k, p in model.named_parameters()}))
        model.zero_grad()
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_verl_installs_it_by_an_environment_variable(tmp_path: Path) -> None:
    script = "import verl; from verl.workers.utils import losses; from verl.trainer.ppo import core_algos\n"
    script += "print('rlplus' in core_algos.POLICY_LOSS_REGISTRY, type(losses.ppo_loss).__name__)"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "rlplus.integrations.verl"}
    done = processes.run([sys.executable, "-c", script], env=environment)
    assert done.stdout.split()[-2:] == ["True", "partial"], done.stderr


def test_a_step_of_their_worker_has_the_same_gradients(tmp_path: Path) -> None:
    """verl's TrainingWorker on the CPU (FSDP2, one process): its own loss of logits, and ours with the fused head.

    Without bounds its clipped loss is the surrogate of sampled tokens of RL-PLUS. The head is tied: verl shards an
    untied one apart under FSDP2, and its own fused kernels then meet a DTensor, too.
    """
    from causal_lms import make

    make("Qwen2", {"tie_word_embeddings": True}).float().save_pretrained(tmp_path / "model")
    found = []
    for mode, fused in ("vanilla", "no"), ("rlplus", "yes"):
        module = {"VERL_USE_EXTERNAL_MODULES": "rlplus.integrations.verl"} if mode == "rlplus" else {}
        command = [sys.executable, str(processes.SUPPORT / "verl_step.py"), str(tmp_path / "model")]
        done = processes.run([*command, mode, fused, str(tmp_path / mode)], env=os.environ | module)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / mode))
    theirs, ours = found
    assert max(g.abs().max() for g in theirs["gradients"].values()) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
