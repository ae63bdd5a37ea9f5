"""The part of the Hugging Face hub that an upload talks to, on this machine: it keeps what it is sent."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from local_http import Handler, running


class Hub(ThreadingHTTPServer):
    """files: contents by path in the repository, as committed. status: of all answers, 200 or an error's."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.public = False  # the repository was there before, and all can read it
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(Handler):
    server: Hub

    def do_GET(self) -> None:
        """The facts of a repository of models."""
        hub = self.server
        hub.asked.append(f"GET {self.path}")
        made = hub.created[-1] if hub.created else {}
        private = True in (made.get("private"), made.get("visibility") == "private")
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        self.answer({"id": name, "private": private and not hub.public})

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        hub.asked.append(f"POST {self.path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.status != 200:
            self.answer({"error": "refused"}, hub.status)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            made = json.loads(body)
            self.answer({"url": f"{hub.url}/{made.get('organization')}/{made['name']}", "name": made["name"]})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}  # the store of large files is the library's affair
            self.answer({"files": [{"path": one["path"]} | mode for one in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            self._commit(body)
        else:
            self.answer({})  # the check of a card's metadata

    def _commit(self, body: bytes) -> None:
        hub = self.server
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
        self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/o/n/commit/{'0' * 40}"})


@contextmanager
def running_hub(status: int = 200) -> Iterator[Hub]:
    with running(hub := Hub(status)):
        yield hub
