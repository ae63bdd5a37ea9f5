"""A run for the tests of recipes."""

from collections.abc import Iterator

import pytest
from trainer_runs import run_config

from rlplus.train.trainer import Run, open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that is built and never trained."""
    with open_run(run_config(tmp_path_factory.mktemp("run"))) as run:
        yield run
