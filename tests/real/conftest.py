"""The folders of the pretrained models, made or skipped once a session."""

import pytest
from real_models import QWEN, SMOLLM2, real_model


@pytest.fixture(scope="session")
def smollm2() -> str:
    return real_model(SMOLLM2)


@pytest.fixture(scope="session")
def qwen() -> str:
    return real_model(QWEN)
