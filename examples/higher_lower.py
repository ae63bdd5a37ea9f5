"""A game as an environment of `verifiers`: the policy guesses a digit, the environment says higher or lower.

`examples/higher_lower.yaml` trains on it; of such an environment a run needs its name only.
"""

import verifiers
from datasets import Dataset

DIGITS = "0123456789"


class HigherLower(verifiers.MultiTurnEnv):
    """A dialogue until the digit is found or the turns are used up."""

    async def env_response(
        self, messages: verifiers.Messages, state: verifiers.State, **_: object
    ) -> verifiers.Messages:
        """The answer to the last guess; the last message of the dialogue if the guess is right."""
        guess = last_digit(messages[-1]["content"])
        if guess == int(state["answer"]):
            state["final_env_response"] = answer = [verifiers.UserMessage(content="right")]
            return answer
        if guess is None:
            return [verifiers.UserMessage(content="a digit?")]
        return [verifiers.UserMessage(content="higher" if guess < int(state["answer"]) else "lower")]


def last_digit(text: str) -> int | None:
    """The last digit in a text."""
    digits = [sign for sign in text if sign in DIGITS]
    return int(digits[-1]) if digits else None


def nearness(completion: verifiers.Messages, answer: str) -> float:
    """1 for the right digit, less by 0.1 for each step away, 0 without a digit in the last guess."""
    guess = last_digit([message["content"] for message in completion if message["role"] == "assistant"][-1])
    return 0.0 if guess is None else 1 - abs(guess - int(answer)) / len(DIGITS)


def load_environment(max_turns: int = 3) -> verifiers.Environment:
    """The game, with a problem for each digit."""
    rows = [{"question": "Guess my digit.", "answer": digit} for digit in DIGITS]
    return HigherLower(dataset=Dataset.from_list(rows), rubric=verifiers.Rubric([nearness]), max_turns=max_turns)
