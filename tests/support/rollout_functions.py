"""Rollout functions that tests name in a configuration."""

import math

from rlplus.train.rollout import Response, Sampler


def echo(sampler: Sampler, responses: list[Response]) -> None:
    """Two turns: three tokens, an inserted "|", and the rest."""
    for response in sampler(responses, max_tokens=3):
        response.insert([ord("|")])
    sampler(responses)


def graded(sampler: Sampler, responses: list[Response]) -> None:
    """Every other response is right, whatever it says."""
    sampler(responses)
    for index, response in enumerate(responses):
        response.reward = float(index % 2)


def raises(sampler: Sampler, responses: list[Response]) -> None:
    raise KeyError("no such tool")


def leaves_it_empty(sampler: Sampler, responses: list[Response]) -> None: ...


def writes_too_much(sampler: Sampler, responses: list[Response]) -> None:
    for response in responses:
        response.tokens += [1] * 9


def forgets_logprobs(sampler: Sampler, responses: list[Response]) -> None:
    for response in responses:
        response.tokens += [1, 2]
        response.trained += [True, True]


def has_no_logprob(sampler: Sampler, responses: list[Response]) -> None:
    for response in responses:
        response.tokens, response.trained, response.logprob = [1], [True], [math.nan]


def has_no_reward(sampler: Sampler, responses: list[Response]) -> None:
    sampler(responses)
    responses[0].reward = math.nan


def measures_nothing(sampler: Sampler, responses: list[Response]) -> None:
    sampler(responses)
    responses[0].metrics["turns"] = math.inf


def leaves_the_vocabulary(sampler: Sampler, responses: list[Response]) -> None:
    for response in responses:
        response.insert([100_000])
    sampler(responses)


number = 5
