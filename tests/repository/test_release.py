"""A release: version, changelog and workflow agree, and Python's versions are pyproject.toml's everywhere."""

import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import rlplus
from rlplus.tools.cli import parse

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
TRAINER = PROJECT["tool"]["mypy"]["python_version"]  # the oldest Python of the trainer
PYTHONS = [text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if ":: Python :: 3." in text]


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_version_is_the_newest_of_the_changelog() -> None:
    """Later changes have the title Unreleased. The version stands in one file."""
    titles = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert titles[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(rlplus.__version__)} — \d{{4}}-\d\d-\d\d", titles[1])
    assert [number(title.split()[0]) for title in titles[1:]] == sorted(
        (number(title.split()[0]) for title in titles[1:]), reverse=True
    )
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rlplus.__version__"}


def test_a_tag_publishes_what_was_built_and_tried_without_a_token(tmp_path: Path) -> None:
    workflow, text = WORKFLOWS["release"], (ROOT / ".github/workflows/release.yml").read_text()
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "YAML reads the key on as true"
    assert [name for name, other in WORKFLOWS.items() if "tags" in str(other[True])] == ["release"]
    dist, publish = workflow["jobs"]["dist"], workflow["jobs"]["publish"]
    assert dist == {"uses": "./.github/workflows/wheels.yml"}
    assert "workflow_call" in WORKFLOWS["wheels"][True]
    assert publish["needs"] == "dist"
    assert publish["environment"]["name"] == "pypi"
    assert workflow["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"contents": "read", "id-token": "write"}
    assert not re.search("password|secrets", text)
    checkout, download, check, unreleased, upload = publish["steps"]
    assert checkout["uses"].startswith("actions/checkout@"), "first, as it empties the folder"
    sent = WORKFLOWS["wheels"]["jobs"]["wheels"]["steps"][-1]
    assert sent["uses"].startswith("actions/upload-artifact@")
    assert (download["with"]["name"], download["with"]["path"]) == (sent["with"]["name"], sent["with"]["path"])
    assert check["run"] == 'test -e "dist/rlplus-${GITHUB_REF_NAME#v}.tar.gz"'
    assert [*upload] == ["uses"]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    released, waiting = "## 0.3.0 — 2026-01-01\n\n- a\n", "## Unreleased\n\n### Fixed\n\n- b\n\n"
    for text, status in (("## Unreleased\n\n" + released, 0), (waiting + released, 1)):
        (tmp_path / "CHANGELOG.md").write_text(text)
        assert subprocess.run(["bash", "-c", unreleased["run"]], cwd=tmp_path).returncode == status


def test_actions_are_pinned_to_a_commit() -> None:
    """A tag of theirs can be moved to other code, which would publish in our name; the comment says which it was."""
    lines = [line for path in (ROOT / ".github").rglob("*.yml") for line in path.read_text().splitlines()]
    used = [line.partition("uses: ")[2] for line in lines if "uses: " in line and "uses: ./" not in line]
    assert used
    assert not [text for text in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", text)]
    assert len(set(used)) == len({text.partition("@")[0] for text in used}), "one version of each"


def test_no_sandbox_of_chat_templates_with_a_known_way_out_is_installed() -> None:
    """CVE-2025-27516: `|attr` of Jinja up to 3.1.5 leaves it, and a model's folder brings its own template."""
    requirements = map(Requirement, PROJECT["project"]["optional-dependencies"]["train"])
    (jinja,) = (each for each in requirements if each.name == "jinja2")
    assert [jinja.specifier.contains(version) for version in ("3.1.5", "3.1.6")] == [False, True]


def test_versions_of_python_are_those_of_the_project() -> None:
    """The losses' are the classifiers, from requires-python on; the trainer's oldest is mypy's."""
    assert sorted(PYTHONS, key=number) == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert TRAINER in PYTHONS
    tried = re.search(r"\| Python \| torch \| Triton \|\n\|.*\n((?:\|.*\n)+)", (ROOT / "docs/index.md").read_text())
    assert tried is not None
    assert re.findall(r"^\| (3\.\d+) \|", tried[1], re.MULTILINE) == PYTHONS
    major, minor = TRAINER.split(".")
    assert f"sys.version_info < ({major}, {minor})" in (ROOT / "rlplus/tools/cli/__init__.py").read_text()
    for name in ("README.md", "docs/index.md"):
        assert f"Python {TRAINER} or later" in (ROOT / name).read_text(), name


@pytest.mark.parametrize("name", ["Makefile", *(f".github/workflows/{name}.yml" for name in WORKFLOWS)])
def test_environments_are_made_with_a_python_of_the_trainer(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(r"python(3\.\d+)|Python (3\.\d+)|\"(3\.\d+)\"", text))
    versions = {version for found in named for version in found if version}
    assert versions <= {version for version in PYTHONS if number(version) >= number(TRAINER)}


def upgrades() -> list[str]:
    """The right column of the notes for users of the version before."""
    notes = CHANGELOG.partition("### Upgrading from ")[2].partition("\n### ")[0]
    return [row.rstrip(" |").rpartition(" | ")[2] for row in notes.splitlines() if row.startswith("| ")][1:]


def test_what_the_notes_on_upgrading_name_exists() -> None:
    cells = upgrades()
    names = {name for cell in cells for name in re.findall(r"`(rlplus(?:\.\w+)+)`", cell)}
    assert {"rlplus.loss", "rlplus.train.trainer.evaluator", "rlplus.train.rollout.Sampling"} <= names
    for name in names:
        pkgutil.resolve_name(name)
    commands = [found for cell in cells for found in re.findall(r"`rlplus ([a-z].*?)`", cell)]
    assert commands == ["env", "samples RUN -n N"]
    for command in commands:
        parse(command.replace(" N", " 3").split())
    extras = {found for cell in cells for found in re.findall(r"\.\[(\w+)\]", cell)}
    assert extras == {"train"}
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()
