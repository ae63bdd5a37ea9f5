"""The game of `examples/higher_lower.py` as a server of OpenEnv, with `pip install openenv uvicorn`:

    uvicorn examples.higher_lower_server:app --port 8000

`examples/higher_lower_server.yaml` trains on it.
"""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

DIGITS = "0123456789"


class Guess(Action):
    text: str


class Told(Observation):
    text: str


class HigherLower(Environment):
    """An episode: three guesses of a digit, which the seed decides. The last one's nearness is the reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self.digit, self.left = random.Random(seed).randrange(len(DIGITS)), 3
        return Told(text="Guess my digit.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        guess = next((int(sign) for sign in reversed(action.text) if sign in DIGITS), None)
        self.left -= 1
        if guess == self.digit or not self.left:
            reward = 0.0 if guess is None else 1 - abs(guess - self.digit) / len(DIGITS)
            return Told(text="done", done=True, reward=reward)
        return Told(text="a digit?" if guess is None else "higher" if guess < self.digit else "lower")

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(HigherLower, Guess, Told, max_concurrent_envs=256)
