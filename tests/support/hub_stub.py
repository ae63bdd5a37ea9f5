"""The part of the Hugging Face hub that an upload talks to, on this machine: it keeps what it is sent."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub(ThreadingHTTPServer):
    """files: contents by path in the repository, as committed. status: of all answers, 200 or an error's."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.asked.append(f"POST {self.path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.status != 200:
            self._answer({"error": "refused"}, hub.status)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            made = json.loads(body)
            self._answer({"url": f"{hub.url}/{made.get('organization')}/{made['name']}", "name": made["name"]})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}  # the store of large files is the library's affair
            self._answer({"files": [{"path": one["path"]} | mode for one in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self._answer({})  # the check of a card's metadata

    def _commit(self, body: bytes) -> None:
        hub = self.server
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
        self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/o/n/commit/{'0' * 40}"})


@contextmanager
def running_hub(status: int = 200) -> Iterator[Hub]:
    with Hub(status) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
