"""Rollouts by a user-defined function: tools, several turns, environments, inserted text.

The function gets a `Sampler` and the responses, which are empty; inserted tokens are not trained on:

    # budget.py, for `rollout: {function: "budget.py:answer_in_time"}`
    def answer_in_time(sampler, responses):
        for response in sampler(responses, max_tokens=32):
            response.insert(sampler.tokenizer.encode("So the answer is ", add_special_tokens=False))
        sampler(responses)
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from rlplus.common.chosen_experts import Experts, joined
from rlplus.common.errors import RunFailed
from rlplus.common.kept_sets import KeptSets
from rlplus.common.lazy import import_function
from rlplus.train.config import EnvironmentConfig
from rlplus.train.rollout.protocol import Completion, Request, Respond, RolloutEngine, Sampling, Task, respond


@dataclass
class Response:
    """An unfinished response of at most `max_tokens` tokens. All lists have one entry per token.

    - `tokens`: ids of everything behind the prompt
    - `trained`: whether the policy sampled the token: only these have a loss
    - `logprob`: the engine's, for the tokens that are trained on; for others anything
    - `ended`: the policy drew an end token, or there is no room left
    - `truncated`: it ended for want of room
    - `reward`: None: the run's reward grades the text
    - `metrics`: further numbers about it by name, whose means a step logs as environment/NAME
    - `kept`: with rollout.top_k the tokens that were kept for each token that is trained on; else none
    - `experts`: with rollout.routing_replay those that the engine chose, for the tokens before the last sampled one
    """

    task: Task
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    ended: bool = False
    truncated: bool = False
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    kept: KeptSets = field(default_factory=KeptSets)
    experts: Experts | None = None

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.max_tokens - len(self.tokens)

    def insert(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy reads and is not trained on. It ends if they and one more do not fit."""
        if len(tokens) >= self.room:
            self.ended = self.truncated = True
            return
        self.tokens += tokens
        self.trained += [False] * len(tokens)
        self.logprob += [math.nan] * len(tokens)
        self.kept.skip(len(tokens))


class Sampler:
    """Continues responses, with the run's sampling. tokenizer: the run's."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        self.tokenizer = tokenizer
        self._engine = engine
        self._sampling = sampling
        self._seeds = random.Random(sampling.seed)
        self.failure: Exception | None = None  # the engine's

    def __call__(
        self, responses: Sequence[Response], *, stop: Sequence[int] = (), max_tokens: int | None = None
    ) -> list[Response]:
        """Continue each response until it ends, samples a token of `stop`, or got max_tokens; returns unfinished ones.

        Responses that have ended stay as they are. The same calls in the same order give the same tokens; equal
        responses get different ones. Many responses in one call are fast, one by one they are not.
        """
        going = [response for response in responses if not response.ended]
        requests = [
            Request([*r.task.prompt, *r.tokens], 1, r.room if max_tokens is None else min(max_tokens, r.room))
            for r in going
        ]
        try:
            drawn = self._engine.generate(
                requests, replace(self._sampling, seed=self._seeds.getrandbits(31), stop=stop)
            )
        except Exception as error:
            self.failure = error
            raise
        for response, (completion,) in zip(going, drawn, strict=True):
            response.tokens += completion.tokens
            response.trained += [True] * len(completion.tokens)
            response.logprob += completion.logprob
            if completion.kept is not None:
                response.kept.extend(completion.kept)
            if completion.experts is not None:
                response.experts = joined(response.experts, completion.experts)
            stopped = not completion.truncated and completion.tokens[-1] in stop
            response.truncated = response.room == 0 and (completion.truncated or stopped)
            response.ended = response.truncated or not (completion.truncated or stopped)
        return [response for response in going if not response.ended]


RolloutFunction = Callable[[Sampler, list[Response]], None]
"""Makes every response, which comes empty: with the sampler, with `Response.insert`, or by filling its lists itself."""


def make_respond(
    reference: str | None,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    environment: EnvironmentConfig | None = None,
) -> Respond:
    """`respond`, or the rollout function "module:name", or the environment, in this form. ValueError if it is missing.

    The latter raise RunFailed where the function raises, or leaves a response that cannot be trained on.
    vocabulary: the model's, which may be larger than the tokenizer's.
    """
    if environment is not None:
        from rlplus.train.rollout.environments import load_environment

        return _by_function(load_environment(environment), f"environment {environment.name}", tokenizer, vocabulary)
    if reference is None:
        return respond
    try:
        function: RolloutFunction = import_function(reference)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"rollout.function: want module:name of a function; got {reference} ({error})") from error
    if not callable(function):
        raise ValueError(f"rollout.function: want a function of (sampler, responses); {reference} is {function!r}")
    return _by_function(function, f"function {reference}", tokenizer, vocabulary)


def _by_function(function: RolloutFunction, name: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Respond:
    """The function as a `Respond`; messages call it rollout.NAME."""

    def respond_by_function(
        engine: RolloutEngine, tasks: Sequence[Task], requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Completion]]:
        if not requests:  # a rank may have none while others have some
            return []
        sampler = Sampler(engine, tokenizer, sampling)
        asked = zip(tasks, requests, strict=True)
        groups = [[Response(task, request.max_tokens) for _ in range(request.n)] for task, request in asked]
        responses = [response for group in groups for response in group]
        try:
            function(sampler, responses)
        except Exception as error:
            if error is sampler.failure:
                raise
            if isinstance(error, RunFailed):
                raise RunFailed(f"rollout.{name}: {error}") from error
            raise RunFailed(f"rollout.{name} raised {type(error).__name__}: {error}") from error
        for index, response in enumerate(responses):
            if what := _fault(response, vocabulary):
                raise RunFailed(f"rollout.{name}, response {index}: {what}")
        return [[_completion(r, sampling) for r in group] for group in groups]

    return respond_by_function


def _completion(r: Response, sampling: Sampling) -> Completion:
    kept = r.kept if sampling.top_k else None
    return Completion(r.tokens, r.logprob, r.truncated, r.trained, r.reward, kept, r.experts, r.metrics)


def _fault(response: Response, vocabulary: int) -> str | None:
    """The reason why a response cannot be trained on; None if it can."""
    tokens = response.tokens
    if not 1 <= len(tokens) <= response.max_tokens:
        return f"want 1 to {response.max_tokens} tokens (rollout.max_response_length); got {len(tokens)}"
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        return f"want token ids from 0 to {vocabulary - 1}; got {min(tokens)} to {max(tokens)}"
    for what, values in (("logprob", response.logprob), ("trained", response.trained)):
        if len(values) != len(tokens):
            return f"want {len(tokens)} values in {what}, one per token; got {len(values)}"
    if not all(math.isfinite(p) for p, on in zip(response.logprob, response.trained, strict=True) if on):
        return "want finite logprobs of all tokens that are trained on"
    if response.reward is not None and not math.isfinite(response.reward):
        return f"want a finite reward or None; got {response.reward}"
    if not all(map(math.isfinite, response.metrics.values())):
        return f"want finite metrics; got {response.metrics}"
    return None
