"""A server on this machine that answers with what a test wants."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Says nothing on the terminal, and answers with bytes, or a value as JSON."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """The body is left out in answer to HEAD."""
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, each in {"Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    """The address of the server, which answers in a thread until the end."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
