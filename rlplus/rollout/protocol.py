"""The protocol of rollout engines, and the checks that all of them share."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlplus.common.section import MIN_TEMPERATURE
from rlplus.errors import RunFailed

DEFAULT_CACHE_MB = 512  # for keys and values, where rollout.kv_cache_memory_mb is not set


@dataclass(frozen=True)
class Completion:
    """One sampled response: its token ids with the stop token, if it came, as the last.

    logprob: of each token, in nats, under log_softmax(logits / temperature), the distribution it was drawn from; after
    greedy decoding (temperature 0) under log_softmax(logits).
    truncated: max_tokens ended it and no stop token.
    trained, reward: of a rollout function (`rollout.function`). Whether each token was sampled: only these are trained
    on, and the others' logprobs are not read; None = all were. The reward; None = the run's reward grades the text.
    """

    tokens: list[int]
    logprob: list[float]
    truncated: bool
    trained: list[bool] | None = None
    reward: float | None = None


class RolloutEngine(Protocol):
    name: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: Sequence[int],
        *,
        temperature: float,
        max_tokens: int | Sequence[int],
        seed: int,
        stop: Sequence[int] = (),
    ) -> list[list[Completion]]:
        """Sample n[i] responses of at most max_tokens tokens to each prompts[i], from the whole distribution.

        max_tokens: of all, or for each prompt. stop: further token ids that end a response as the end token does.

        The same arguments and weights give the same tokens; every response of a call has noise of its own. Ranks that
        generate at the same time need different seeds. temperature 0 decodes greedily.
        ValueError, before anything is generated: a prompt that is empty, has a token id outside the vocabulary or
        leaves no room for max_tokens; n or max_tokens of another length, n below 0; a temperature between 0 and 0.01.
        """
        ...

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every parameter: Hugging Face names and full shapes, any float dtype, a tied lm_head left out.

        Exhausts the iterator. ValueError names a parameter that is unknown, misshaped, given twice or missing; the
        engine then holds a mixture of two models and refuses to generate. RunFailed names rank and parameter when the
        push stays at one for longer than rollout.push_timeout_s. All ranks call it together.
        """
        ...

    def sleep(self) -> None:
        """Release the GPU's memory until the next push, if rollout.sleep is set. No generation in between."""
        ...

    def close(self) -> None:
        """Free the model and the cache. The trainer's process group stays."""
        ...


def check_request(
    prompts: Sequence[Sequence[int]],
    n: Sequence[int],
    *,
    temperature: float,
    max_tokens: int | Sequence[int],
    max_model_len: int,
    vocabulary: int,
    stop: Sequence[int],
) -> list[int]:
    """Each prompt's max_tokens. ValueError for a request that `RolloutEngine.generate` must refuse."""
    if len(n) != len(prompts) or any(count < 0 for count in n):
        raise ValueError(f"want one count of at least 0 for each of {len(prompts)} prompts; got n={list(n)}")
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"want a temperature of 0 (greedy) or at least {MIN_TEMPERATURE}; got {temperature}")
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"want one max_tokens, or one for each of {len(prompts)} prompts; got {len(limits)}")
    if min(limits, default=1) < 1:
        raise ValueError(f"want max_tokens of at least 1; got {min(limits)}")
    if stop and not (min(stop) >= 0 and max(stop) < vocabulary):
        raise ValueError(f"want stop token ids from 0 to {vocabulary - 1}; got {list(stop)}")
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not 1 <= len(prompt) <= max_model_len - limit:
            raise ValueError(
                f"want prompts of 1 to {max_model_len - limit} tokens (max_model_len={max_model_len} less "
                f"max_tokens={limit}); prompt {index} has {len(prompt)}"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            low, high = min(prompt), max(prompt)
            raise ValueError(f"want token ids from 0 to {vocabulary - 1}; prompt {index} has {low} to {high}")
    return limits


def check_logprobs(completions: list[list[Completion]]) -> list[list[Completion]]:
    """Return the completions; RunFailed if a logprob is not finite, as it is with broken weights."""
    for index, group in enumerate(completions):
        for completion in group:
            if len(completion.logprob) != len(completion.tokens) or not all(map(math.isfinite, completion.logprob)):
                raise RunFailed(
                    f"want {len(completion.tokens)} finite logprobs, one a token, for a response to prompt {index};"
                    f" got {completion.logprob[:8]}"
                )
    return completions


@contextmanager
def whole_model() -> Iterator[None]:
    """Build Hugging Face models unsharded inside: a live ZeRO-3 HfDeepSpeedConfig would shard them."""
    from transformers.integrations import deepspeed as integration

    trainers = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = trainers
