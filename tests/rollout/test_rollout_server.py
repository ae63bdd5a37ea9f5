"""A vLLM server: what is asked of it and what is refused, against a stub that looks like it."""

import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from rollout_models import EOS, PROMPTS, requests, save, tiny_model
from servers import FINISHING, INIT, PUSH, STARTING, FakeServer, ask, connect

import rlplus.train.rollout.http_engine
import rlplus.train.rollout.server_engine
from rlplus.common import activity
from rlplus.common.kept_sets import KeptSets
from rlplus.train.rollout import RolloutEngine, RunFailed, Sampling, check_kept


def test_what_is_asked_and_what_is_pushed(fake: FakeServer, tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = connect(fake.url, tmp_path, push_bucket_mb=1)
    with pytest.raises(RuntimeError, match="the server may hold any weights: push before generating"):
        ask(engine)
    engine.push_weights(model.named_parameters(), 3)
    assert fake.version == "3"
    assert fake.loaded.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(fake.loaded[name], p) for name, p in model.named_parameters())
    assert fake.calls == [INIT, *STARTING, "/update_weights", *FINISHING]
    groups = ask(engine)
    assert [len(group) for group in groups] == [4, 0, 2]
    assert activity.rollouts.state()[:3] == (6, 6, sum(len(c.tokens) for group in groups for c in group))
    assert groups[0][0].logprob == [-0.25, -0.25]
    assert not groups[0][0].truncated
    asked = sorted(fake.asked, key=lambda body: body["sampling_params"]["seed"])
    assert [body["token_ids"] for body in asked] == [PROMPTS[0], PROMPTS[2]]
    first, second = (body["sampling_params"] for body in asked)
    assert second["seed"] == first["seed"] + 4, "no two responses with one seed"
    assert (first["temperature"], first["top_p"], first["top_k"], first["logprobs"]) == (0.7, 1.0, 0, 0)
    assert first["ignore_eos"]
    assert first["stop_token_ids"] == [EOS]
    with pytest.raises(ValueError, match="at most 4 responses a prompt"):
        engine.generate(requests([PROMPTS[0]], [5], 4), Sampling(1.0, 0))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(engine)


def test_a_server_returns_the_tokens_that_it_kept(fake: FakeServer, tmp_path: Path) -> None:
    save(tiny_model(tied=False), tmp_path)
    with pytest.raises(ValueError, match=r"--return-sampling-mask; rollout.top_k 8 needs the tokens that vLLM kept"):
        connect(fake.url, tmp_path, top_k=8)
    fake.info["model_config"]["return_sampling_mask"] = True
    with pytest.raises(ValueError, match="with --return-sampling-mask it refuses the whole vocabulary"):
        connect(fake.url, tmp_path)
    engine = connect(fake.url, tmp_path, top_k=8, top_p=0.9, min_p=0.1)
    engine.push_weights(tiny_model(tied=False).named_parameters(), 3)
    fake.choice = {"sampling_mask": [[7, 5], [EOS, 2, 3]]}
    sampling = Sampling(0.7, 3, top_k=8, top_p=0.9, min_p=0.1)
    groups = check_kept(engine.generate(requests(PROMPTS, [2, 1, 1], 4), sampling), sampling, engine.name)
    assert groups[0][1].kept == KeptSets.of([[7, 5], [EOS, 2, 3]])
    params = fake.asked[0]["sampling_params"]
    assert (params["top_k"], params["top_p"], params["min_p"]) == (8, 0.9, 0.1)
    with pytest.raises(ValueError, match=r"it was started with rollout\.top_k 8; got 0"):
        ask(engine)
    fake.choice = {}
    with pytest.raises(RunFailed, match=r"the vllm at http.* engine gave none"):
        check_kept(engine.generate(requests(PROMPTS, [2, 1, 1], 4), sampling), sampling, engine.name)
    engine.close()


