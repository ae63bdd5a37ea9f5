"""How likely the model of a run finds its demonstrations, before any training."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum
from typing import Any

import torch

from rlplus.common import activity
from rlplus.loss import head_of, linear_logprob
from rlplus.train.config import Config
from rlplus.train.data import Example
from rlplus.train.learner.pretrained import existing_model, load_model

MOST_SCORED = 64  # demonstrations, from all over the data


@dataclass(frozen=True)
class Likelihood:
    """Means over the tokens of some demonstrations, at the temperature of the rollouts.

    logprob: of a token, in nats; p: its probability, actor/prob_external of a run. of: demonstrations in the data.
    """

    demonstrations: int
    of: int
    tokens: int
    logprob: float
    p: float


def likelihood(config: Config, examples: Sequence[Example]) -> Likelihood | None:
    """The likelihood of the examples' demonstrations under `model.path`, or None where there are none.

    Loads the weights, on the GPU if there is one. ValueError for a scratch model, whose weights are random.
    """
    path = config.model.path
    if path is None:
        raise ValueError("want model.path with --logprob; got model.scratch, whose weights are random")
    shown = [example for example in examples if example.demonstration is not None]
    if not shown:
        return None
    chosen = [shown[i * len(shown) // MOST_SCORED] for i in range(MOST_SCORED)] if len(shown) > MOST_SCORED else shown
    activity.current.begin("likelihood")
    lm: Any = load_model(
        config.model, path, existing_model(path, config.model.trust_remote_code, config.model.overrides)
    )
    lm = lm.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    found = [value for example in chosen for value in token_logprobs(lm, example, config.rollout.temperature)]
    mean = fsum(found) / len(found)
    p = fsum(map(exp, found)) / len(found)
    return Likelihood(len(chosen), len(shown), len(found), mean, p)


@torch.no_grad()
def token_logprobs(lm: Any, example: Example, temperature: float) -> list[float]:
    """The logprob of each token of the example's demonstration behind its prompt."""
    shown = list(example.demonstration or ())
    ids = torch.tensor([[*example.prompt, *shown]], device=lm.device)
    states = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(example.prompt) - 1 : -1]
    target = torch.tensor(shown, device=lm.device)
    logprob, _ = linear_logprob(states, target=target, temperature=temperature, **head_of(lm))
    values: list[float] = logprob.double().tolist()
    return values
