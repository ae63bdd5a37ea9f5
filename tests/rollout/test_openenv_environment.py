"""Environments behind OpenEnv's protocol: episodes as turns, their rewards, and what a server may do wrong."""

import importlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_modules
from chat_templates import byte_turns
from openenv_server import Answer, countdown, observation, serving
from said_texts import END, Saying
from trainer_runs import metrics
from websockets.asyncio.client import connect

from rlplus.tools.cli import main
from rlplus.train.config import DataConfig, EnvironmentConfig, load_config
from rlplus.train.data import Example, load_examples
from rlplus.train.rollout import Completion, Request, RunFailed, Sampling, make_respond
from rlplus.train.rollout.environments import load_environment

ROOM = 160


@pytest.fixture
def address() -> Iterator[str]:
    with serving() as address:
        yield address


def configured(address: str, **changes: Any) -> EnvironmentConfig:
    values = {"library": "openenv", "name": address, "action": "text", "observation": "text"}
    return EnvironmentConfig.model_validate(values | changes)


def example(seed: int = 0, text: str | None = None) -> Example:
    prompt = f"<|user|>\n{text or f'go {seed}'}\n<|assistant|>\n".encode()
    return Example(seed, tuple(prompt), "-", None, columns={"row": {"seed": seed}})


def rolled(config: EnvironmentConfig, texts: list[list[str]], examples: Sequence[Example]) -> list[Completion]:
    respond = make_respond(None, byte_turns(), 258, config)
    engine: Any = Saying(texts)
    asked = [Request(e.prompt, 1, ROOM) for e in examples]
    return [completion for (completion,) in respond(engine, examples, asked, Sampling(1.0, 0))]


def turn(text: str) -> bytes:
    return f"\n<|user|>\n{text}\n<|assistant|>\n".encode()


def test_an_episode_is_a_response(address: str) -> None:
    texts = [["a", "bb"], ["cc", "x"], ["ddd"]]
    one, two = rolled(configured(address), texts, [example(0), example(7)])
    assert one.tokens == [*b"a", END, *turn("2 for 0"), *b"cc", END, *turn("1 for 0"), *b"ddd", END]
    assert two.tokens == [*b"bb", END, *turn("2 for 7"), *b"x", END]
    for completion in (one, two):
        assert completion.trained is not None
        said = [t for t, on in zip(completion.tokens, completion.trained, strict=True) if on]
        assert bytes(t for t in said if t != END) in (b"accddd", b"bbx")
    assert (one.reward, two.reward) == (pytest.approx(0.6), pytest.approx(0.3)), "the sum over the episode"


def test_max_turns_and_the_room_end_an_episode(address: str) -> None:
    (short,) = rolled(configured(address, max_turns=1), [["abc"]], [example()])
    assert (bytes(short.tokens[:-1]), short.reward) == (b"abc", pytest.approx(0.3))
    (long,) = rolled(configured(address), [["a" * (ROOM - 10)]], [example()])
    assert (long.truncated, long.reward) == (True, pytest.approx((ROOM - 10) / 10))


