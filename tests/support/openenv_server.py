"""A stand-in for an OpenEnv server, with the messages of openenv 0.10; tests/peers has the real one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.server import ServerConnection, serve

Answer = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | str | None]
"""A session's own memory and a message -> the server's message, or its text; None closes the connection."""


def observation(text: str, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


def countdown(memory: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Three steps, each worth a tenth of its text's length; a text with an x ends the episode."""
    if message["type"] == "reset":
        memory |= {"left": 3, "seed": message["data"]["seed"]}
        return observation(f"go {memory['seed']}")
    memory["left"] -= 1
    said = message["data"]["text"]
    return observation(
        f"{memory['left']} for {memory['seed']}", len(said) / 10, done=memory["left"] == 0 or "x" in said
    )


@contextmanager
def serving(answer: Answer = countdown) -> Iterator[str]:
    """The address of a server; each connection is a session."""

    def session(connection: ServerConnection) -> None:
        memory: dict[str, Any] = {}
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            told = answer(memory, message)
            if told is None:
                return
            connection.send(told if isinstance(told, str) else json.dumps(told))

    with serve(session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
