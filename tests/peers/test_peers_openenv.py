"""The example's OpenEnv server, by its package, in front of our client."""

import random
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import byte_turns
from said_texts import Saying

from rlplus.train.config import EnvironmentConfig
from rlplus.train.data import Example
from rlplus.train.rollout import Request, RunFailed, Sampling, make_respond

pytestmark = pytest.mark.peers
pytest.importorskip("openenv")
uvicorn = pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The server in a thread, on a port that it chooses."""
    made = runpy.run_path(str(Path(__file__).parents[2] / "examples/higher_lower_server.py"))
    server = uvicorn.Server(uvicorn.Config(made["app"], host="127.0.0.1", port=0, log_level="error"))
    up = threading.Event()
    started = server.startup

    async def startup(sockets: Any = None) -> None:
        await started(sockets)
        up.set()

    server.startup = startup
    thread = threading.Thread(target=server.run)
    thread.start()
    assert up.wait(60)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def configured(address: str, **changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate(
        {"library": "openenv", "name": address, "action": "text", "observation": "text"} | changes
    )


def test_an_episode_of_the_example(address: str) -> None:
    """Each secret is the seed's; the dialogue and its reward follow by hand."""
    examples = []
    for seed in range(10):
        prompt = b"<|user|>\nGuess my digit.\n<|assistant|>\n"
        examples.append(Example(seed, tuple(prompt), "-", None, columns={"row": {"seed": seed}}))
    respond = make_respond(None, byte_turns(), 258, configured(address))
    secrets = [random.Random(seed).randrange(10) for seed in range(10)]
    others = [i for i, secret in enumerate(secrets) if secret != 4]
    texts = [["4"] * 10, ["none"] * len(others), ["0"] * len(others)]
    engine: Any = Saying(texts)
    groups = respond(engine, examples, [Request(e.prompt, 1, 160) for e in examples], Sampling(1.0, 0))
    for secret, (completion,) in zip(secrets, groups, strict=True):
        text = byte_turns().decode(completion.tokens)
        if secret == 4:
            assert (text, completion.reward) == ("4<|endoftext|>", 1.0)
            continue
        told = "higher" if secret > 4 else "lower"
        turns = [f"\n<|user|>\n{words}\n<|assistant|>\n" for words in (told, "a digit?")]
        assert text == f"4<|endoftext|>{turns[0]}none<|endoftext|>{turns[1]}0<|endoftext|>"
        assert completion.reward == pytest.approx(1 - secret / 10)


def test_the_servers_refusals_are_told(address: str) -> None:
    prompt = tuple(b"<|user|>\nGuess my digit.\n<|assistant|>\n")
    examples = [Example(0, prompt, "-", None, columns={"row": {"seed": 0}})]
    engine: Any = Saying([["4"]])
    respond = make_respond(None, byte_turns(), 258, configured(address, action="move"))
    with pytest.raises(RunFailed, match=r"the server refused step \{'move': '4'\}: .*VALIDATION_ERROR"):
        respond(engine, examples, [Request(prompt, 1, 160)], Sampling(1.0, 0))