def test_answers_that_are_not_the_policys_are_refused(fake: FakeServer, tmp_path: Path) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = connect(fake.url, tmp_path)
    engine.push_weights(model.named_parameters(), 3)
    for choice, message in [
        (
            {"weight_versions": [{"version": "2", "start": 0, "end": 2}]},
            r"with the weights of \['2'\]; want those of 3",
        ),
        ({"weight_versions": None}, r"with the weights of \[\]; want those of 3"),
        ({"finish_reason": "abort"}, r"want choices\[\d\].finish_reason to be stop or length; got 'abort'"),
    ]:
        fake.choice = choice
        with pytest.raises(RunFailed, match=message) as error:
            ask(engine)
        assert f"vllm at {fake.url}" in str(error.value)
    fake.choice, fake.fail = {}, "/inference/v1/generate"
    with pytest.raises(RunFailed, match=r"did not answer: POST /inference/v1/generate was answered with 500"):
        ask(engine)
    for fail, message in [
        ("/update_weights", "not take the weights of version 4: POST /update_weights was answered with 500"),
        ("/update_weight_version", "POST /update_weight_version was answered with 500"),
    ]:
        fake.fail = fail
        with pytest.raises(RunFailed, match=message):
            engine.push_weights(model.named_parameters(), 4)
        with pytest.raises(RuntimeError, match="version 4 failed half-way"):
            ask(engine)
    fake.fail, fake.odd = "", {"/reset_prefix_cache": {"success": False}}
    with pytest.raises(RunFailed, match="did not reset its prefix cache"):
        engine.push_weights(model.named_parameters(), 5)
    fake.odd = {}
    engine.push_weights(model.named_parameters(), 6)
    assert len(ask(engine)) == 3
    fake.http.shutdown()
    fake.http.server_close()
    with pytest.raises(RunFailed, match=r"did not answer: .*refused.*Start it again, and the run with --resume"):
        ask(engine)
    engine.close()


def test_a_server_that_would_not_be_exact_is_refused(fake: FakeServer, tmp_path: Path) -> None:
    save(tiny_model(tied=True), tmp_path)
    model = fake.info["model_config"]
    model |= {"logprobs_mode": "raw_logprobs", "skip_tokenizer_init": False, "dtype": "torch.bfloat16"}
    model["max_model_len"] = 100
    fake.info["weight_transfer_config"] = None
    fake.info["parallel_config"]["worker_extension_cls"] = ""
    fake.info["scheduler_config"]["enable_chunked_prefill"] = True
    with pytest.raises(ValueError, match=r"want at http://.* a server started with: VLLM_SERVER_DEV_MODE=1") as refusal:
        connect(fake.url, tmp_path)
    parts = ("its way of taking weights is None; want rlplus", "its workers do not know rlplus.train.rollout.receiver")
    for part in (*parts, "raw_logprobs", "a tokenizer", "torch.bfloat16", "at most 100", "--no-enable-chunked"):
        assert part in str(refusal.value), part
    with pytest.raises(
        ValueError, match=r"started with: .*its logits are bfloat16, which the trainer's are not"
    ) as refusal:
        connect(fake.url, tmp_path, "bfloat16")
    assert """--hf-overrides '{"head_dtype": "float32"}'; """ in str(refusal.value)
    model["hf_overrides"] = {"head_dtype": "float32"}
    with pytest.raises(ValueError, match="raw_logprobs") as refusal:
        connect(fake.url, tmp_path, "bfloat16")
    assert "its logits" not in str(refusal.value)
    del model["logprobs_mode"]
    with pytest.raises(ValueError, match=r"vLLM 0.32; GET /server_info.*: want vllm_config.model_config.logprobs_mode"):
        connect(fake.url, tmp_path)
    fake.fail = "/server_info"  # the development endpoints are off
    with pytest.raises(ValueError, match=r"started with: .*; GET /server_info.* was answered with 500"):
        connect(fake.url, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match=r"started with: .*refused"):
            connect(f"http://127.0.0.1:{free.getsockname()[1]}", tmp_path)


@pytest.mark.parametrize("url", ["http://", "http://host:port", "http://host:0", "http://me@host", "http://host?x=1"])
def test_a_url_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    save(tiny_model(tied=False), tmp_path)
    with pytest.raises(ValueError, match=r"want rollout.server_url such as http://localhost:8000; got http://"):
        connect(url, tmp_path)


def test_what_is_no_such_server_is_refused(fake: FakeServer, tmp_path: Path) -> None:
    save(tiny_model(tied=False), tmp_path)
    connect(f"{fake.url}/", tmp_path).close()
    with pytest.raises(ValueError, match=r"GET /server_info.* was answered with 500"):
        connect(f"{fake.url}/v1", tmp_path)
    for info in ({}, [], {"vllm_config": {}}, {"vllm_config": None}, "no"):
        fake.odd = {"/server_info": info}
        with pytest.raises(ValueError, match=r"vLLM 0.32; GET /server_info.*: want (vllm_config|the answer)"):
            connect(fake.url, tmp_path)
    fake.odd = {"/metrics": b"process_open_fds 9.0"}
    with pytest.raises(
        ValueError, match=r"want vllm:generation_tokens_total in GET /metrics, which --disable-log-stats"
    ):
        connect(fake.url, tmp_path)
    fake.odd = {"/server_info": b"<html>"}
    with pytest.raises(ValueError, match=r"started with: .*; GET /server_info.*: want JSON; got '<html>'"):
        connect(fake.url, tmp_path)
    fake.odd, fake.fail = {}, INIT
    with pytest.raises(ValueError, match=r"a server for this run's weights, started with: .* was answered with 500"):
        connect(fake.url, tmp_path)


