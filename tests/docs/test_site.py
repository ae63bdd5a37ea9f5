"""The manual as a site: it asks no other server, fits desktops and phones, and is searched without a server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from chromium import MISSING, PROGRAM, SIZES, Tab, chromium
from manual import ROOT, module_from
from mkdocs.commands.build import build
from mkdocs.config import load_config

RESULTS = sorted((ROOT / "experiments/compare/results").glob("*.json"))
CUT = """(() => {
  const page = document.documentElement;
  const scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const inside = (e, box) => e.scrollWidth <= box.clientWidth || scrolls(box);
  const code = [...document.querySelectorAll("pre > code")].filter((e) => !inside(e, e));
  const tables = [...document.querySelectorAll(".md-typeset table")].filter((e) => !inside(e, e.parentElement));
  const frames = [...document.querySelectorAll(".md-typeset__scrollwrap")];
  const free = frames.filter((e) => e.clientWidth > page.clientWidth);
  const cut = [...code, ...tables, ...free].map((e) => e.textContent.trim().slice(0, 60));
  return page.scrollWidth > page.clientWidth ? [`the page, by ${page.scrollWidth - page.clientWidth}`, ...cut] : cut;
})()"""
SEARCH = """(() => {
  const field = document.querySelector(".md-search__input");
  field.focus();
  field.value = "collective_timeout_s";
  field.dispatchEvent(new Event("input"));
  field.dispatchEvent(new Event("keyup"));
})()"""
FOUND = "[...document.querySelectorAll('a.md-search-result__link')].map((a) => a.pathname.split('/').pop())"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rough intervals: two thousand resamples for each of thousands take two thirds of the time."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlplus.train.evaluation.estimates._REPLICATES", 20)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def test_it_builds_without_warnings_and_asks_no_other_server(site: Path) -> None:
    text = "".join(path.read_text() for path in site.rglob("*.html"))
    assert text.count("<math") > 50
    assert "arithmatex" not in text
    assert not re.findall(r'(?:src|<link[^>]* href)="https?://', text)
    for name in (f"compare/{path.stem}.html" for path in RESULTS):
        comparison = (site / name).read_text()
        assert re.search(r"Difference from [^<]+, points", comparison), name
        several = ">trained, pass@1<" in comparison  # test sets, as in most
        assert (">all, pass@1<" in comparison) == several, "all test sets together, beside each of them"


def test_decisions_are_read_but_not_searched(site: Path) -> None:
    """Readers of the manual look for what it says, not for what its authors decided."""
    index = json.loads((site / "search/search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"kernels.html", "troubleshooting.html"} <= places
    assert len(list(site.glob("decisions/[0-9]*.html"))) > 50
    assert [place for place in places if place.startswith("decisions/")] == []


@pytest.mark.parametrize("size", SIZES)
def test_nothing_on_a_page_is_cut(site: Path, tab: Tab, size: str) -> None:
    """Code and tables fit or scroll within the page, which does not scroll sideways."""
    tab.show(size)
    pages = [page for page in sorted(site.glob("*.html")) if page.name != "404.html"]  # it names files from the root
    assert len(pages) > 20
    cut = {}
    for page in pages:
        tab.open(page.as_uri())
        if found := tab.run(CUT):
            cut[page.name] = found
    assert not cut
    assert tab.complaints == []


def test_the_search_finds_without_a_server(site: Path, tab: Tab) -> None:
    """A key's name, without its section; from a page in a folder, too."""
    for page in ("index.html", "decisions/index.html"):
        tab.show("desktop")
        tab.open((site / page).as_uri())
        tab.run(SEARCH)
        processes.wait_until(lambda: "configuration.html" in tab.run(FOUND))
    assert [asked for asked in tab.asked if not asked.startswith(("file:", "data:"))] == []
    assert tab.complaints == []


@pytest.mark.parametrize("address", [None, "https://git.example/owner/rlplus"])
def test_the_link_to_the_repository_is_the_projects(tmp_path: Path, address: str | None) -> None:
    module, config = module_from(ROOT / "docs/repository_link.py"), load_config(str(ROOT / "mkdocs.yml"))
    module.PROJECT = tmp_path / "pyproject.toml"
    module.PROJECT.write_text("[project.urls]\n" + (f'Repository = "{address}"\n' if address else ""))
    module.on_config(config)
    assert (config.repo_url, config.repo_name) == (address, "owner/rlplus" if address else None)
