"""The protocol of rollout engines, and the checks that all of them share."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rlplus.common.chosen_experts import Experts, fault
from rlplus.common.errors import RunFailed
from rlplus.common.kept_sets import KeptSets
from rlplus.common.section import MIN_TEMPERATURE
from rlplus.train.config import RolloutConfig

DEFAULT_CACHE_MB = 512  # keys and values, where rollout.kv_cache_memory_mb is not set
MOST_LOGPROB = 1e-3  # a logprob is 0 at most, and sums in fp32 are rounded
LEAST_LOGPROB = -3e38  # below it there is no number in fp32
LOGIT_BYTES = 4 * 4  # the transformers engine's, at a token: the model's logit, its fp32 copy, and as `draw` changes it


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, the number of responses to sample, and the tokens that each may have at most."""

    prompt: Sequence[int]
    n: int
    max_tokens: int


@dataclass(frozen=True)
class Sampling:
    """Settings with which all responses of a call are sampled.

    temperature: 0 decodes greedily. seed: the same one gives the same tokens for the same requests and weights; ranks
    that generate at the same time need different ones. stop: further token ids that end a response as the engine's
    end tokens do. top_k, top_p, min_p: see `RolloutConfig`; top_k 0 draws from the whole vocabulary.
    experts: whether the responses have the experts that were chosen (rollout.routing_replay).
    """

    temperature: float
    seed: int
    stop: Sequence[int] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    experts: bool = False

    @classmethod
    def of_training(cls, config: RolloutConfig, seed: int) -> "Sampling":
        """The settings of a run's rollouts."""
        return cls(
            config.temperature,
            seed,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            experts=config.routing_replay,
        )


@dataclass(frozen=True)
class Completion:
    """One sampled response: its token ids with the end or stop token, if it came, as the last.

    logprob: each token's, in nats, under log_softmax(logits / temperature), the distribution it was drawn from; after
    greedy decoding (temperature 0) under log_softmax(logits); with `Sampling.top_k` the softmax is over kept tokens.
    kept: the tokens that were kept for each token, itself among them; None where all were.
    experts: of all tokens of prompt and response but the last, see `rlplus.common.chosen_experts`, with
    `Sampling.experts`; else None.
    truncated: max_tokens ended it, and no end or stop token.
    trained, reward: a rollout function's (`rollout.function`). Whether each token was sampled: only these are trained
    on, and the others' logprobs are not read; None = all were. The reward; None = the run's reward grades the text.
    metrics: further numbers of the function, by name.
    """

    tokens: list[int]
    logprob: list[float]
    truncated: bool
    trained: list[bool] | None = None
    reward: float | None = None
    kept: KeptSets | None = None
    experts: Experts | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """A further engine is a class with these methods, which takes the arguments of `make_engine`.

    It has a line in `ENGINES` or `SERVERS` there, and a value of `rollout.engine`.
    """

    name: str

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The responses to each request, each with noise of its own.

        They are sampled from the whole distribution, or with `Sampling.top_k` from the kept tokens, which they then
        have as `Completion.kept`. With `Sampling.experts` they have `Completion.experts`.
        ValueError, before anything is generated: a prompt that is empty, has a token id outside the vocabulary or
        leaves no room for max_tokens; n below 0; a temperature between 0 and 0.01; sampling that it cannot do.
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


class Task(Protocol):
    """The problem of a response, such as an `Example`: token ids of the prompt, and the data's answer.

    columns: the values of `data.columns`.
    """

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def answer(self) -> str: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


Respond = Callable[[RolloutEngine, Sequence[Task], Sequence[Request], Sampling], list[list[Completion]]]
"""Engine, tasks, a request with the prompt of each, sampling -> the responses to each."""


def respond(
    engine: RolloutEngine, tasks: Sequence[Task], requests: Sequence[Request], sampling: Sampling
) -> list[list[Completion]]:
    """The engine's responses to the prompts."""
    return engine.generate(requests, sampling)


