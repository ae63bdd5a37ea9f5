"""A server's stand-in for the tests of this folder."""

from collections.abc import Iterator

import pytest
from servers import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.http.shutdown()
    server.http.server_close()
