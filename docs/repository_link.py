"""A hook of mkdocs: links to the repository and to notebooks in Colab, where pyproject.toml has its address."""

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the address from `[project.urls]`; without one there is no link."""
    if address := tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"].get("Repository"):
        config.repo_url = address
        config.repo_name = urlsplit(address).path.strip("/")
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Behind the path of each notebook a link that opens it in Colab, which reads repositories on GitHub."""
    address = urlsplit(config.repo_url or "")
    if address.netloc != "github.com":
        return markdown
    colab = f"https://colab.research.google.com/github/{address.path.strip('/')}/blob/main"
    return re.sub(r"`(examples/notebooks/[\w-]+\.ipynb)`", rf"`\1` ([open in Colab]({colab}/\1))", markdown)
