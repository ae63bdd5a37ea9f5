"""Rollouts by a vLLM server that somebody else started: token ids over HTTP, weights through a folder both can see.

What the server must be started with stands in SERVE. The development endpoints are those that replace weights: whoever
reaches the port can do so, so keep it inside the cluster.
"""

import http.client
import json
import math
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from rlplus.config import RolloutConfig
from rlplus.rollout.protocol import Completion, RunFailed, check_logprobs, check_request
from rlplus.rollout.push import WeightFiles, parameter_shapes, watched
from rlplus.rollout.vllm import prompt_seeds

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --skip-tokenizer-init --generation-config vllm "
    "--logprobs-mode processed_logprobs --dtype {dtype} --max-model-len {length}"
)
CONNECTIONS = 64  # prompts at a time from each rank; the server batches what it has
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # a dead host shows in 30 s
NO_LOGPROB = -9999.0  # what the server writes for NaN and for -inf


class ServerEngine:
    """One server for all ranks. ValueError: it is not there, or not started so that tokens and logprobs are exact."""

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        eos_token_id: int,
        trust_remote_code: bool = False,
        config_path: str | None = None,
    ) -> None:
        assert config.server_url is not None
        self._url = config.server_url.rstrip("/")
        self._shapes, self._vocabulary = parameter_shapes(
            config_path or model_path, trust_remote_code=trust_remote_code
        )
        self._max_model_len, self._eos = max_model_len, eos_token_id
        self._timeout_s = config.push_timeout_s
        self._version: int | None = None
        self._failure: str | None = "the server may hold any weights: push before generating"
        self.name = f"vllm at {self._url}"
        self._check_server(dtype, SERVE.format(dtype=dtype, length=max_model_len))
        self._files: WeightFiles | None = WeightFiles(config.push_folder, config.push_bucket_mb, per_node=False)

    def _check_server(self, dtype: str, serve: str) -> None:
        want = f"want at {self._url} a server started with: {serve}"
        try:
            info = json.loads(self._request("GET", "/server_info?config_format=json", timeout_s=60))["vllm_config"]
        except OSError as error:
            raise ValueError(f"{want}; {error}") from error
        try:
            problems, self._most = self._problems(info, dtype)
        except KeyError as error:
            raise ValueError(f"{want}, vLLM 0.32; what is there tells nothing of {error}") from error
        if problems:
            raise ValueError(f"{want}; {'; '.join(problems)}")

    def _problems(self, info: dict[str, Any], dtype: str) -> tuple[list[str], int]:
        """What keeps the server from being exact, and its limit of responses a prompt."""
        model, scheduler = info["model_config"], info["scheduler_config"]
        problems = []
        if model["logprobs_mode"] != "processed_logprobs":
            problems.append(f"it gives {model['logprobs_mode']}, which ignore the temperature")
        if not model["skip_tokenizer_init"]:
            problems.append("it has a tokenizer, and with it stop strings and limits of its own")
        if str(model["dtype"]).removeprefix("torch.") != dtype:
            problems.append(f"its dtype is {model['dtype']}")
        if model["max_model_len"] < self._max_model_len:
            problems.append(f"its sequences have at most {model['max_model_len']} tokens")
        if info["device_config"]["device"] == "cpu":
            if scheduler["enable_chunked_prefill"]:
                problems.append("on the CPU vLLM fails on a seeded prompt in two parts: --no-enable-chunked-prefill")
            if "lm_head.weight" not in self._shapes:
                problems.append("on the CPU a server cannot renew a tied head: untie it, or want rollout.mode process")
        return problems, int(scheduler["max_num_seqs"])

    def generate(
        self, prompts: Sequence[Sequence[int]], n: Sequence[int], *, temperature: float, max_tokens: int, seed: int
    ) -> list[list[Completion]]:
        if self._failure:
            raise RuntimeError(self._failure)
        check_request(
            prompts,
            n,
            temperature=temperature,
            max_tokens=max_tokens,
            max_model_len=self._max_model_len,
            vocabulary=self._vocabulary,
        )
        if max(n, default=0) > self._most:
            raise ValueError(
                f"want at most {self._most} responses a prompt (the server's --max-num-seqs); got {max(n)}"
            )
        seeds = prompt_seeds(n, seed)

        def ask(i: int) -> list[Completion]:
            if not n[i]:
                return []
            params = {
                "n": n[i] if temperature else 1,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": 0,
                "max_tokens": max_tokens,
                "seed": seeds[i],
                "logprobs": 0,
                "ignore_eos": True,
                "stop_token_ids": [self._eos],
                "detokenize": False,
            }
            body = {"token_ids": list(prompts[i]), "sampling_params": params}
            answer = json.loads(self._request("POST", "/inference/v1/generate", body))
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != params["n"]:
                raise RunFailed(f"want {params['n']} responses from {self.name}; got {len(choices)}")
            samples = [self._completion(choice) for choice in choices]
            return samples if temperature else samples * n[i]

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            try:
                return check_logprobs(list(pool.map(ask, range(len(prompts)))))
            except OSError as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise RunFailed(
                    f"{self.name} did not answer: {error}. Start it again, and the run with --resume"
                ) from error

    def _completion(self, choice: dict[str, Any]) -> Completion:
        if choice["finish_reason"] not in ("stop", "length"):
            raise RunFailed(f"{self.name} ended a response with {choice['finish_reason']}: want stop or length")
        versions = {span["version"] for span in choice["weight_versions"] or []}
        if versions != {str(self._version)}:
            raise RunFailed(
                f"{self.name} generated with the weights of {sorted(versions)}; want those of {self._version}. "
                "Does another run push to this server?"
            )
        logprob = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        finite = [-math.inf if value <= NO_LOGPROB else value for value in logprob]
        return Completion(choice["token_ids"], finite, choice["finish_reason"] == "length")

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._files is None:
            raise RuntimeError(self._failure)
        self._failure = f"the push of version {version} failed half-way: push a whole model before generating"
        with watched(weights, self._shapes, version=version, timeout_s=self._timeout_s) as checked:
            self._files.write(checked)
        failed: list[str | None] = [None]
        if self._files.leader:
            try:
                self._load(version)
            except (OSError, RunFailed) as error:
                failed = [str(error)]
        if dist.is_initialized():
            dist.broadcast_object_list(failed, src=0)  # which also keeps the others from generating too early
        if failed[0]:
            raise RunFailed(f"{self.name} did not take the weights of version {version}: {failed[0]}")
        self._version, self._failure = version, None

    def _load(self, version: int) -> None:
        assert self._files is not None
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._files.folder)}}
        self._request("POST", "/collective_rpc", reload, timeout_s=self._timeout_s)
        if not json.loads(self._request("POST", "/reset_prefix_cache", timeout_s=self._timeout_s))["success"]:
            raise RunFailed("it did not reset its prefix cache; does somebody else use it?")
        self._request("POST", "/update_weight_version", {"new_version": str(version)}, timeout_s=self._timeout_s)

    def sleep(self) -> None:
        """Stays awake: it has its GPUs to itself."""

    def close(self) -> None:
        """The server stays, with the last weights."""
        self._failure = "the engine is closed"
        if self._files is not None:
            self._files.close()
            self._files = None

    def _request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """The answer's body; OSError where none comes, or another status than 200."""
        url = urlsplit(self._url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.netloc, timeout=timeout_s)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            headers = {"Content-Type": "application/json"}
            connection.request(method, url.path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise OSError(f"{method} {path} was answered with {response.status}: {text.decode(errors='replace')[:500]}")
        return text