ODD = [
    ({}, {"logprobs": None}, r"want choices\[\d\].logprobs to be an object; got None"),
    ({"/inference/v1/generate": [1]}, {}, r"want the answer to be an object; got \[1\]"),
    ({"/inference/v1/generate": b"busy"}, {}, "request [02]: POST .*: want JSON; got 'busy'"),
]


@pytest.mark.parametrize(("odd", "choice", "message"), ODD)
def test_answers_that_are_not_vllms_are_refused(
    fake: FakeServer, tmp_path: Path, odd: dict[str, Any], choice: dict[str, Any], message: str
) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    engine = connect(fake.url, tmp_path)
    engine.push_weights(model.named_parameters(), 3)
    fake.odd, fake.choice = odd, choice
    with pytest.raises(RunFailed, match=message):
        ask(engine)
    engine.close()


def holding(fake: FakeServer, path: Path, *lengths: int) -> RolloutEngine:
    """An engine on a server that answers no prompt of these lengths."""
    model = tiny_model(tied=False)
    save(model, path)
    engine = connect(fake.url, path)
    engine.push_weights(model.named_parameters(), 3)
    fake.hold, fake.all_held = set(lengths), threading.Barrier(2)
    return engine


def break_by_a_refusal(fake: FakeServer, engine: RolloutEngine) -> None:
    """The server refuses the other prompt."""
    fake.odd = {"/inference/v1/generate": {"choices": []}}
    with pytest.raises(RunFailed, match=r"request \d: POST .*choices: want 2 with index \[0, 1\]; got \[\]"):
        ask(engine)


def break_by_ctrl_c(fake: FakeServer, engine: RolloutEngine) -> None:
    def interrupt() -> None:
        assert all(fake.held.acquire(timeout=processes.PATIENCE_S) for _ in fake.hold)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ask(engine)


def break_by_closing(fake: FakeServer, engine: RolloutEngine) -> None:
    """The engine is closed, as at the end of a run whose next batch is being generated in a thread."""
    failures = []

    def generate() -> None:
        try:
            ask(engine)
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    assert all(fake.held.acquire(timeout=processes.PATIENCE_S) for _ in fake.hold)
    engine.close()
    thread.join(processes.PATIENCE_S)
    assert failures == ["the engine is closed"]


@pytest.mark.parametrize(
    ("way", "held"), [(break_by_a_refusal, (3,)), (break_by_ctrl_c, (3, 9)), (break_by_closing, (3, 9))]
)
def test_no_end_waits_for_answers(
    fake: FakeServer, tmp_path: Path, way: Callable[[FakeServer, RolloutEngine], None], held: tuple[int, ...]
) -> None:
    """Whatever ends a generation hangs up on the server, which would answer never, and leaves no thread."""
    engine, others = holding(fake, tmp_path, *held), set(threading.enumerate())
    way(fake, engine)
    assert all(fake.gone.acquire(timeout=processes.PATIENCE_S) for _ in held)
    left = set(threading.enumerate()) - others
    assert not [thread for thread in left if thread.name.startswith("ThreadPoolExecutor")]
    engine.close()


