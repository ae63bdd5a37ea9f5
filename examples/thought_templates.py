"""Thought templates, after TAPO (arXiv 2505.15692): `rollout.function: examples.thought_templates:rollout`.

TAPO guides rollouts by templates: short sequences of actions ("analyse the problem", "verify the result") that it finds
by tree search on 500 problems and selects by a problem's complexity. Its authors published no code, so this is a
reading of the paper: the templates below replace those that the search would find, the length of the prompt replaces
its complexity, and the text of an action is inserted into the response before the policy goes on. The policy reads
that text and is not trained on it.
"""

from itertools import zip_longest

from rlplus.train.rollout import Response, Sampler

# The longest prompt in tokens, and the actions; in order of complexity.
TEMPLATES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (64, ("Let me compute the result directly.\n",)),
    (256, ("Let me break the problem into steps.\n", "Let me check each step.\n")),
    (
        float("inf"),
        (
            "Let me restate what is known and what is asked.\n",
            "Let me break the problem into steps.\n",
            "Let me look at the result from another side.\n",
        ),
    ),
)
SEGMENT = 256  # tokens that the policy writes after an action before the next one comes


def rollout(sampler: Sampler, responses: list[Response]) -> None:
    plans = [template(len(response.task.prompt)) for response in responses]
    for actions in zip_longest(*plans):  # the first of all, then the second of all
        acting = [(response, action) for response, action in zip(responses, actions, strict=True) if action]
        for response, action in acting:
            if not response.ended:
                response.insert(sampler.tokenizer.encode(action, add_special_tokens=False))
        sampler([response for response, _ in acting], max_tokens=SEGMENT)
    sampler(responses)  # continues to the end


def template(complexity: int) -> tuple[str, ...]:
    """The actions for a problem."""
    return next(actions for most, actions in TEMPLATES if complexity <= most)
