"""A teacher behind a vLLM server: how likely it finds the tokens of responses, and which it finds likelier."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from rlplus.common import agree
from rlplus.common.errors import SharedFailure
from rlplus.common.http_limits import MOST_BYTES
from rlplus.train.data import MicroBatch, Sample, load_tokenizer
from rlplus.train.learner.policy import Policy
from rlplus.train.rollout.answer_fields import BadAnswer
from rlplus.train.rollout.server_http import PATIENCE_S, TEACHER, Requests, split

KEY = TEACHER.url
LIMIT = "rollout.progress_timeout_s"
CONNECTIONS = 16  # responses at a time from each rank; the server batches what it has
BYTES_PER_LOGPROB = 256  # most JSON, on average, for a token with its logprob, rank and text
DECODED = 4096  # tokens at a time by which tokenizers are compared
TOLERANCE = 1e-3  # largest logprob above 0, and largest excess of a sum of probabilities over 1
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

Told = Mapping[str, Mapping[str, Any]]  # vLLM's of a place: by the number of a token its logprob and more


def given_topk(batch: MicroBatch) -> dict[str, Any]:
    """The teacher's arguments of `linear_divergence`. A rank's dummy, which counts for nothing, has any."""
    if batch.teacher_topk is None:
        assert not batch.token_weight.any(), "want samples with a teacher's tokens"
        one = batch.target.new_zeros(len(batch.target), 1)
        return {"teacher_topk": (one, one.float())}
    return {"teacher_topk": batch.teacher_topk}


class GivenTeacher:
    """The teacher whose likeliest tokens are a column of the data, beside the demonstrations."""

    name = "data.teacher_topk"
    fingerprint = None  # the data have one of their own

    def head(self, batch: MicroBatch) -> dict[str, Any]:
        """A `Teach` of the likeliest tokens."""
        return given_topk(batch)


class ServedTeacher:
    """The model of a server started with `vllm serve MODEL`, which each rank asks about its own samples.

    k: likeliest tokens at each place; 0 = only how likely the response's own are. model_path: the policy's, for its
    tokenizer. ValueError if no server answers, or if its model cannot teach the policy.
    """

    def __init__(self, url: str, k: int, policy: Policy, model_path: str) -> None:
        # More are asked for than used: in a larger head than the policy's, rows may be among them that are no token.
        self._k = k
        self._told = k + -(-k // 4)
        self._timeout_s = policy.config.rollout.progress_timeout_s
        self._url = split(url, TEACHER)
        self.name = f"the teacher at {url}"
        self._rows = policy.model_config.get_text_config(decoder=True).vocab_size
        want = f"{KEY}: want at {url} a server started with: vllm serve MODEL"
        http = Requests(self._url, TEACHER)
        try:
            served = http.ask("GET", "/v1/models", timeout_s=PATIENCE_S)["data"][0]
            self._model = served["id"].a(str)
            self.fingerprint = str(served["root"].value)
            longest = served["max_model_len"].a(int)
            differing = self._differing(
                http, load_tokenizer(policy.config.model, model_path), min(longest - 1, DECODED)
            )
            self._ask(http, [0, 0], 1)
        except OSError as error:
            more = f" (and --max-logprobs {self._told})" if self._told > 20 else ""  # vLLM's default
            raise ValueError(f"{want}{more}; {error}") from error
        if differing:
            raise ValueError(f"{KEY}: want a teacher whose tokenizer has the policy's tokens; {self.name} {differing}")
        if longest <= (sample := policy.config.max_sample_length):
            got = f"want --max-model-len {sample + 1} or more, for prompt, response and a token; got {longest}"
            raise ValueError(f"{KEY}: {got}")

    def _differing(self, http: Requests, tokenizer: Any, most: int) -> str:
        """How the server's tokenizer differs, "" if it reads the tokens of this one, `most` at a time, as the same."""
        known = sorted(tokenizer.get_vocab().values())
        for start in range(0, len(known), most):
            tokens = known[start : start + most]
            body = {"model": self._model, "tokens": tokens}
            read = http.ask("POST", "/detokenize", body, PATIENCE_S)["prompt"]
            if read.a(str) != tokenizer.decode(tokens):
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
        """A `Teach` of the likeliest tokens."""
        return given_topk(batch)

    def _asked(self, samples: Sequence[Sample]) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """SharedFailure, on all ranks, if the server does not answer one of them, or not as vLLM does."""
        found = []
        failure = None
        http = Requests(self._url, TEACHER)
        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            asked = [pool.submit(self._ask, http, [*s.prompt, *s.response], len(s.prompt)) for s in samples]
            wait(asked, return_when=FIRST_EXCEPTION)
            found = [each.result() for each in asked if each.done()]
        except (OSError, ValueError) as error:
            failure = error
        finally:
            http.hang_up()  # requests under way are not waited for
            pool.shutdown(cancel_futures=True)
        if text := agree.failures(failure, clear=(OSError, ValueError)):
            raise SharedFailure(f"{self.name} did not answer: {text}")
        return found

    def _ask(self, http: Requests, tokens: Sequence[int], prompt: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logprobs (T,) of the tokens behind the first `prompt` ones, and the likeliest there with theirs (T, k)."""
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        body["prompt_logprobs"] = self._told
        most = MOST_BYTES + len(tokens) * (self._told + 1) * BYTES_PER_LOGPROB
        answer = http.ask("POST", "/v1/completions", body, self._timeout_s, LIMIT, most)
        told = answer["choices"][0]["prompt_logprobs"]
        try:
            read = [self._read(each, token) for each, token in zip(told.a(list)[prompt:], tokens[prompt:], strict=True)]
        except MALFORMED as error:
            raise BadAnswer(f"{told}: want vLLM's of {len(tokens)} tokens; got {error!r:.500}") from error
        own, numbers, logprobs = zip(*read, strict=True)
        topk = (torch.tensor(numbers, dtype=torch.int32), torch.tensor(logprobs, dtype=torch.float32))
        return torch.tensor(own, dtype=torch.float32), topk

    def _read(self, told: Told, token: int) -> tuple[float, list[int], list[float]]:
        """A place: the token's own logprob, and the k likeliest tokens with theirs. vLLM adds the token to them."""
        known = {int(number): float(each["logprob"]) for number, each in told.items()}
        own = known[token] if len(known) <= self._told else known.pop(token)
        if len(known) != self._told:
            raise ValueError(f"{len(known)} likeliest tokens; want {self._told}")
        if not (math.isfinite(own) and own <= TOLERANCE and sum(map(math.exp, known.values())) <= 1 + TOLERANCE):
            raise ValueError(f"numbers that are no logprobs: {own} of token {token}, {known}")
        able = sorted((n for n in known if 0 <= n < self._rows), key=lambda n: -known[n])[: self._k]
        if len(able) < self._k:
            raise ValueError(f"{len(known)} tokens, of which the policy's head has {len(able)}; want {self._k}")
        return own, able, [min(0.0, known[n]) for n in able]
