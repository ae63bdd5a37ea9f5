"""HTTP to a server of vLLM or SGLang, of rollouts or of a teacher."""

import errno
import http.client
import json
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rlplus.common.errors import without_passwords
from rlplus.common.http_limits import BEGUN_S, MOST_BYTES, TooLong, answered
from rlplus.train.rollout.answer_fields import Field, parsed

KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # a dead host shows in 30 s
PATIENCE_S = 60.0  # limit for a connection and for what a server always answers


RESTART = "Start it again, and the run with --resume"


@dataclass(frozen=True)
class Kind:
    """A kind of server.

    secret: the environment variable with its key. not_found: advice where it lacks a path. url: the configuration's key
    of its address.
    """

    library: str
    secret: str
    not_found: str
    url: str = "rollout.server_url"


VLLM = Kind("vllm", "VLLM_API_KEY", "Was it started with VLLM_SERVER_DEV_MODE=1?")
SGLANG = Kind("sglang", "SGLANG_API_KEY", "Is it a server of SGLang 0.5?")
TEACHER = Kind(
    "vllm",
    "TEACHER_API_KEY",
    "Is it the address without /v1, of the model that it had?",
    "algorithm.recipe.teacher_url",
)


class Refused(OSError):
    """The server answered, but not with 200."""

    def __init__(self, request: str, status: int, text: bytes, kind: Kind = VLLM) -> None:
        hints = {
            401: f"Is {kind.secret} that of the server?",
            403: "Does a proxy before the server want something else?",
            404: kind.not_found,
        }
        hint = hints.get(status, f"Its log says more. {RESTART}, if it has died" if status >= 500 else "")
        super().__init__(f"{request} was answered with {status}: {_reason(text)}{hint and '. '}{hint}")
        self.status = status


class Requests:
    """HTTP to one server from several threads, until `hang_up` ends what is under way and whatever comes after."""

    def __init__(self, url: SplitResult, kind: Kind = VLLM) -> None:
        self.url = url
        self.kind = kind
        self._headers = {"Content-Type": "application/json"} | _authorization(kind.secret)
        self._lock = threading.Lock()
        self._under_way: set[socket.socket] = set()
        self._over = False

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
        setting: str = "",
        most: int = MOST_BYTES,
    ) -> bytes:
        """The answer's body; OSError where none comes, or another status than 200, or more than `most` bytes.

        timeout_s: for the whole answer; None: it may begin at any time, and ends soon after. setting: its key.
        """
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.netloc, timeout=PATIENCE_S)
        connected = None
        try:
            connection.connect()
            connected = connection.sock  # which the connection may forget
            self._begin(connected, timeout_s)
            text = None if body is None else json.dumps(body)
            until = None if timeout_s is None else time.monotonic() + timeout_s
            connection.request(method, self.url.path + path, text, self._headers)
            status, answer = answered(connection, until, most)
        except (http.client.HTTPException, OSError) as error:
            begun = "" if getattr(error, "errno", None) else f"{BEGUN_S:g} s for an answer that has begun"
            limit = f"{timeout_s:g} s{setting and ', '}{setting}" if timeout_s else begun
            limit = limit if connected else f"{PATIENCE_S:g} s"
            advice = _advice(error, limit, self.kind)
            raise OSError(f"{method} {path}: {type(error).__name__} {error}. {advice}") from error
        finally:
            with self._lock:
                self._under_way.discard(connected)
            connection.close()
        if status != 200:
            raise Refused(f"{method} {path}", status, answer, self.kind)
        return answer

    def ask(self, method: str, path: str, *arguments: Any, **more: Any) -> Field:
        """The JSON of the answer to `send` of the same arguments; BadAnswer for another text."""
        return parsed(self.send(method, path, *arguments, **more), f"{method} {path}")

    def _begin(self, connected: socket.socket, timeout_s: float | None) -> None:
        connected.settimeout(timeout_s or BEGUN_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            if self._over:
                raise ConnectionAbortedError("the engine hung up")
            self._under_way.add(connected)

    def own_address(self) -> str:
        """This machine's address, as the server sees it."""
        port = self.url.port or (443 if self.url.scheme == "https" else 80)
        with socket.create_connection((self.url.hostname or "", port), PATIENCE_S) as connected:
            return str(connected.getsockname()[0])

    def hang_up(self) -> None:
        with self._lock:
            self._over = True
            for connected in self._under_way:
                with suppress(OSError):  # the server was first
                    # Not a TLS socket's own, which is not for use while another thread reads.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)


def split(url: str, kind: Kind = VLLM) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        (parts.hostname or "").encode("idna")
    except ValueError:  # the port, or a name that no host has
        good = False
    if not good or parts.query or parts.fragment:
        key = f". The server's key is read from {kind.secret}" if "@" in url else ""
        raise ValueError(f"want {kind.url} such as http://localhost:8000; got {without_passwords(url)}{key}")
    return parts._replace(path=parts.path.rstrip("/"))


def _authorization(variable: str) -> dict[str, str]:
    """The header with the server's key. ValueError where the variable's value cannot be in one."""
    key = os.environ.get(variable, "")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"want {variable} of printable ASCII; got other characters, such as the end of a line")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _advice(error: OSError | http.client.HTTPException, limit: str, kind: Kind) -> str:
    """Advice to the user about a request without an answer, by its cause."""
    if isinstance(error, socket.gaierror):
        return f"Is the host in {kind.url} right?"
    if isinstance(error, TooLong):
        return f"Is it a server of {kind.library}?"
    if isinstance(error, ssl.SSLError):
        return "Does it speak https, with a certificate that this machine trusts (SSL_CERT_FILE)?"
    if isinstance(error, TimeoutError):
        return f"It hangs, or takes longer than {limit}. {RESTART}" if limit else f"Its machine is gone. {RESTART}"
    if isinstance(error, http.client.IncompleteRead):
        return f"Its answer was cut: it has ended, or its lengths are wrong. {RESTART}"
    if isinstance(error, ConnectionError):
        return f"It has ended, or nothing listens there. {RESTART}"
    if isinstance(error, http.client.HTTPException):
        return f"Is it a server of {kind.library}, and http rather than https?"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "That is this machine's limit of open files (ulimit -n)"
    return f"Can this machine reach the host in {kind.url} (its network, a firewall)?"


def _reason(text: bytes) -> str:
    """The server's message in an answer of its own, else the answer."""
    with suppress(ValueError, KeyError, TypeError):
        answer = json.loads(text)
        return str(answer["message"] if "message" in answer else answer["error"]["message"])[:500]
    return text.decode(errors="replace")[:500]
