"""The real vLLM server on the CPU: its answers, what it drops, how it hangs and dies, and what it guards."""

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import processes
import pytest
from rollout_models import MAX_MODEL_LEN, PROMPTS, gap, requests, save, start, tiny_model
from servers import Server, ask, connect, metric

import rlplus.train.rollout.server_http
from rlplus.train.rollout import RolloutEngine, RunFailed, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_real_server_answers_as_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as the error message says, with a key: the same tokens as vLLM in this process, the model's logprobs."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    model, pushed = tiny_model(tied=False), tiny_model(tied=False, seed=1)
    save(model, tmp_path)
    inside = start("vllm", tmp_path)
    inside.push_weights(pushed.named_parameters(), 1)
    want = ask(inside)
    inside.close()
    with Server(tmp_path, tmp_path / "server.log", MAX_MODEL_LEN) as server:
        engine = connect(server.url, tmp_path)
        for version, weights in enumerate([model, pushed, model, pushed], start=1):
            engine.push_weights(weights.named_parameters(), version)
            groups = ask(engine)
            assert gap(weights, groups, PROMPTS, 0.7) <= 1e-5
        assert [[c.tokens for c in group] for group in groups] == [[c.tokens for c in group] for group in want]
        for ours, theirs in zip((c for g in groups for c in g), (c for g in want for c in g), strict=True):
            assert ours.truncated == theirs.truncated
            assert math.dist(ours.logprob, theirs.logprob) <= 1e-4
        check_that_it_drops_what_nobody_waits_for(server, engine)
        check_that_a_stopped_engine_is_noticed(server, engine)
        check_what_it_guards(engine, monkeypatch)
        server.signal(signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"did not answer: .*Start it again, and the run with --resume"):
            ask(engine)
        engine.close()


def check_that_it_drops_what_nobody_waits_for(server: Server, engine: RolloutEngine) -> None:
    """Ctrl-C while it generates: it stops soon after, and answers the same question in full when it is asked again."""
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")

    def question() -> Any:
        return engine.generate(requests([[5, 9]] * 64, [4] * 64, 300), Sampling(2.0, 0))

    def interrupt() -> None:
        processes.wait_until(lambda: metric(server, names[0]) != before[0])
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = [metric(server, name) for name in names]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        question()
    processes.wait_until(lambda: not metric(server, "vllm:num_requests_running"))
    tokens, ended = (metric(server, name) - earlier for name, earlier in zip(names, before, strict=True))
    whole = question()
    assert tokens < sum(len(c.tokens) for group in whole for c in group)
    assert ended < 4 * 64
    with pytest.raises(RunFailed, match=r"refused: POST .* was answered with 400: temperature must be in \[0, 2\]"):
        engine.generate(requests(PROMPTS, [1, 1, 1], 4), Sampling(3.0, 0))


def check_that_a_stopped_engine_is_noticed(server: Server, engine: Any) -> None:
    """Its web server goes on answering /metrics."""
    workers = [
        int(p) for p in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    ]
    patience, engine._progress_s = engine._progress_s, 3.0
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    with pytest.raises(RunFailed, match="no answer and no token for 3 s"):
        ask(engine)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    engine._progress_s = patience
    assert len(ask(engine)) == 3


def check_what_it_guards(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the generation, as docs/rollouts.md says."""
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(RunFailed, match=r"401: .*Is VLLM_API_KEY that of the server"):
        ask(engine)
    stranger = rlplus.train.rollout.server_http.Requests(engine._http.url)
    assert b"vllm_config" in stranger.send("GET", "/server_info?config_format=json")
    assert b"results" in stranger.send("POST", "/collective_rpc", {"method": "check_health"})
    monkeypatch.setenv("VLLM_API_KEY", "secret")
