"""HTTP answers that end: a limit of time for a whole answer, as a socket's is for each receive, and one of its size."""

import http.client
import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener

MOST_BYTES = 16 * 2**20  # length of an answer, where a caller does not know it better
BEGUN_S = 300.0  # limit of an answer that may begin at any time, from its first byte; and of sending a request
PIECE = 2**16


class TooLong(OSError):
    """An answer with more bytes than any good one has."""


class _Receives(io.RawIOBase):
    """A socket's bytes until a time; `waits`: that time is counted from the first byte on, see BEGUN_S."""

    def __init__(self, connected: socket.socket, until: float | None) -> None:
        self._connected = connected
        self._until = until
        self._file = connected.makefile("rb", buffering=0)  # keeps the socket open where the connection lets go of it

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = None if self._until is None else self._until - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("timed out")
        self._connected.settimeout(left)
        count = self._file.readinto(buffer)
        if self._until is None:
            self._until = time.monotonic() + BEGUN_S
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Reader(io.BufferedReader):
    def read(self, size: int | None = None) -> bytes:
        """HTTPException for a negative size, which is a chunk's: -1 would be all that the server ever sends."""
        if size is not None and size < 0:
            raise http.client.HTTPException(f"want the length of a chunk from 0 on; got {size:x}")
        return super().read(size)


class _Answering:
    """The socket of a connection, for the response that reads from it."""

    def __init__(self, connected: socket.socket, until: float | None) -> None:
        self._connected = connected
        self._until = until

    def makefile(self, _: str) -> io.BufferedReader:
        return _Reader(_Receives(self._connected, self._until))


def answered(connection: http.client.HTTPConnection, until: float | None, most: int = MOST_BYTES) -> tuple[int, bytes]:
    """Status and body of the answer to the request that was sent.

    until: the end, by time.monotonic; None: any time, and BEGUN_S from the first byte on. TimeoutError, TooLong for
    more than `most` bytes, other OSErrors and HTTPExceptions.
    """
    with _ending(connection, until):
        response = connection.getresponse()
    lengths = set(response.headers.get_all("Content-Length", []))
    if len(lengths) > 1 or not all(each.isascii() and each.strip().isdecimal() for each in lengths):
        raise http.client.HTTPException(f"want one Content-Length of digits; got {', '.join(sorted(lengths)):.100}")
    if (response.length or 0) > most:
        raise TooLong(f"want an answer of at most {most:,} bytes; got one of {response.length:,}")
    pieces = []
    size = 0
    while piece := response.read(PIECE):
        pieces.append(piece)
        if (size := size + len(piece)) > most:
            raise TooLong(f"want an answer of at most {most:,} bytes; got more")
    if response.length:  # the end came before
        raise http.client.IncompleteRead(b"", response.length)
    return response.status, b"".join(pieces)


@contextmanager
def _ending(connection: http.client.HTTPConnection, until: float | None) -> Iterator[None]:
    """Have the connection's response, whose class it takes from itself, end in time."""

    def response(connected: socket.socket, *arguments: Any, **more: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(_Answering(connected, until), *arguments, **more)  # type: ignore[arg-type]

    connection.response_class = response  # type: ignore[assignment]
    try:
        yield
    finally:
        del connection.response_class


def urlopen(request: Request, timeout: float) -> Any:
    """urllib's, where the limit is for all headers of an answer together."""

    def limited(kind: type[http.client.HTTPConnection]) -> Any:
        class Limited(kind):  # type: ignore[misc, valid-type]
            def getresponse(self) -> http.client.HTTPResponse:
                with _ending(self, time.monotonic() + timeout):
                    found: http.client.HTTPResponse = super().getresponse()
                return found

        return Limited

    class Unencrypted(HTTPHandler):
        def http_open(self, req: Request) -> Any:
            return self.do_open(limited(http.client.HTTPConnection), req)

    class Encrypted(HTTPSHandler):
        def https_open(self, req: Request) -> Any:
            return self.do_open(limited(http.client.HTTPSConnection), req)

    return build_opener(Unencrypted, Encrypted).open(request, timeout=timeout)
