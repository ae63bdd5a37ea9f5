"""A teacher behind a vLLM server: how likely it finds the tokens of responses, and which it finds likelier."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.data import MicroBatch, Sample, load_tokenizer
from rlplus.errors import SharedFailure
from rlplus.learner.policy import Policy
from rlplus.rollout.server_http import PATIENCE_S, Requests, parsed, split

KEY = "algorithm.recipe.teacher_url"
LIMIT = "rollout.progress_timeout_s"
CONNECTIONS = 16  # responses at a time from each rank; the server batches what it has
DECODED = 4096  # tokens at a time by which tokenizers are compared
ROUNDING = 1e-3  # largest error of a sum of probabilities

# vLLM's for each token of a prompt: by the number of a token, its logprob and more.
Told = Mapping[str, Mapping[str, Any]]


class ServedTeacher:
    """The model of a server started with `vllm serve MODEL`, which each rank asks about its own samples.

    k: likeliest tokens at each place; 0 = only how likely the response's own are. model_path: the policy's, for its
    tokenizer. ValueError if no server answers, or if its model cannot teach the policy.
    """

    def __init__(self, url: str, k: int, policy: Policy, model_path: str) -> None:
        self._k, self._timeout_s = k, policy.config.rollout.progress_timeout_s
        self._http = Requests(split(url, KEY), key=KEY)
        self._rows = policy.model_config.get_text_config(decoder=True).vocab_size
        self.name = f"the teacher at {self._http.url.geturl()}"
        want = f"want at {url} a server started with: vllm serve MODEL"
        try:
            served = parsed(self._http.send("GET", "/v1/models", timeout_s=PATIENCE_S))["data"][0]
            self._model, self.fingerprint, longest = served["id"], str(served["root"]), int(served["max_model_len"])
            differing = self._differing(load_tokenizer(policy.config.model, model_path), min(longest - 1, DECODED))
        except OSError as error:
            raise ValueError(f"{KEY}: {want}; {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{KEY}: {want}, whose answers are vLLM's; got none of {error!r}") from error
        if differing:
            raise ValueError(f"{KEY}: want a teacher whose tokenizer has the policy's tokens; {self.name} {differing}")
        if longest <= (sample := policy.config.max_sample_length):
            got = f"want --max-model-len {sample + 1} or more, for prompt, response and a token; got {longest}"
            raise ValueError(f"{KEY}: {got}")

    def _differing(self, tokenizer: Any, most: int) -> str:
        """How the server's tokenizer differs, "" if it reads every token of this one alike. most: tokens at a time."""
        known = sorted(tokenizer.get_vocab().values())
        for start in range(0, len(known), most):
            tokens = known[start : start + most]
            body = {"model": self._model, "tokens": tokens}
            read = parsed(self._http.send("POST", "/detokenize", body, PATIENCE_S))["prompt"]
            if read != tokenizer.decode(tokens):
                return f"reads other texts in those from {tokens[0]} to {tokens[-1]}"
        return ""

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """log p (T,) of the tokens of each sample's response, at temperature 1. Collective."""
        return [own for own, _ in self._asked(samples)]

    def show(self, samples: Sequence[Sample]) -> None:
        """Give each sample its `teacher_topk`, in the order of probability. Collective."""
        for sample, (_, topk) in zip(samples, self._asked(samples), strict=True):
            sample.teacher_topk = topk

    def head(self, batch: MicroBatch) -> dict[str, Any]:
        """The teacher's arguments of `linear_divergence`. A rank's dummy, which counts for nothing, has any."""
        if batch.teacher_topk is None:
            assert not batch.token_weight.any(), "want samples that the teacher was shown"
            one = batch.target.new_zeros(len(batch.target), 1)
            return {"teacher_topk": (one, one.float())}
        return {"teacher_topk": batch.teacher_topk}

    def _asked(self, samples: Sequence[Sample]) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """SharedFailure, on all ranks, if the server does not answer one of them, or not as vLLM does."""
        found, failure = [], None
        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            found = [*pool.map(self._ask, samples)]
        except (OSError, ValueError) as error:
            failure = error
        finally:
            pool.shutdown(cancel_futures=True)
        if text := agree.failures(failure, clear=(OSError, ValueError)):
            raise SharedFailure(f"{self.name} did not answer: {text}")
        return found

    def _ask(self, sample: Sample) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tokens = [*sample.prompt, *sample.response]
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._k}
        answer = parsed(self._http.send("POST", "/v1/completions", body, self._timeout_s, LIMIT))
        try:
            told = answer["choices"][0]["prompt_logprobs"][len(sample.prompt) :]
            read = [self._read(each, token) for each, token in zip(told, sample.response, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"want vLLM's prompt_logprobs of {len(tokens)} tokens; got {error!r}") from error
        own, numbers, logprobs = zip(*read, strict=True)
        topk = (torch.tensor(numbers, dtype=torch.int32), torch.tensor(logprobs, dtype=torch.float32))
        return torch.tensor(own, dtype=torch.float32), topk

    def _read(self, told: Told, token: int) -> tuple[float, list[int], list[float]]:
        """A place: the token's own logprob, and the k likeliest tokens with theirs. vLLM adds the token to them."""
        known = {int(number): float(each["logprob"]) for number, each in told.items()}
        own = known[token] if len(known) <= self._k else known.pop(token)
        if len(known) != self._k:
            raise ValueError(f"{len(known)} likeliest tokens; want {self._k}")
        if not (math.isfinite(own) and own <= ROUNDING and sum(map(math.exp, known.values())) <= 1 + ROUNDING):
            raise ValueError(f"logprobs of token {token} and its rivals that are none: {own}, {known}")
        if known and not 0 <= min(known) <= max(known) < self._rows:
            raise ValueError(f"token {max(known)}; the policy's head has {self._rows} rows")
        order = sorted(known, key=lambda number: -known[number])
        return own, order, [min(0.0, known[number]) for number in order]
