"""Rollouts by a vLLM server that the user started: token ids over HTTP, weights as rollout.transfer says.

What the server must be started with stands in SERVE. The key of VLLM_API_KEY, where it is set, is sent along, but vLLM
does not ask for it on the development endpoints: anyone who can reach the port can replace the weights, so the server
listens on this machine alone unless it is told otherwise.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlplus.common import activity, agree
from rlplus.common.kept_sets import KeptSets
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.answer_fields import BadAnswer, Field, metrics
from rlplus.train.rollout.http_engine import HttpEngine
from rlplus.train.rollout.library_push import LibraryPush
from rlplus.train.rollout.protocol import Completion, Request, Sampling
from rlplus.train.rollout.push import BACKEND, EXTENSION, rank
from rlplus.train.rollout.server_http import PATIENCE_S, RESTART, VLLM, Requests
from rlplus.train.rollout.server_push import Control, MemoryPush
from rlplus.train.rollout.vllm_engine import prompt_seeds
from rlplus.train.rollout.vllm_options import check_sampling, no_masks

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve {model} --host 127.0.0.1 --tokens-only --skip-tokenizer-init "
    "--generation-config vllm --logprobs-mode processed_logprobs --dtype {dtype} --max-model-len {length}"
)
FP32_HEAD = """ --hf-overrides '{"head_dtype": "float32"}'"""
WEIGHTS = ' --weight-transfer-config \'{"backend": "%s"}\''
PICKLED = "VLLM_ALLOW_INSECURE_SERIALIZATION=1 "  # vLLM asks for it where descriptions of GPU memory come by HTTP
GENERATE = "/inference/v1/generate"
TOKENS = "vllm:generation_tokens_total"  # a name in /metrics: grows with every token of every request
NO_LOGPROB = -9999.0  # the server writes it for NaN and for -inf


class ServerEngine(HttpEngine):
    """One server for all ranks. ValueError if none answers, or if it was not started so that logprobs are exact."""

    kind = VLLM

    def _begin(self, config: RolloutConfig, model_path: str, dtype: str) -> None:
        self._most_kept = config.top_k
        self._backend = BACKEND if config.transfer == "memory" else config.transfer
        self._needs_restart = self._backend != BACKEND  # vLLM's own ways do not repair a model
        serve = SERVE.format(model=model_path, dtype=dtype, length=self._max_model_len) + WEIGHTS % self._backend
        ways = {"memory": f"{serve} --worker-extension-cls {EXTENSION}", "ipc": PICKLED + serve}
        serve = ways.get(config.transfer, serve)
        if self._fp32_head:
            serve += FP32_HEAD
        self._check_server(dtype, f"{serve} --return-sampling-mask" if config.top_k else serve)
        self._connect(config, dtype, serve)

    def _connect(self, config: RolloutConfig, dtype: str, serve: str) -> None:
        """Agree with the server on how weights come; ValueError where it refuses, on all ranks."""
        # Half the time of the push's clock: the server's silence is then a failure that all ranks hear of.
        self._control = Control(self._http, config.push_timeout_s / 2)
        self._push: MemoryPush | LibraryPush | None = None
        bucket = config.push_bucket_mb * 2**20
        failed = ""
        try:
            if config.transfer != "memory":
                if self._control.paused():
                    raise OSError(f"it is paused, as after a push that failed half-way. {RESTART}")
                self._push = LibraryPush(config.transfer, self._control, self._shapes, dtype, bucket)
            elif rank() == 0:
                self._push = MemoryPush(self._control, self._shapes, bucket)
        except Exception as error:  # whatever it is: the other ranks wait for word of it
            failed = str(error) if isinstance(error, OSError) else repr(error)
        if dist.is_initialized():
            failed = max(agree.gathered(failed))
        if failed:
            if self._push is not None:
                self._push.close()
            raise ValueError(f"want at {self._url} a server for this run's weights, started with: {serve}; {failed}")

    def _check_server(self, dtype: str, serve: str) -> None:
        want = f"want at {self._url} a server started with: {serve}"
        try:
            info = self._http.ask("GET", "/server_info?config_format=json", timeout_s=PATIENCE_S)
            self._tokens()
            problems, self._most = self._problems(info["vllm_config"], dtype)
        except OSError as error:
            raise ValueError(f"{want}, vLLM 0.32; {error}") from error
        if problems:
            raise ValueError(f"{want}; {'; '.join(problems)}")

    def _problems(self, info: Field, dtype: str) -> tuple[list[str], int]:
        """The settings that keep the server from being exact, and its limit of responses per prompt."""
        model = info["model_config"]
        scheduler = info["scheduler_config"]
        problems = []
        if (mode := model["logprobs_mode"].value) != "processed_logprobs":
            problems.append(f"it gives {mode}, which ignore the temperature")
        if not model["skip_tokenizer_init"].a(bool):
            problems.append("it has a tokenizer, and with it stop strings and limits of its own")
        if (its := model["dtype"].a(str)).removeprefix("torch.") != dtype:
            problems.append(f"its dtype is {its}")
        if self._fp32_head and _member(model, "hf_overrides", "head_dtype") != "float32":
            problems.append(f"its logits are {dtype}, which the trainer's are not (or want rollout.head_dtype model)")
        masks = bool(model.get("return_sampling_mask").value)
        if self._most_kept and not masks:
            problems.append(no_masks(self._most_kept, "a server without --return-sampling-mask"))
        if masks and not self._most_kept:
            problems.append("with --return-sampling-mask it refuses the whole vocabulary (rollout.top_k 0)")
        if (takes := _member(info, "weight_transfer_config", "backend")) != self._backend:
            problems.append(f"its way of taking weights is {takes}; want {self._backend}, for rollout.transfer")
        if self._backend == BACKEND and info["parallel_config"]["worker_extension_cls"].value != EXTENSION:
            problems.append(f"its workers do not know {EXTENSION}")
        if (length := model["max_model_len"].a(int)) < self._max_model_len:
            problems.append(f"its sequences have at most {length} tokens")
        if info["device_config"]["device"].value == "cpu" and scheduler["enable_chunked_prefill"].a(bool):
            problems.append("on the CPU vLLM fails on a seeded prompt in two parts: --no-enable-chunked-prefill")
        return problems, scheduler["max_num_seqs"].a(int)

    def _params(self, requests: Sequence[Request], sampling: Sampling) -> list[dict[str, Any]]:
        check_sampling(sampling, self._most_kept)
        if (most := max((request.n for request in requests), default=0)) > self._most:
            raise ValueError(f"want at most {self._most} responses a prompt (the server's --max-num-seqs); got {most}")
        return [
            {
                "n": request.n if sampling.temperature else 1,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "max_tokens": request.max_tokens,
                "seed": seed,
                "logprobs": 0,
                "ignore_eos": True,
                "stop_token_ids": [*self._ends, *sampling.stop],
                "detokenize": False,
            }
            for request, seed in zip(requests, prompt_seeds(requests, sampling.seed), strict=True)
        ]

    def _tokens(self) -> float:
        """Generated by the server so far, for whomever; OSError where it does not tell."""
        found = metrics(self._http.send("GET", "/metrics", timeout_s=PATIENCE_S), (TOKENS,))
        if not found:
            raise OSError(f"want {TOKENS} in GET /metrics, which --disable-log-stats leaves out; got none")
        return found[TOKENS]

    def _ask(self, http: Requests, prompt: Sequence[int], params: dict[str, Any]) -> list[Completion]:
        most = self._most_bytes(params["n"] * params["max_tokens"], self._most_kept)
        asked = {"token_ids": list(prompt), "sampling_params": params}
        choices = http.ask("POST", GENERATE, asked, most=most)["choices"]
        placed = {choice["index"].a(int): choice for choice in choices.items()}
        if (wanted := [*range(params["n"])]) != sorted(placed) or len(choices.value) != len(wanted):
            raise BadAnswer(f"{choices}: want {len(wanted)} with index {wanted}; got {choices.column('index')}")
        completions = [self._completion(placed[index]) for index in wanted]
        activity.rollouts.add(len(completions), sum(len(each.tokens) for each in completions))
        return completions

    def _completion(self, choice: Field) -> Completion:
        if (ended := choice["finish_reason"]).value not in ("stop", "length"):
            raise ended.wrong("stop or length")
        self._check_versions(choice["weight_versions"])
        tokens = choice["token_ids"].a(list)
        told = choice["logprobs"]["content"]
        if (named := told.column("token_id")) != tokens[: len(named)]:
            raise BadAnswer(
                f"{told}: want logprobs of the tokens {tokens[:8]!r:.80} ...; got those of {named[:8]!r:.80} ..."
            )
        logprob = [
            -math.inf if isinstance(value, (int, float)) and value <= NO_LOGPROB else value
            for value in told.column("logprob")
        ]
        return Completion([*tokens], logprob, ended.value == "length", kept=_kept(choice.get("sampling_mask")))

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        if self._push is not None:
            self._push.send(weights, version)

    def _stop_pushing(self) -> bool:
        if self._push is None:
            return False
        self._push.close()
        return True


def _member(info: Field, table: str, name: str) -> Any:
    """The value of a setting in a table of settings, None without either."""
    found = info.get(table)
    return None if found.value is None else found.get(name).value


def _kept(mask: Field) -> KeptSets | None:
    """The tokens that were kept; None where the server has no masks."""
    if mask.value is None:
        return None
    try:
        return KeptSets.of(each.a(list) for each in mask.items())
    except (TypeError, OverflowError) as error:
        raise mask.wrong("lists of token ids") from error