def test_a_server_that_hangs_and_one_that_is_slow(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not even answer /metrics; one that does, but generates no token any more, as when only its engine
    is stopped; and one that still generates when nothing has been answered for longer than the limit."""
    engine = holding(fake, tmp_path, 3, 9)
    with monkeypatch.context() as patch:
        for module in (rlplus.train.rollout.http_engine, rlplus.train.rollout.server_engine):
            patch.setattr(module, "PATIENCE_S", 0.2)
        fake.silent = True
        with pytest.raises(RunFailed, match=r"did not answer: GET /metrics: TimeoutError .* longer than 0.2 s. Start"):
            ask(engine)
    fake.silent = False
    engine._progress_s = 0.2  # type: ignore[attr-defined]
    with pytest.raises(RunFailed, match=r"no answer and no token for 0.2 s .rollout.progress_timeout_s.: it hangs. St"):
        ask(engine)
    fake.hold = set()
    answer, polls = fake.answer, threading.Semaphore(0)

    def slow(path: str, body: Any) -> Any:
        if path == "/metrics":
            fake.tokens += 1
            polls.release()
        elif "generate" in path:
            assert all(polls.acquire(timeout=processes.PATIENCE_S) for _ in range(5))
        return answer(path, body)

    monkeypatch.setattr(fake, "answer", slow)
    assert [len(group) for group in ask(engine)] == [4, 0, 2]
    engine.close()


def test_the_servers_key_is_sent(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tied=False)
    save(model, tmp_path)
    fake.key = "secret"
    for key in ("", "wrong"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        engine = connect(fake.url, tmp_path)
        engine.push_weights(model.named_parameters(), 3)
        with pytest.raises(RunFailed, match=r"refused: POST .* 401: .*Unauthorized.*Is VLLM_API_KEY that of the") as no:
            ask(engine)
        assert "wrong" not in str(no.value)
        engine.close()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = connect(fake.url, tmp_path)
    engine.push_weights(model.named_parameters(), 4)
    assert [len(group) for group in ask(engine)] == [4, 0, 2]
    engine.close()
    assert set(fake.keys) == {"/server_info", "/metrics", "/get_world_size", "/inference/v1/generate", *PUSH}
    assert set(fake.keys.values()) == {"Bearer secret"}, "on what vLLM does not guard, too: a proxy before it may"
    for key in ("secret\n", "schlüssel"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(ValueError, match="want VLLM_API_KEY of printable ASCII") as refusal:
            connect(fake.url, tmp_path)
        assert key.strip() not in str(refusal.value)


def test_a_push_comes_in_buckets_and_repairs_one_that_was_cut_off(fake: FakeServer, tmp_path: Path) -> None:
    """A bucket holds as much as rollout.push_bucket_mb, or one parameter; the server is paused until all have come."""
    model = tiny_model(tied=False)
    save(model, tmp_path)
    fake.updating = True  # by a run that was killed in a push
    engine: Any = connect(fake.url, tmp_path)
    assert fake.calls == [INIT, "/pause", "/finish_weight_update"]
    engine._push._bucket_bytes = 20_000
    paused: list[bool] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in model.named_parameters():
            paused.append(fake.paused)
            yield name, p

    engine.push_weights(weights(), 1)
    assert fake.calls[3:6] == [*STARTING, "/update_weights"]
    assert [set(paused), fake.paused, len(fake.sizes) > 5] == [{True}, False, True]
    assert max(fake.sizes) <= max(20_000, *(p.nbytes for p in model.parameters()))
    assert sum(fake.sizes) >= sum(p.nbytes for p in model.parameters())
    assert all(torch.equal(fake.loaded[name], p) for name, p in model.named_parameters())
    fake.fail = "/update_weights"
    left = weights()
    with pytest.raises(RunFailed, match=r"version 2: POST /update_weights was answered with 500: .*Its log says more"):
        engine.push_weights(left, 2)
    assert next(left, None) is None, "other ranks gather all of them, too"
    assert fake.paused, "nobody samples from a mixture of two models"
    fake.fail = ""
    with pytest.raises(ValueError, match=r"1 did not come: model\.embed_tokens\.weight"):
        engine.push_weights(list(weights())[1:], 3)
    assert fake.paused
    engine.push_weights(weights(), 4)
    engine.close()


PUSHES = """
import sys
from pathlib import Path
import torch.distributed as dist
from rollout_models import tiny_model
from servers import connect
from rlplus.train.rollout import RunFailed
dist.init_process_group("gloo")
engine = connect(sys.argv[1], Path(sys.argv[2]))
for version in (4, 5):
    try:
        engine.push_weights(tiny_model(tied=False).named_parameters(), version)
    except RunFailed as error:
        print(error)
    engine._control.start_weight_update = lambda: {}["no message"]
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_all_ranks_hear_of_a_push_that_failed_on_one(fake: FakeServer, tmp_path: Path) -> None:
    """Only rank 0 talks to the server; here it does not even expect what happens to it."""
    save(tiny_model(tied=False), tmp_path)
    fake.odd = {"/reset_prefix_cache": ["unexpected"]}
    said = processes.ranks([sys.executable, "-c", PUSHES, fake.url, str(tmp_path)], 2)
    assert said[0] == said[1]
    assert "did not take the weights of version 4: it did not reset its prefix cache (['unexpected'])" in said[0]
    assert "did not take the weights of version 5: KeyError('no message')" in said[0]
