"""A calculator for the task of the demo: `rollout.function: examples.calculator:rollout`.

The policy calls it by writing `;`. The calculator then inserts the running sums of all numbers but the last, which are
not trained on, and the policy continues after them: it has learned when to call, and how to use the answer.
"""

from experiments.toy.task import EMPTY, SCRATCHPAD, Problem
from rlplus.train.rollout import Response, Sampler


def rollout(sampler: Sampler, responses: list[Response]) -> None:
    call = sampler.tokenizer.convert_tokens_to_ids(SCRATCHPAD)
    going = responses
    while going := sampler(going, stop=[call]):
        for response in going:
            prompt = sampler.tokenizer.decode(response.task.prompt)
            response.insert(sampler.tokenizer.encode(calculate(prompt), add_special_tokens=False))


def calculate(prompt: str) -> str:
    """The running sums of the numbers in a prompt of the task, without the last."""
    numbers = prompt.removesuffix("=").split("+")
    problem = Problem(tuple(number for number in numbers if EMPTY not in number))
    return ",".join(problem.running_sums()[:-1])
