"""Files and hub names of a configuration, looked for without loading anything."""

import logging
from http.server import HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from local_http import Handler, running

from rlplus.train.config.path_checks import hub_problem

CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that has one model; the hub itself cannot be reached."""
    snapshot = tmp_path / "models--owner--name/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    return tmp_path


def test_the_cache_takes_the_place_of_a_hub_out_of_reach(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlplus"):
        assert hub_problem("owner/name") is None
    assert f"{CLOSED} cannot be reached" in caplog.text
    assert "taking owner/name from the cache" in caplog.text
    problem = hub_problem("owner/other")
    assert problem is not None
    assert f"HF_HUB_OFFLINE is set, and the cache {cache} does not have it" in problem  # the first call found it


def test_any_answer_of_the_hub_means_that_it_can_be_reached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Handler):
        def do_HEAD(self) -> None:
            self.send_error(403)

    with running(HTTPServer(("127.0.0.1", 0), Refusing)) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert hub_problem("owner/other") is None
