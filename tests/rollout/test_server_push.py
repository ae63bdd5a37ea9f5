"""Pushes to the real vLLM server on the CPU: what it refuses, what it repairs, who else may push to it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import processes
import pytest
from rollout_models import MAX_MODEL_LEN, PROMPTS, gap, save, tiny_model
from servers import Server, ask, connect, connect_behind_a_killed_run, metric

from rlplus.train.rollout import RolloutEngine, RunFailed
from rlplus.train.rollout.server_engine import GENERATE, TOKENS
from rlplus.train.rollout.server_http import Requests, split
from rlplus.train.rollout.server_push import Control

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def check(engine: RolloutEngine, model: Any, version: int) -> None:
    engine.push_weights(model.named_parameters(), version)
    assert gap(model, ask(engine), PROMPTS, 0.7) <= 1e-5


def test_pushes_to_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head, too, which vLLM packs on the CPU."""
    first, second = tiny_model(tied=True), tiny_model(tied=True, seed=1)
    save(first, tmp_path)
    with Server(tmp_path, tmp_path / "server.log", MAX_MODEL_LEN) as server:
        engine: Any
        engine, command = connect_behind_a_killed_run(server.url, tmp_path)
        engine._push._bucket_bytes = 30_000
        for version, model in enumerate([second, first], start=1):
            check(engine, model, version)
        assert "want one run at a time; process" in processes.run(command).stdout
        check_what_is_refused(engine, first, monkeypatch)
        check(engine, second, 9)
        save(tiny_model(tied=False), tmp_path / "other")
        with pytest.raises(ValueError, match=r"want the model of the run, with lm_head.weight of shape \[48, 64\]"):
            connect(server.url, tmp_path / "other")
        check(engine, first, 10)
        check_a_strangers_request(server, engine, second)
        engine.close()


def check_what_is_refused(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with one parameter of a bucket, none of that bucket is loaded, and the parameter is named."""
    update = Control.update_weights
    for place, value, message in [
        (4, 7, "want model.norm.weight with the trainer's checksum 7; got "),
        (2, [4, 16], r"want model.norm.weight of shape \(64,\); got \(4, 16\)"),
    ]:

        def spoil(control: Any, info: Any, place: int = place, value: object = value) -> None:
            for entry in info["parcel"]["entries"]:
                if entry[0] == "model.norm.weight":
                    entry[place] = value
            update(control, info)

        with monkeypatch.context() as patch:
            patch.setattr(Control, "update_weights", spoil)
            with pytest.raises(RunFailed, match=message):
                engine.push_weights(model.named_parameters(), 5)
        with pytest.raises(RuntimeError, match="version 5 failed half-way"):
            ask(engine)
    answers = engine._push._answers = engine._push._greeted()
    engine._control.start_weight_update()
    answers.check("start_weight_update")
    engine._control.update_weights({"parcel": {"run": "another", "pid": os.getpid(), "fd": 0, "entries": []}})
    with pytest.raises(OSError, match=r"want a parcel of '\w+', the run that pushes here; got one of 'another'"):
        answers.check("update_weights")
    engine._push.close()
    with pytest.raises(OSError, match=r"500: .*Cannot release a trainer connection during"):
        engine._control.shutdown()


def check_a_strangers_request(server: Server, engine: Any, model: Any) -> None:
    """One that is under way when a push begins goes on after it, with the new weights, and says where they changed."""
    asked = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True, "detokenize": False}
    stranger = Requests(split(server.url))
    before = metric(server, TOKENS)
    with ThreadPoolExecutor(1) as pool:
        body = {"token_ids": PROMPTS[0], "sampling_params": asked}
        answer = pool.submit(stranger.send, "POST", GENERATE, body)
        processes.wait_until(lambda: metric(server, TOKENS) != before)
        check(engine, model, 11)
        (choice,) = json.loads(answer.result())["choices"]
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"]) == ("10", "11")
    assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == 300
    assert choice["finish_reason"] == "length"
