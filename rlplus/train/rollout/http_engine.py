"""The parts that engines on servers share: parallel requests, limits without progress, failures told to all ranks."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlplus.common import activity, agree
from rlplus.common.errors import RunFailed
from rlplus.common.http_limits import MOST_BYTES
from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.answer_fields import BadAnswer, Field
from rlplus.train.rollout.protocol import Completion, Request, Sampling, check_requests, check_responses
from rlplus.train.rollout.push import parameter_shapes, watched
from rlplus.train.rollout.server_http import PATIENCE_S, RESTART, Kind, Refused, Requests, split

BYTES_PER_TOKEN = 512  # most JSON for a token with its logprob
BYTES_PER_KEPT = 16  # most JSON for a token that was kept
CONNECTIONS = 64  # prompts at a time from each rank; the server batches what it has

logger = logging.getLogger(__name__)


class HttpEngine(ABC):
    """One server for all ranks, which the user started."""

    kind: Kind

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        end_ids: Sequence[int],
        trust_remote_code: bool = False,
        config_path: str | None = None,
        **_: Any,  # other engines' arguments
    ) -> None:
        assert config.server_url is not None
        self._http = Requests(split(config.server_url), self.kind)
        self._url = self._http.url.geturl()
        self._shapes, self._vocabulary = parameter_shapes(
            config_path or model_path, trust_remote_code=trust_remote_code
        )
        self._max_model_len = max_model_len
        self._ends = end_ids
        self._timeout_s = config.push_timeout_s
        self._progress_s = config.progress_timeout_s
        self._version: int | None = None
        self._failure: str | None = "the server may hold any weights: push before generating"
        self._closed = self._broken = False
        self._generating: Requests | None = None
        self._needs_restart = False  # a failed push ends it; else the next whole push replaces what is left
        self._fp32_head = config.head_dtype == "float32" != dtype
        self.name = f"{self.kind.library} at {self._url}"
        self._begin(config, model_path, dtype)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        http = Requests(self._http.url, self.kind)
        self._generating = http  # set first, so that no `close` misses it
        if self._failure:
            raise RuntimeError(self._failure)
        check_requests(requests, sampling, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        params = self._params(requests, sampling)
        pool = ThreadPoolExecutor(CONNECTIONS)
        activity.rollouts.begin(sum(r.n if sampling.temperature else 1 for r in requests if r.n))
        try:
            numbered = enumerate(zip(requests, params, strict=True))
            asked = [pool.submit(self._asked, i, http, r.prompt, p) for i, (r, p) in numbered if r.n]
            self._await(asked)
            answers = iter([future.result() for future in asked])
        except OSError as error:
            if self._closed:
                raise RuntimeError(self._failure) from error
            if isinstance(error, Refused) and error.status < 500:  # the request's fault: it would be refused again
                raise RunFailed(f"{self.name} refused: {error}") from error
            raise RunFailed(f"{self.name} did not answer: {error}") from error
        finally:
            http.hang_up()  # the server drops what it still works on, where we would wait for it in the next line
            pool.shutdown(cancel_futures=True)
        groups = [next(answers) if request.n else [] for request in requests]
        if not sampling.temperature:
            groups = [group * r.n for group, r in zip(groups, requests, strict=True)]
        return check_responses(
            groups, requests, sampling, vocabulary=self._vocabulary, ends=self._ends, engine=self.name
        )

    def _asked(self, index: int, http: Requests, prompt: Sequence[int], params: dict[str, Any]) -> list[Completion]:
        """`_ask`; RunFailed with server and request for an answer that is no good one."""
        try:
            return self._ask(http, prompt, params)
        except BadAnswer as error:
            raise RunFailed(f"{self.name}, request {index}: {error}") from error

    def _await(self, asked: list[Future[list[Completion]]]) -> None:
        """Return when all are answered, raise when one fails; OSError when the server makes no progress any more.

        An answer may take as long as it takes to generate, so its tokens are what has a limit.
        """
        left = set(asked)
        tokens = -1.0
        since = time.monotonic()
        while left:
            done, left = wait(left, min(PATIENCE_S, self._progress_s / 2), FIRST_EXCEPTION)
            for future in done:
                future.result()
            before = tokens
            tokens = tokens if done else self._tokens()
            if done or tokens != before:
                since = time.monotonic()
            elif time.monotonic() - since >= self._progress_s:
                raise OSError(
                    f"no answer and no token for {self._progress_s:g} s (rollout.progress_timeout_s): it hangs. "
                    f"{RESTART}"
                )

    @abstractmethod
    def _begin(self, config: RolloutConfig, model_path: str, dtype: str) -> None:
        """Check the server, and agree with it on how weights come; ValueError where it is not as the run needs it."""

    @abstractmethod
    def _params(self, requests: Sequence[Request], sampling: Sampling) -> list[dict[str, Any]]:
        """The request besides each prompt; ValueError for sampling that the server cannot do."""

    @abstractmethod
    def _ask(self, http: Requests, prompt: Sequence[int], params: dict[str, Any]) -> list[Completion]:
        """The responses to one prompt; OSError without them, BadAnswer for what the server's own kind never says."""

    def _check_versions(self, spans: Field) -> None:
        """BadAnswer unless all of a response was generated with the weights that were pushed last."""
        found = sorted(set(map(str, spans.column("version") if spans.value else [])))
        if found != [str(self._version)]:
            raise BadAnswer(
                f"{spans}: generated with the weights of {found!s:.200}; want those of {self._version}. "
                "Does another run push to this server, or was it started again?"
            )

    def _most_bytes(self, tokens: int, kept: int = 0) -> int:
        """The length of an answer with so many tokens at most, each drawn from so many at most."""
        return MOST_BYTES + tokens * (BYTES_PER_TOKEN + kept * BYTES_PER_KEPT)

    @abstractmethod
    def _tokens(self) -> float:
        """A number that changes while the server generates, for whomever; OSError where it does not tell."""

    @abstractmethod
    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """This rank's part of a push."""

    @abstractmethod
    def _stop_pushing(self) -> bool:
        """Leave the server to others; whether this rank has pushed."""

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._closed:
            raise RuntimeError(self._failure)
        if self._broken:
            raise RunFailed(f"{self.name} holds a mixture of two models after a push that failed. {RESTART}")
        self._failure = f"the push of version {version} failed half-way: push a whole model before generating"
        self._broken = self._needs_restart
        failed = ""
        with watched(weights, self._shapes, version=version, timeout_s=self._timeout_s) as checked:
            try:
                self._send(checked, version)
            except (RunFailed, ValueError):  # the clock's, and the trainer's own mistakes
                raise
            except OSError as error:
                failed = str(error)
            except Exception as error:  # whatever it is: the other ranks wait for word of it
                failed = repr(error)
            for _ in checked:  # the other ranks gather with this one
                pass
        if dist.is_initialized():
            failed = max(agree.gathered(failed))  # which also keeps the others from generating too early
        if failed:
            raise RunFailed(f"{self.name} did not take the weights of version {version}: {failed}")
        self._version = version
        self._failure = None
        self._broken = False

    def sleep(self) -> None:  # noqa: B027
        """Stays awake: it has its GPUs to itself."""

    def close(self) -> None:
        """The server stays, with the last weights; what another thread asks of it ends."""
        if self._closed:
            return
        self._closed = True
        self._failure = "the engine is closed"
        if self._generating is not None:
            self._generating.hang_up()
        if self._stop_pushing():
            logger.info("%s goes on, with the weights of version %s: this run pushes no more", self.name, self._version)
