"""SGLang servers for tests: one that only looks like it, and the real one on the CPU."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zlib import crc32

from local_http import Handler
from processes import free_port
from rollout_models import EOS, MAX_MODEL_LEN, VOCABULARY
from safetensors.torch import load_file
from servers import Server

OTHER_END = 20  # only generation_config.json names it


def next_token(tokens: Sequence[int]) -> int:
    """The stub's model."""
    return crc32(repr([3, *tokens]).encode()) % VOCABULARY


def whole_response(prompt: Sequence[int], limit: int, stops: Sequence[int] = (EOS,)) -> list[int]:
    """The response that ends at a stop token alone."""
    tokens: list[int] = []
    while len(tokens) < limit and not (tokens and tokens[-1] in stops):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


class FakeSGLang:
    """Answers as SGLang 0.5.23 does. `info`, `finish` (a reason) and the `odd` answers of paths can be changed."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enable_fp32_lm_head": False,
            "context_length": MAX_MODEL_LEN + 6,
        }
        self.version, self.finish = "default", ""
        self.matched: str | None = None
        self.odd: dict[str, tuple[int, Any]] = {}
        self.asked: list[Any] = []
        self.loaded: list[dict[str, Any]] = []  # each file's weights
        self.keys: set[str | None] = set()
        self.pushed: list[Any] = []
        self.modes: list[int] = []  # the folders' permissions
        server = self

        class Asked(Handler):
            def do_GET(self) -> None:
                server.keys.add(self.headers.get("Authorization"))
                status, answer = server.answer(self.path, json.loads(self.body() or "null"))
                self.answer(answer.encode() if isinstance(answer, str) else answer, status)

            do_POST = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path in self.odd:
            return self.odd[path]
        if path == "/server_info":
            return 200, self.info
        if path == "/metrics":
            return 200, 'sglang:num_used_tokens{tp_rank="0"} 7.0\nsglang:generation_tokens_total{a="b"} 40.0\n'
        if path == "/update_weights_from_disk":
            self.pushed.append(body)
            self.modes.append(Path(body["model_path"]).stat().st_mode & 0o777)
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            self.loaded, self.version = [load_file(file) for file in files], body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/generate":
            self.asked.append(body)
            for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True):
                assert len(ids) < self.info["context_length"] - 6, "SGLang refuses the input"
                assert params["max_new_tokens"] <= self.info["context_length"] - 2 - len(ids), "SGLang cuts it"
            return 200, [self.generated(*each) for each in zip(body["input_ids"], body["sampling_params"], strict=True)]
        return 404, {"detail": "Not Found"}

    def generated(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        ends = {EOS, OTHER_END, *params["stop_token_ids"]}
        tokens = whole_response(prompt, params["max_new_tokens"], list(ends))
        reason = self.finish or ("stop" if tokens[-1] in ends else "length")
        matched = tokens[-1] if reason == "stop" and self.matched is None else self.matched
        return {
            "output_ids": tokens[:-1] if reason == "stop" else tokens,
            "meta_info": {
                "finish_reason": {"type": reason, "matched": matched},
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                "output_token_logprobs": [[-token / 8, token, None] for token in tokens],
            },
        }


class RealSGLang(Server):
    """The real one, by an interpreter that has it."""

    def __init__(self, python: str, model: Path, log: Path, length: int, key: str) -> None:
        super().__init__(model, log, length)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        exact = f"--skip-tokenizer-init --enable-metrics --dtype float32 --context-length {length + 6}"  # SERVE
        on_cpu = "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule"
        place = ["--model-path", str(model), "--port", str(self.port), "--api-key", key, "--max-total-tokens", "8192"]
        self.command = [python, "-m", "sglang.launch_server", *place, *exact.split(), *on_cpu.split()]
        self.environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": ""}
        self.environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        assert sys.executable != python, "SGLang wants other versions of what rlplus needs"