def at_the_end(memory: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """The countdown, whose last step alone has a reward."""
    told = countdown(memory, message)
    told["data"]["reward"] = 1.0 if told["data"]["done"] else None
    return told


def test_an_episode_that_is_cut_without_a_reward_has_that_of_unfinished_ones() -> None:
    with serving(at_the_end) as address:
        (whole,) = rolled(configured(address), [["a"], ["b"], ["c"]], [example()])
        (room,) = rolled(configured(address), [["a" * (ROOM - 10)]], [example()])
        (turn,) = rolled(configured(address, max_turns=1), [["a"]], [example()])
        (filled,) = rolled(configured(address, unfinished=-0.5), [["a" * ROOM]], [example()])
    assert [one.reward for one in (whole, room, turn, filled)] == [1.0, 0.0, 0.0, -0.5]


def test_timeout_s_is_the_only_limit_of_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """websockets gives up after 10 s of connecting, and after 20 s without a pong, if it is not told otherwise."""
    seen: list[dict[str, Any]] = []

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return connect(*args, **options)

    monkeypatch.setattr("rlplus.train.rollout.environments.openenv_environment.connect", noting)
    load_environment(configured(address))
    assert [(options["open_timeout"], options["ping_timeout"]) for options in seen] == [(None, None)]


def test_problems_are_first_observations_of_seeds(address: str, tmp_path: Path) -> None:
    run = {
        "output_dir": "x",
        "data": {"path": str(tmp_path / "rows.jsonl"), "columns": ["row"], "max_prompt_length": 64},
        "rollout": {"environment": configured(address).model_dump(), "max_response_length": ROOM},
        "reward": {"kind": "exact_match"},
        "model": {"scratch": {"max_position_embeddings": 512}},
        "algorithm": {"preset": "grpo"},
        "train": {"tokens_per_micro_batch": 4096, "steps": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert main(["problems", str(tmp_path / "run.yaml")]) == 2, "there is no end of seeds"
    assert main(["problems", str(tmp_path / "run.yaml"), "-n", "3"]) == 0
    assert main(["problems", str(tmp_path / "run.yaml"), "-n", "3"]) == 2, "the file is not overwritten"
    examples, _ = load_examples(
        DataConfig(path=str(tmp_path / "rows.jsonl"), columns=["row"]), byte_turns(), max_demonstration_length=1
    )
    assert [(e.prompt, e.columns) for e in examples] == [(example(i).prompt, {"row": {"seed": i}}) for i in range(3)]
    held_out = load_environment(configured(address)).problems(held_out=True, count=2)
    assert [row["row"]["seed"] for row in held_out] == [2**30, 2**30 + 1]


def full(memory: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "1 of 1 sessions", "code": "CAPACITY_REACHED"}}


def without_reward(memory: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    return countdown(memory, message) | {"data": countdown(memory, message)["data"] | {"reward": None, "done": True}}


FAULTS: dict[str, tuple[Answer, str]] = {
    "full": (full, r"refused reset \{'seed': 0\}: 1 of 1 sessions \(CAPACITY_REACHED\); want .* max_concurrent_envs"),
    "other text": (lambda memory, message: observation("other"), "want the environment's first messages as the data's"),
    "no text": (lambda memory, message: {"type": "observation", "data": {"observation": {"board": 3}}},
                r"want text in the field 'text' .*of an observation; got \{'board': 3\}"),
    "no reward": (without_reward, r"want at least one finite reward in an episode; got \[None\]"),
    "closes": (lambda memory, message: None, "the server at ws://127.0.0.1:.*/ws failed: ConnectionClosed"),
}  # fmt: skip

HAS_DATA = "want a message from the server whose data is an object; got "
A_TEXT = r"want text in the field 'text' \(rollout.environment.observation\) of an observation; got "
A_REWARD = "want a finite number or null as the reward of a reset; got "
MALFORMED: dict[str, str] = {
    "<html>": "want JSON from the server; got '<html>'$",
    "": "want JSON from the server; got ''$",
    "x" * 9_999: r"want JSON from the server; got 'x{499}\.\.\.$",
    "[1]": HAS_DATA + r"\[1\]$",
    "null": HAS_DATA + "None$",
    '{"type": "observation"}': HAS_DATA + r"\{'type': 'observation'\}$",
    '{"type": "observation", "data": null}': HAS_DATA + r"\{'type': 'observation', 'data': None\}$",
    '{"type": "error", "data": "full"}': HAS_DATA + r"\{'type': 'error', 'data': 'full'\}$",
    '{"data": {}}': A_TEXT + "None$",
    '{"data": {"observation": ["go 0"]}}': A_TEXT + r"\['go 0'\]$",
    '{"data": {"observation": {"text": 3}}}': A_TEXT + r"\{'text': 3\}$",
    '{"data": {"observation": {"text": "go 0"}, "reward": "high"}}': A_REWARD + "'high'$",
    '{"data": {"observation": {"text": "go 0"}, "reward": true}}': A_REWARD + "True$",
    "[" * 9_999: r"want JSON from the server; got '\[{499}\.\.\.$",
    '{"data": {"observation": {"text": "go 0"}, "reward": [1.0]}}': A_REWARD + r"\[1.0\]$",
    '{"data": {"observation": {"text": "go 0"}, "reward": NaN}}': A_REWARD + "nan$",
    '{"data": {"observation": {"text": "go 0"}, "reward": 1e999}}': A_REWARD + "inf$",
    '{"data": {"observation": {"text": "go 0"}, "reward": 1%s}}' % ("0" * 400): A_REWARD + "10{400}$",
    '{"data": {"observation": {"text": "go 0"}, "done": "false"}}':
        "want true or false as done of a reset; got 'false'$",
}  # fmt: skip


@pytest.mark.parametrize("told", MALFORMED, ids=lambda text: text[:60])
def test_malformed_messages_fail_a_run_and_the_making_of_problems(told: str) -> None:
    """The error names the server, what was wanted and what came. Connecting alone, at the start, gets no message."""
    with serving(lambda memory, message: told) as address:
        message = f"^rollout.environment {address}: {MALFORMED[told]}"
        with pytest.raises(RunFailed, match=message):
            rolled(configured(address), [["a"], ["b"], ["c"]], [example()])
        with pytest.raises(RunFailed, match=message):
            list(load_environment(configured(address)).problems(held_out=False, count=1))


@pytest.mark.parametrize("name", FAULTS)
def test_failures_of_a_server_fail_the_run(name: str) -> None:
    answer, message = FAULTS[name]
    with serving(answer) as address, pytest.raises(RunFailed, match=f"^rollout.environment http://127.*: .*{message}"):
        rolled(configured(address), [["a"], ["b"], ["c"]], [example()])


def test_a_server_that_does_not_answer_is_refused_at_the_start() -> None:
    with serving() as address:
        pass
    with pytest.raises(ValueError, match=f"^rollout.environment {address}: the server at ws.* failed: .*Error"):
        load_environment(configured(address))


SHIPPED = "examples/higher_lower_server.yaml"


def games(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sessions of the example's server, whose classes of openenv are plain ones; tests/peers has openenv's."""
    plain = dict.fromkeys(("Action", "Environment", "State"), SimpleNamespace)
    observation = type("Observation", (SimpleNamespace,), {"reward": None, "done": False})
    made = {"Observation": observation, "create_fastapi_app": lambda *classes, **_: classes}
    stub_modules.install(monkeypatch, {"openenv.core.env_server": plain | made}, user="examples.higher_lower_server")
    environment, action, _ = importlib.import_module("examples.higher_lower_server").app  # as uvicorn finds it

    def answer(memory: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            memory["game"] = environment()
            told = memory["game"].reset(**message["data"])
        else:
            told = memory["game"].step(action(**message["data"]))
        return {
            "type": "observation",
            "data": {"observation": {"text": told.text}, "reward": told.reward, "done": told.done},
        }

    return answer


def test_the_example_of_a_server_plays_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration with the address of the stand-in; rewards follow from the seeds' secrets."""
    with serving(games(monkeypatch)) as address:
        overrides = [f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'run'}", "train.steps=2"]
        overrides += [f"rollout.environment.name={address}", "rollout.engine=transformers"]
        assert main(["problems", SHIPPED, "-n", "20", *overrides]) == 0
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert rows == [
            {"prompt": [{"role": "user", "content": "Guess my digit."}], "answer": "-", "row": {"seed": seed}}
            for seed in range(20)
        ]
        environment = load_config(SHIPPED, overrides).rollout.environment
        assert environment is not None
        secrets = [random.Random(seed).randrange(10) for seed in range(20)]
        wrong = sum(map(bool, secrets))
        texts = [["0"] * 20, ["none"] * wrong, ["9"] * wrong]
        played = rolled(environment, texts, [example(seed, "Guess my digit.") for seed in range(20)])
        for secret, completion in zip(secrets, played, strict=True):
            assert completion.reward == pytest.approx(1 - abs(9 - secret) / 10 if secret else 1.0)
            said = [*b"0", END, *turn("higher"), *b"none", END, *turn("a digit?"), *b"9", END]
            assert completion.tokens == (said if secret else said[:2])
        assert main(["train", SHIPPED, *overrides]) == 0
    steps = metrics(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["mismatch/mean"] < 1e-5 for row in steps)
    assert all(0 <= row["reward/mean"] <= 1 for row in steps)
