"""Answers over HTTP that drip, never end or are too long: each is given up, by its whole time and size."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import Request

import processes
import pytest

from rlplus.common import http_limits
from rlplus.common.http_limits import TooLong, answered, urlopen

HEAD = b"HTTP/1.1 200 OK\r\n"
PAUSE_S, DRIPS = 0.02, 500  # ten seconds, fifty times the limit
LIMIT_S = 0.2

Answer = Callable[[socket.socket], None]


@contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """The port of a server that reads a request and answers it so."""

    def serve() -> None:
        connected, _ = listening.accept()
        with connected:
            try:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connected.recv(65536)
                answer(connected)
            except OSError:  # the client has hung up
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            thread.join(processes.PATIENCE_S)


def asked(port: int, until: float | None, most: int = http_limits.MOST_BYTES) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/")
    try:
        return answered(connection, until, most)
    finally:
        connection.close()


def dripping(start: bytes, drip: bytes, end: bytes = b"") -> Answer:
    """A good answer, a drip at a time, each of them long before the limit of a receive."""

    def answer(connected: socket.socket) -> None:
        connected.sendall(start)
        for _ in range(DRIPS):
            connected.sendall(drip)
            time.sleep(PAUSE_S)
        connected.sendall(end)

    return answer


DRIPPING = {
    "status": dripping(b"", b" ", HEAD + b"Content-Length: 0\r\n\r\n"),
    "headers": dripping(HEAD + b"X: ", b"x", b"\r\nContent-Length: 0\r\n\r\n"),
    "body": dripping(HEAD + b"Content-Length: %d\r\n\r\n" % DRIPS, b"x"),
    "chunks": dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", b"0\r\n\r\n"),
    "a chunk's size": dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0", b"\r\n\r\n"),
    "no length": dripping(HEAD + b"Connection: close\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("where", DRIPPING)
@pytest.mark.parametrize("begun", [False, True])
def test_a_limit_is_for_the_whole_answer(where: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """begun: where an answer may begin at any time the limit is counted from its first byte."""
    monkeypatch.setattr(http_limits, "BEGUN_S", LIMIT_S)
    with answering(DRIPPING[where]) as port, pytest.raises(TimeoutError):
        asked(port, None if begun else time.monotonic() + LIMIT_S)


def test_the_first_byte_may_come_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "BEGUN_S", 60.0)

    def late(connected: socket.socket) -> None:
        time.sleep(3 * LIMIT_S)
        connected.sendall(HEAD + b"Content-Length: 2\r\n\r\nok")

    with answering(late) as port:
        assert asked(port, None) == (200, b"ok")
    with answering(late) as port, pytest.raises(TimeoutError):
        asked(port, time.monotonic() + LIMIT_S)


def endless(head: bytes, piece: bytes) -> Answer:
    def answer(connected: socket.socket) -> None:
        connected.sendall(HEAD + head + b"\r\n\r\n")
        while True:
            connected.sendall(piece)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        endless(b"Content-Length: 400000000000", bytes(1000)),
        endless(b"Transfer-Encoding: chunked", b"3E8\r\n" + bytes(1000) + b"\r\n"),
        endless(b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFF", bytes(1000)),
        endless(b"Connection: close", bytes(1000)),
    ],
)
def test_an_answer_has_a_largest_size(answer: Answer) -> None:
    """Whatever length it announces: no more memory than that is taken."""
    with answering(answer) as port, pytest.raises(TooLong, match="want an answer of at most 1,000,000 bytes"):
        asked(port, time.monotonic() + processes.PATIENCE_S, most=10**6)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n yo\r\n0\r\n\r\n", b"hello yo"),
        (HEAD + b"Connection: close\r\n\r\nhello", b"hello"),
        (HEAD.replace(b"1.1", b"1.0") + b"\r\nhello", b"hello"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno", b"no"),
        (HEAD + b"Content-Length: 200000\r\n\r\n" + b"x" * 200_000, b"x" * 200_000),
    ],
)
def test_a_good_answer_is_read_as_before(answer: bytes, body: bytes) -> None:
    with answering(lambda connected: connected.sendall(answer)) as port:
        status, got = asked(port, time.monotonic() + processes.PATIENCE_S, most=max(len(body), 1))
    assert (status, got) == (404 if b"404" in answer else 200, body)


@pytest.mark.parametrize("head", [b"Content-Length: 9\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n9\r\nhello"])
def test_an_answer_that_was_cut_is_no_answer(head: bytes) -> None:
    with answering(lambda connected: connected.sendall(HEAD + head)) as port, pytest.raises(http.client.IncompleteRead):
        asked(port, time.monotonic() + processes.PATIENCE_S)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n", "length of a chunk from 0 on; got -5"),
        (b"Transfer-Encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n", "length of a chunk from 0 on; got -1"),
        (b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n", "IncompleteRead"),
        (b"Content-Length: -5\r\n\r\nhello", "want one Content-Length of digits; got -5"),
        (b"Content-Length: 5.0\r\n\r\nhello", "want one Content-Length of digits; got 5.0"),
        (b"Content-Length: \r\n\r\nhello", "want one Content-Length of digits; got "),
        (b"Content-Length: 5\r\nContent-Length: 4\r\n\r\nhello", "want one Content-Length of digits; got 4, 5"),
    ],
)
def test_lengths_that_are_none_are_no_answer(head: bytes, kind: str) -> None:
    """A chunk of -1 bytes would be read to the end of the connection, however much comes."""
    until = time.monotonic() + processes.PATIENCE_S
    answer = answering(lambda connected: connected.sendall(HEAD + head))
    with answer as port, pytest.raises(http.client.HTTPException) as error:
        asked(port, until)
    assert kind in repr(error.value)


def test_urllib_has_the_same_limit() -> None:
    with answering(DRIPPING["headers"]) as port, pytest.raises(TimeoutError):
        urlopen(Request(f"http://127.0.0.1:{port}", method="HEAD"), timeout=LIMIT_S)
    good = HEAD + b"Content-Length: 0\r\n\r\n"
    with answering(lambda connected: connected.sendall(good)) as port:
        assert urlopen(Request(f"http://127.0.0.1:{port}", method="HEAD"), timeout=processes.PATIENCE_S).status == 200
