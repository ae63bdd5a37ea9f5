"""A hook of mkdocs: the page of each committed comparison, with its figures, as a part of the site."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rlplus.tools.compare.outcomes import Results
from rlplus.tools.compare.page import page_of

RESULTS = Path(__file__).parent.parent / "experiments/compare/results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The site's files, and compare/NAME.html for each results file."""
    for path in sorted(RESULTS.glob("*.json")):
        page = page_of(Results.load(path), title=path.stem)
        files.append(File.generated(config, f"compare/{path.stem}.html", content=page))
    return files
