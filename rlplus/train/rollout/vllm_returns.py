"""The tokens that vLLM kept and the experts it chose: how it is asked for them, and refused where it gives none."""

from dataclasses import fields
from functools import partial
from typing import Any

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.protocol import Sampling

# vLLM's arguments.
MASKS = "return_sampling_mask"
EXPERTS = "enable_return_routed_experts"


def no_masks(top_k: int, reason: str) -> str:
    """The message of an engine that does not return the tokens it kept."""
    return (
        f"rollout.top_k {top_k} needs the tokens that vLLM kept, from which it sampled: want vLLM 0.32 on a GPU, whose "
        f"Model Runner V2 returns them ({MASKS}), rollout.engine transformers, or top_k 0; got {reason}"
    )


def no_experts(reason: str) -> str:
    """The message of an engine that does not return the experts it chose."""
    return (
        "rollout.routing_replay needs the experts that vLLM chose: want a mixture of experts and vLLM 0.32 on a GPU, "
        f"whose Model Runner V2 returns them ({EXPERTS}), or rollout.engine transformers; got {reason}"
    )


def check_arguments(config: RolloutConfig, vllm: Any) -> None:
    """ValueError for a vLLM, the module, that lacks an argument that the run needs."""
    for wanted, argument, refusal in (
        (config.top_k, MASKS, partial(no_masks, config.top_k)),
        (config.routing_replay, EXPERTS, no_experts),
    ):
        if wanted and argument not in [field.name for field in fields(vllm.EngineArgs)]:
            raise ValueError(refusal(f"vLLM {vllm.__version__}, which has no such argument"))


def check_sampling(sampling: Sampling, most_kept: int, replays: bool = False) -> None:
    """ValueError for sampling that vLLM refuses. most_kept, replays: rollout.top_k and routing_replay at its start."""
    if bool(sampling.top_k) != bool(most_kept):
        raise ValueError(
            f"want top_k in all requests to a vLLM that returns the tokens it kept, and in none to another: it was "
            f"started with rollout.top_k {most_kept}; got {sampling.top_k}"
        )
    if sampling.experts and not replays:
        raise ValueError("want an engine that was made with rollout.routing_replay for its experts")