def check_requests(requests: Sequence[Request], sampling: Sampling, *, max_model_len: int, vocabulary: int) -> None:
    """ValueError for what `RolloutEngine.generate` must refuse."""
    temperature = sampling.temperature
    stop = sampling.stop
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        raise ValueError(f"want a temperature of 0 (greedy) or at least {MIN_TEMPERATURE}; got {temperature}")
    if stop and not (min(stop) >= 0 and max(stop) < vocabulary):
        raise ValueError(f"want stop token ids from 0 to {vocabulary - 1}; got {list(stop)}")
    if sampling.top_k and not temperature:
        raise ValueError(f"want a temperature above 0 with top_k {sampling.top_k}; got 0, the likeliest token")
    for index, request in enumerate(requests):
        prompt = request.prompt
        limit = request.max_tokens
        if request.n < 0 or limit < 1:
            raise ValueError(
                f"want n of at least 0 and max_tokens of at least 1; request {index} has {request.n} and {limit}"
            )
        if not 1 <= len(prompt) <= max_model_len - limit:
            raise ValueError(
                f"want prompts of 1 to {max_model_len - limit} tokens (max_model_len={max_model_len} less "
                f"max_tokens={limit}); prompt {index} has {len(prompt)}"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            low = min(prompt)
            high = max(prompt)
            raise ValueError(f"want token ids from 0 to {vocabulary - 1}; prompt {index} has {low} to {high}")


def check_responses(
    completions: list[list[Completion]],
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    vocabulary: int,
    ends: Sequence[int],
    engine: str,
) -> list[list[Completion]]:
    """Return the completions; RunFailed for one that the model cannot have sampled, with engine, request and field.

    vocabulary: the model's number of tokens. ends: token ids that end a response, besides `sampling.stop`.
    """
    stops = (*ends, *sampling.stop)
    for index, (request, group) in enumerate(zip(requests, completions, strict=True)):
        if len(group) != request.n:
            raise RunFailed(f"{engine}, request {index}: want {request.n} responses; got {len(group)}")
        for number, completion in enumerate(group):
            if what := _fault(completion, request.max_tokens, vocabulary, stops):
                raise RunFailed(f"{engine}, request {index}, response {number}: {what}")
    return completions


def _fault(completion: Completion, most: int, vocabulary: int, stops: Collection[int]) -> str | None:
    """The first field of a response that is wrong, with what came; None if none is. Values may have any type."""
    tokens = completion.tokens
    logprob = completion.logprob
    kept = completion.kept
    if not 1 <= len(tokens) <= most:
        return f"want 1 to {most} tokens; got {len(tokens)}"
    for place, token in enumerate(tokens, 1):
        if type(token) is not int or not 0 <= token < vocabulary:
            return f"token {place}: want an id from 0 to {vocabulary - 1}; got {token!r:.50}"
        if token in stops and place < len(tokens):
            return f"token {place}: want nothing behind the end token {token}; got {len(tokens) - place} more"
    if completion.truncated and (tokens[-1] in stops or len(tokens) < most):
        got = f"{len(tokens)}, of which the last is {tokens[-1]}"
        return f"length: want {most} tokens without an end token from a response that its limit ended; got {got}"
    if not completion.truncated and tokens[-1] not in stops:
        return f"stop: want one of the end tokens {sorted(stops)} as the last; got {tokens[-1]}"
    if len(logprob) != len(tokens):
        return f"logprobs: want {len(tokens)} finite logprobs, one a token; got {len(logprob)}"
    for place, value in enumerate(logprob, 1):
        if type(value) not in (float, int) or not LEAST_LOGPROB < value <= MOST_LOGPROB:
            return f"logprob {place}: want {len(tokens)} finite logprobs, at most 0 each; got {value!r:.50}"
    if kept is not None and kept.tokens and not (min(kept.tokens) >= 0 and max(kept.tokens) < vocabulary):
        low = min(kept.tokens)
        high = max(kept.tokens)
        return f"kept tokens: want ids from 0 to {vocabulary - 1}; got {low} to {high}"
    return None


def check_kept(completions: list[list[Completion]], sampling: Sampling, engine: str) -> list[list[Completion]]:
    """Return the completions; RunFailed if one lacks the tokens that were kept where it was sampled from some only.

    Without them the logprobs of the policy that sampled cannot be computed.
    """
    for index, group in enumerate(completions):
        for c in group:
            if c.kept is None and not sampling.top_k:
                continue
            what = "none" if c.kept is None else c.kept.fault(c.tokens, c.trained)
            if what:
                raise RunFailed(
                    f"want the tokens that top_k {sampling.top_k}, top_p {sampling.top_p:g}, min_p {sampling.min_p:g} "
                    f"kept, for each sampled token of a response to prompt {index}, itself among them; the {engine} "
                    f"engine gave {what}"
                )
    return completions


def check_experts(
    completions: list[list[Completion]], requests: Sequence[Request], sampling: Sampling, engine: str
) -> list[list[Completion]]:
    """Return the completions; RunFailed if one lacks experts that the trainer is to replay."""
    for request, group in zip(requests, completions, strict=True):
        for c in group if sampling.experts else ():
            if what := fault(c.experts, len(request.prompt), len(c.tokens), c.trained):
                raise RunFailed(
                    "want the experts of each layer (rollout.routing_replay) for all tokens of a prompt of "
                    f"{len(request.prompt)} tokens and its response of {len(c.tokens)} but the last; the {engine} "
                    f"engine gave {what}"
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
