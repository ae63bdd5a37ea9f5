"""The page of watched runs over HTTP: on this machine's own address, read only, without a path from any request.

Other users of the machine reach that address, too: what is asked without the token of the printed one is refused.
"""

import hmac
import json
import logging
import re
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from rlplus.tools.watch.view import PARTS, View

ADDRESS = "127.0.0.1"
# Names under which a browser reaches this machine, also through an SSH tunnel of another port. A page of another site
# whose name was made to point here (DNS rebinding) has that name.
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",  # the rest is in the page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
PATIENCE_S = 30  # limit of a request

logger = logging.getLogger(__name__)


class WatchServer(ThreadingHTTPServer):
    """Serves a view to those who know `url`, which has a token. port 0: a free one."""

    daemon_threads = True

    def __init__(self, view: View, port: int) -> None:
        self.view = view
        self.lock = Lock()  # one request at a time: a page in several tabs reads a folder once
        self._token = secrets.token_urlsafe(24)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/?token={self._token}"

    def knows(self, query: str) -> bool:
        """Whether a query has the token."""
        given = parse_qs(query).get("token", [""])[-1]
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request was cut off", exc_info=True)  # a browser that leaves

    def answer(self, path: str) -> tuple[int, str, str]:
        """Status, type and text for a path without its query."""
        with self.lock:
            if path == "/favicon.ico":
                return 204, TEXT, ""
            if path not in ("/", *(f"/{name}.json" for name in PARTS)):
                return 404, TEXT, "There is one page here: /\n"
            self.view.update()
            if path == "/":
                return 200, HTML, self.view.page()
            name = path[1:].removesuffix(".json")
            version, html = self.view.part(name)
            answer: dict[str, Any] = {"version": version, "html": html}
            if name == "now":
                answer["title"] = self.view.title
                answer["versions"] = {other: self.view.part(other)[0] for other in PARTS if other != "now"}
            return 200, JSON, json.dumps(answer)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "rlplus"
    sys_version = ""
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0].strip()):
            self._send(403, TEXT, f"want a request to {ADDRESS} or localhost\n")
            return
        path, _, query = self.path.partition("?")
        if not self.server.knows(query):
            self._send(403, TEXT, "want the address that `rlplus watch` printed, with its token\n")
            return
        try:
            status, kind, text = self.server.answer(path)
        except Exception as error:  # the page says so, and the next request may find the folder whole
            logger.warning("the page could not be made: %r", error)
            status = 500
            kind = TEXT
            text = f"the page could not be made: {type(error).__name__}: {error}\n"
        self._send(status, kind, text)

    def _refuse(self) -> None:
        self._send(405, TEXT, "want GET: nothing can be changed here\n", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def _send(self, status: int, kind: str, text: str, further: dict[str, str] | None = None) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        for name, value in (HEADERS | (further or {})).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a page asks every two seconds."""
