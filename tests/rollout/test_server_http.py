"""Requests to a server that are not answered: what the user can do about it, by the cause."""

import errno
import http.client
import json
import socket
import ssl
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from local_http import Handler, running

from rlplus.common import http_limits
from rlplus.train.learner import served_teacher
from rlplus.train.rollout import http_engine, server_http
from rlplus.train.rollout.server_http import RESTART, Refused, Requests, split

CAUSES = [
    (socket.gaierror(-2, "Name or service not known"), "Is the host in rollout.server_url right?"),
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), f"It has ended, or nothing listens there. {RESTART}"),
    (http.client.RemoteDisconnected("closed"), f"It has ended, or nothing listens there. {RESTART}"),
    (http.client.IncompleteRead(b""), f"Its answer was cut: it has ended, or its lengths are wrong. {RESTART}"),
    (http.client.BadStatusLine("\x15"), "Is it a server of vllm, and http rather than https?"),
    (ssl.SSLCertVerificationError(1, "self-signed"), "with a certificate that this machine trusts (SSL_CERT_FILE)?"),
    (PermissionError(errno.EACCES, "denied"), "Can this machine reach the host in rollout.server_url"),
    (OSError(errno.EHOSTUNREACH, "No route"), "Can this machine reach the host in rollout.server_url"),
    (OSError(errno.EMFILE, "Too many open files"), "That is this machine's limit of open files (ulimit -n)"),
    (TimeoutError("timed out"), f"It hangs, or takes longer than 60 s. {RESTART}"),
]


@pytest.mark.parametrize(("cause", "advice"), CAUSES)
def test_an_error_says_what_to_do_by_its_cause(monkeypatch: pytest.MonkeyPatch, cause: Exception, advice: str) -> None:
    """None of them ends with the advice for another one."""

    def fail(_: Any) -> None:
        raise cause

    monkeypatch.setattr(http.client.HTTPConnection, "connect", fail)
    with pytest.raises(OSError, match=rf"^GET /metrics: {type(cause).__name__} ") as error:
        Requests(split("http://host")).send("GET", "/metrics", timeout_s=1.0)
    assert advice in str(error.value)
    assert (RESTART in str(error.value)) == (RESTART in advice)


def test_a_request_without_a_limit_ends_where_its_machine_is_gone() -> None:
    """By keep-alive: with ETIMEDOUT, which is a TimeoutError, too."""
    gone = OSError(errno.ETIMEDOUT, "Connection timed out")
    assert server_http._advice(gone, "", server_http.VLLM) == f"Its machine is gone. {RESTART}"


def test_a_limit_names_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        requests = Requests(split(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(OSError, match=r"takes longer than 0.1 s, half of rollout.push_timeout_s. Start it again"):
            requests.send("POST", "/pause", timeout_s=0.1, setting="half of rollout.push_timeout_s")


@pytest.mark.parametrize(
    ("timeout_s", "said"),
    [(0.2, "takes longer than 0.2 s, my limit"), (None, "takes longer than 0.3 s for an answer that has begun")],
)
def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, said: str) -> None:
    """No receive of it takes longer than a hundredth of a second; all of it would take ten."""
    monkeypatch.setattr(http_limits, "BEGUN_S", 0.3)
    monkeypatch.setattr(server_http, "BEGUN_S", 0.3)

    class Drips(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):  # the client has hung up
                for _ in range(1000):
                    self.wfile.write(b" ")
                    time.sleep(0.01)

    message = rf"^GET /metrics: TimeoutError .* {said}. {RESTART}"
    with running(ThreadingHTTPServer(("127.0.0.1", 0), Drips)) as url, pytest.raises(OSError, match=message):
        Requests(split(url)).send("GET", "/metrics", timeout_s=timeout_s, setting="my limit")


def test_an_answer_that_is_too_long_is_given_up() -> None:
    class Long(Handler):
        def do_GET(self) -> None:
            with suppress(OSError):
                self.answer(b" " * (http_limits.MOST_BYTES + 1))

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Long)) as url:
        requests = Requests(split(url))
        with pytest.raises(OSError, match=r"want an answer of at most 16,777,216 bytes.* Is it a server of vllm\?"):
            requests.send("GET", "/metrics")
        assert len(requests.send("GET", "/metrics", most=2 * http_limits.MOST_BYTES)) == http_limits.MOST_BYTES + 1


def test_the_longest_good_answers_fit() -> None:
    """Entries of vLLM 0.32's and SGLang 0.5's answers, with the longest numbers and commas."""
    number, logprob = 10**7 - 1, -1234.5678901234567
    candidate = {"token_id": number, "logprob": logprob, "rank": number}
    entry = json.dumps(candidate | {"top_logprobs": [candidate]})
    assert len(entry) + len(f", {number}, ") <= http_engine.BYTES_PER_TOKEN
    assert len(json.dumps([logprob, number, None])) + len(f", {number}, ") <= http_engine.BYTES_PER_TOKEN
    assert len(f"{number}, ") <= http_engine.BYTES_PER_KEPT
    told = json.dumps({str(number): candidate | {"decoded_token": "\u4e2d" * 20}})
    assert len(told) <= served_teacher.BYTES_PER_LOGPROB


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, ""),
        (401, ". Is VLLM_API_KEY that of the server?"),
        (403, ". Does a proxy before the server want something else?"),
        (404, ". Was it started with VLLM_SERVER_DEV_MODE=1?"),
        (500, f". Its log says more. {RESTART}, if it has died"),
    ],
)
def test_a_refusal_says_what_to_do_by_its_status(status: int, advice: str) -> None:
    assert str(Refused("POST /pause", status, b"no")) == f"POST /pause was answered with {status}: no{advice}"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://server", ("server", 80)),
        ("https://server", ("server", 443)),
        ("https://server:80", ("server", 80)),
        ("http://[::1]:8000", ("::1", 8000)),
    ],
)
def test_the_own_address_is_the_one_towards_the_servers_port(
    monkeypatch: pytest.MonkeyPatch, url: str, address: tuple[str, int]
) -> None:
    class Connected:
        def __enter__(self) -> "Connected":
            return self

        def __exit__(self, *_: object) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return ("10.0.0.7", 5)

    def connect(to: tuple[str, int], timeout_s: float) -> Connected:
        assert to == address
        assert timeout_s == server_http.PATIENCE_S
        return Connected()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert Requests(split(url)).own_address() == "10.0.0.7"
