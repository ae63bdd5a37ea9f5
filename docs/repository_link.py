"""A hook of mkdocs: the link to the repository in the header of each page, where pyproject.toml has its address."""

import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the address from `[project.urls]`; without one there is no link."""
    if address := tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"].get("Repository"):
        config.repo_url = address
        config.repo_name = urlsplit(address).path.strip("/")
    return config
