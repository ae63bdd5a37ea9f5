"""A headless Chromium, driven over a pipe by its own protocol (Chrome DevTools), without a driver or a port."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "want the program chromium (apt-get install chromium); there is none"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


class Tab:
    """A page. complaints: its console, exceptions, refusals of its policy; asked: the addresses of its requests."""

    def __init__(self, sending: int, receiving: Any) -> None:
        self._sending, self._receiving, self._number = sending, receiving, 0
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._session: dict[str, str] = {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; what happens until it comes is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._receiving.read(1)) != b"\0":
            assert byte, "chromium is gone"
            text += byte
        event: dict[str, Any] = json.loads(text)
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        return event

    def show(self, size: str, *, dark: bool = False) -> None:
        width, height = SIZES[size]
        phone = size == "phone"
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        there = "document.readyState === 'complete' && location.href !== 'about:blank'"
        processes.wait_until(lambda: self.run(there))

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose files are in the folder. It has no way out but to this machine."""
    assert PROGRAM is not None, MISSING
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()

    # The protocol's descriptors are 3 and 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', PROGRAM, *FLAGS]
    command += [f"--user-data-dir={folder}", "--proxy-server=127.0.0.1:9"]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    pipes = (theirs_in, theirs_out)
    with processes.started(command, pass_fds=pipes, **silent), os.fdopen(ours_in, "rb") as receiving:
        os.close(theirs_in)
        os.close(theirs_out)
        yield Tab(ours_out, receiving)
    os.close(ours_out)
