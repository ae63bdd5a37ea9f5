"""Rollouts by an SGLang server that the user started: token ids over HTTP, weights through a folder that both can read.

The folder of a push has a random name, and only this user can look into it: the server must run as this user, or root.
What the server must be started with stands in SERVE. The key of SGLANG_API_KEY, where it is set, is sent along. Anyone
who can reach the port can replace the weights; SGLang listens on this machine alone unless it is told otherwise.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlplus.common import activity
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.answer_fields import BadAnswer, Field, metrics
from rlplus.train.rollout.http_engine import HttpEngine
from rlplus.train.rollout.protocol import Completion, Request, Sampling
from rlplus.train.rollout.push import rank
from rlplus.train.rollout.server_http import PATIENCE_S, SGLANG, Requests
from rlplus.train.rollout.server_push import TIMEOUT
from rlplus.train.rollout.vllm_engine import prompt_seeds
from rlplus.train.rollout.weights_folders import WeightsFolders

SERVE = (
    "sglang serve --model-path {model} --skip-tokenizer-init --enable-metrics --dtype {dtype} --context-length {length}"
)
FP32_HEAD = " --enable-fp32-lm-head"
# Names in /metrics: the tokens of requests that have ended, and those in the cache, which grow with those under way.
TOKENS = ("sglang:generation_tokens_total", "sglang:num_used_tokens")
SHARD_BYTES = 2 * 2**30
SPARE = 6  # tokens of --context-length that SGLang keeps from prompt and response


class SGLangEngine(HttpEngine):
    """One server for all ranks. ValueError if none answers, or if it was not started so that logprobs are exact.

    SGLang ends a response at each end token of the model's own files. Where that is none of the run's, the response
    goes on in another request, so that a response ends as with the other engines.
    """

    kind = SGLANG

    def _begin(self, config: RolloutConfig, model_path: str, dtype: str) -> None:
        assert config.weights_folder is not None
        place = self._http.url.netloc.replace(":", "-")  # servers may share the folder
        self._folders = WeightsFolders(Path(config.weights_folder), f"rlplus-weights-{place}-")
        serve = SERVE.format(model=model_path, dtype=dtype, length=self._max_model_len + SPARE)
        self._check_server(dtype, serve + FP32_HEAD if self._fp32_head else serve)

    def _check_server(self, dtype: str, serve: str) -> None:
        want = f"want at {self._url} a server started with: {serve}"
        try:
            problems = self._problems(self._http.ask("GET", "/server_info", timeout_s=PATIENCE_S), dtype)
            self._tokens()
        except OSError as error:
            raise ValueError(f"{want}, SGLang 0.5; {error}") from error
        if problems:
            raise ValueError(f"{want}; {'; '.join(problems)}")

    def _problems(self, info: Field, dtype: str) -> list[str]:
        """The settings that keep the server from being exact."""
        problems = []
        if not info["skip_tokenizer_init"].a(bool):
            problems.append("it has a tokenizer, and with it stop strings and limits of its own")
        if (its := info["dtype"].a(str)) != dtype:
            problems.append(f"its dtype is {its}")
        if self._fp32_head and not info["enable_fp32_lm_head"].a(bool):
            problems.append(f"its logits are {dtype}, which the trainer's are not (or want rollout.head_dtype model)")
        length = info["context_length"]
        if length.value is None or length.a(int) < self._max_model_len + SPARE:
            problems.append(f"its --context-length is {length.value}")
        for name in ("allow_auto_truncate", "speculative_algorithm", "preferred_sampling_params"):
            if set_to := info.get(name).value:
                problems.append(f"it has --{name.replace('_', '-')} {set_to}, with which responses are others")
        return problems

    def _params(self, requests: Sequence[Request], sampling: Sampling) -> list[dict[str, Any]]:
        if sampling.top_k:
            raise ValueError(f"want top_k 0, the whole vocabulary, from an SGLang server; got {sampling.top_k}")
        common = {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": [*self._ends, *sampling.stop],
        }
        return [  # seeds count where the server runs with --enable-deterministic-inference
            common | {"max_new_tokens": request.max_tokens, "sampling_seed": seed, "n": request.n}
            for request, seed in zip(requests, prompt_seeds(requests, sampling.seed), strict=True)
        ]

    def _ask(self, http: Requests, prompt: Sequence[int], params: dict[str, Any]) -> list[Completion]:
        greedy = not params["temperature"]
        limit = params["max_new_tokens"]
        seed = params["sampling_seed"]
        responses = [Completion([], [], True) for _ in range(1 if greedy else params["n"])]
        left = list(range(len(responses)))
        while left:
            body = {
                "input_ids": [[*prompt, *responses[i].tokens] for i in left],
                "sampling_params": [
                    params | {"n": 1, "max_new_tokens": limit - len(responses[i].tokens), "sampling_seed": seed + i}
                    for i in left
                ],
                "return_logprob": True,
            }
            answers = http.ask("POST", "/generate", body, most=self._most_bytes(len(left) * limit)).items()
            if len(answers) != len(left):
                raise BadAnswer(f"POST /generate: want {len(left)} responses; got {len(answers)}")
            for i, answer in zip(left, answers, strict=True):
                left_over = limit - len(responses[i].tokens)
                responses[i] = self._continued(responses[i], answer["meta_info"], params["stop_token_ids"], left_over)
            left = [i for i in left if responses[i].truncated and len(responses[i].tokens) < limit]
        activity.rollouts.add(len(responses), sum(len(each.tokens) for each in responses))
        return responses

    def _continued(self, before: Completion, meta: Field, stops: Sequence[int], most: int) -> Completion:
        """A response with the tokens of an answer; `truncated` until it has come to a stop token of the run."""
        finish = meta["finish_reason"]
        ended = finish["type"].value
        matched = finish.get("matched").value
        if ended not in ("stop", "length") or isinstance(matched, str):  # a text: "NaN happened"
            raise BadAnswer(f"{finish}: ended a response with {ended!s:.50}, {matched!s:.50}: want stop or length")
        self._check_versions(meta["weight_versions"])
        drawn = meta["output_token_logprobs"]  # (logprob, token, no text); `output_ids` lack a stop token
        if not drawn.value:
            raise BadAnswer(f"{drawn}: answered without a token")
        tokens = drawn.column(1)
        if (length := len(tokens)) > most or (ended == "length" and length < most):
            raise BadAnswer(f"{drawn}: ended a response with {ended}: want {most} tokens; got {length}")
        if ended == "stop" and matched != tokens[-1]:
            raise BadAnswer(
                f"{finish}: ended a response with stop: want the last token {tokens[-1]!s:.50} as its reason; "
                f"got {matched!s:.50}"
            )
        logprob = [-math.inf if value is None else value for value in drawn.column(0)]  # JSON has no infinity
        return Completion(before.tokens + tokens, before.logprob + logprob, tokens[-1] not in stops)

    def _tokens(self) -> float:
        found = metrics(self._http.send("GET", "/metrics", timeout_s=PATIENCE_S), TOKENS)
        if TOKENS[1] not in found:
            raise OSError(f"want {TOKENS[1]} in GET /metrics, which --enable-metrics turns on; got none")
        return sum(found.values())

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        if rank() > 0:
            return
        self._folders.clear()  # a run that was killed left its own
        folder = self._folders.new()
        for number, shard in enumerate(_shards(weights)):
            save_file(shard, folder / f"model-{number:05d}.safetensors")
        body = {"model_path": str(folder), "weight_version": str(version)}
        limit_s = self._timeout_s / 2
        answer = self._http.ask("POST", "/update_weights_from_disk", body, timeout_s=limit_s, setting=TIMEOUT)
        if not answer["success"].a(bool):
            raise OSError(f"{answer.request}: {answer.value!r:.500}")
        self._folders.clear()

    def _stop_pushing(self) -> bool:
        """After a push that failed its files stay: the server may still read them, and the next push removes them."""
        return rank() == 0


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies in this machine's memory, about SHARD_BYTES at a time."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        if shard and size + weight.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
            size = 0
        shard[name] = torch.empty_like(weight, device="cpu", memory_format=torch.contiguous_format).copy_(weight)
        size += weight.nbytes
    yield shard
