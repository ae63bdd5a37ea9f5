"""A step of RL-PLUS with demonstrations on smollm2-135m-instruct in fp32: gradient, AdamW's step, push to vLLM."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from real_runs import Text, init, load, logprobs, sampled, short_run
from torch import Tensor

from rlplus.train.data import Sample
from rlplus.train.trainer import open_run
from rlplus.train.trainer.loop import Step

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
NAMES = [  # every kind of parameter, from the first layer to the last; the embedding is the head, too
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.14.self_attn.v_proj.weight",
    "model.layers.29.mlp.down_proj.weight",
    "model.norm.weight",
]
LR = 1e-4


class Stepped(NamedTuple):
    """A step of a run.

    gradient: of `NAMES`, before clipping. norm: of all parameters' gradient. weights: all, behind the update. texts,
    engine: responses sampled with these weights, and the engine's logprobs of their tokens.
    """

    samples: Sequence[Sample]
    gradient: dict[str, Tensor]
    norm: float
    loss: float
    weights: dict[str, Tensor]
    texts: list[Text]
    engine: Tensor


@pytest.fixture(scope="module")
def stepped(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Stepped:
    folder = tmp_path_factory.mktemp("gradient")
    file = init(folder, smollm2, 2)
    sizes = {"train__prompts_per_step": 2, "rollout__max_response_length": 24}
    with open_run(short_run(file, folder / "run", model__dtype="float32", train__lr=LR, **sizes)) as run:
        step = Step(run)
        batch = step.collect()
        step.credit(batch)
        (update,) = run.recipe.updates(batch)
        update, micro_batches = step.pack(update)
        step.remember([(update, micro_batches)])
        outputs = step.accumulate(update, micro_batches)
        parameters = dict(run.policy.engine.module.lm.named_parameters())
        gradient = {name: safe_get_full_grad(parameters[name]).clone() for name in NAMES}
        norm = step.optimize(update)
        assert norm is not None
        weights = {name: parameters[name].detach().clone() for name in parameters}
        run.engine.sync(1, probe=True)
        texts, engine = sampled(run, seed=5)
        loss = float(sum(out.loss for out in outputs))
    return Stepped(update.samples, gradient, norm, loss, weights, texts, engine)


def rlplus_loss(logprob: Tensor, external: bool, advantage: float) -> Tensor:
    """The tokens' losses of RL-PLUS on samples of the current policy, by the formulas of the paper.

    The ratio of a sampled token is p / p_old; the one of a demonstrated token p over the mean of p_old and the
    estimate of its author's (p_old + 1) / 2, times (1 - p)^(1/2), in which p is a constant.
    """
    p, p_old = logprob.exp(), logprob.detach().exp()
    if not external:
        return -advantage * p / p_old
    return -advantage * (1 - p_old) ** 0.5 * p / (((p_old + 1) / 2 + p_old) / 2)


def by_definition(model: str, samples: Sequence[Sample], dtype: str) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients and the gradient's norm by transformers and autograd alone, one sequence at a time."""
    lm = load(model, dtype)
    parameters = dict(lm.named_parameters())
    total, tokens = 0.0, sum(len(sample.response) for sample in samples)
    for sample in samples:
        group = torch.tensor([other.reward for other in samples if other.group == sample.group], dtype=torch.float64)
        advantage = float((sample.reward - group.mean()) / (group.std() + 1e-6))
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        logprob = lm(ids).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
        logprob = logprob.gather(1, torch.tensor([*sample.response])[:, None])[:, 0]
        loss = rlplus_loss(logprob, sample.demonstration, advantage).sum() / tokens
        loss.backward()
        total += float(loss)
    norm = float(torch.stack([p.grad.double().norm() for p in parameters.values()]).norm())
    return total, {name: parameters[name].grad for name in NAMES}, norm


def test_the_gradient_is_that_of_the_definition(stepped: Stepped, smollm2: str) -> None:
    """Against the plain model in float64, within twice the error that the plain model itself has in fp32."""
    assert [sample.demonstration for sample in stepped.samples].count(True) == 2
    loss, exact, norm = by_definition(smollm2, stepped.samples, "float64")
    plain_loss, plain, plain_norm = by_definition(smollm2, stepped.samples, "float32")
    eps = torch.finfo(torch.float32).eps
    assert abs(stepped.loss - loss) <= 2 * abs(plain_loss - loss) + 8 * eps
    assert abs(stepped.norm - norm) <= 2 * abs(plain_norm - norm) + 8 * eps * norm
    for name in NAMES:
        own, wanted = stepped.gradient[name].double(), exact[name]
        assert (own - wanted).norm() <= 2 * (plain[name] - wanted).norm() + 8 * eps * wanted.norm(), name


def test_the_update_is_adamws_first(stepped: Stepped, smollm2: str) -> None:
    """Its moments cancel: each weight decays and moves by the learning rate along the sign of its clipped gradient."""
    before = dict(load(smollm2, "float32").named_parameters())
    for name in NAMES:
        gradient = stepped.gradient[name].double() / max(1.0, stepped.norm)
        old = before[name].detach().double()
        wanted = old * (1 - LR * 0.01) - LR * gradient / (gradient.abs() + 1e-8)
        moved = (stepped.weights[name].double() - wanted).abs().max()
        assert moved <= 4 * torch.finfo(torch.float32).eps * wanted.abs().max()


def test_vllm_has_the_new_weights(stepped: Stepped, smollm2: str) -> None:
    """In fp32 the mean gap is below a hundredth of the gap to the weights before the update."""
    lm = load(smollm2, "float32")
    old = logprobs(lm, stepped.texts)
    lm.load_state_dict(stepped.weights, strict=False)
    new = logprobs(lm, stepped.texts)
    assert (stepped.engine - new).abs().max() < 1e-3
    assert (stepped.engine - old).abs().mean() > 100 * (stepped.engine - new).abs().mean()
