"""HTTP to a vLLM server."""

import http.client
import json
import os
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # a dead host shows in 30 s
PATIENCE_S = 60.0  # limit for a connection and for what a server always answers


class Refused(OSError):
    """The server answered, but not with 200."""

    def __init__(self, request: str, status: int, text: bytes) -> None:
        hint = ". Is VLLM_API_KEY that of the server?" if status == 401 else ""
        super().__init__(f"{request} was answered with {status}: {_reason(text)}{hint}")
        self.status = status


class Requests:
    """HTTP to one server from several threads, until `hang_up` ends what is under way and whatever comes after."""

    def __init__(self, url: SplitResult) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"} | _authorization()
        self._lock = threading.Lock()
        self._under_way: set[socket.socket] = set()
        self._over = False

    def send(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """The answer's body; OSError where none comes, or another status than 200."""
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.netloc, timeout=PATIENCE_S)
        connected = None
        try:
            connection.connect()
            connected = connection.sock  # which the connection may forget
            self._begin(connected, timeout_s)
            text = None if body is None else json.dumps(body)
            connection.request(method, self.url.path + path, text, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (http.client.HTTPException, OSError) as error:
            raise OSError(f"{method} {path}: {type(error).__name__} {error}") from error
        finally:
            with self._lock:
                self._under_way.discard(connected)
            connection.close()
        if response.status != 200:
            raise Refused(f"{method} {path}", response.status, answer)
        return answer

    def _begin(self, connected: socket.socket, timeout_s: float | None) -> None:
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            if self._over:
                raise ConnectionAbortedError("the engine hung up")
            self._under_way.add(connected)

    def own_address(self) -> str:
        """This machine's address, as the server sees it."""
        with socket.create_connection((self.url.hostname or "", self.url.port or 80), PATIENCE_S) as connected:
            return str(connected.getsockname()[0])

    def hang_up(self) -> None:
        with self._lock:
            self._over = True
            for connected in self._under_way:
                with suppress(OSError):  # the server was first
                    # Not a TLS socket's own, which is not for use while another thread reads.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)


def split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # the port
        good = False
    if not good or parts.query or parts.fragment:
        raise ValueError(f"want rollout.server_url such as http://localhost:8000; got {url}")
    return parts._replace(path=parts.path.rstrip("/"))


def _authorization() -> dict[str, str]:
    """The header with the server's key. ValueError where VLLM_API_KEY cannot be in one."""
    key = os.environ.get("VLLM_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("want VLLM_API_KEY of printable ASCII; got other characters, such as the end of a line")
    return {"Authorization": f"Bearer {key}"} if key else {}


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise OSError(f"want JSON; got {text.decode(errors='replace')[:200]!r}") from error


def _reason(text: bytes) -> str:
    """vLLM's message in an answer of its own, else the answer."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])[:500]
    return text.decode(errors="replace")[:500]
