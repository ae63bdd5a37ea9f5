"""The install lines of the drop-ins' pages, resolved against an index of packages, for which these need the network."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tritons

pytest.importorskip("uv", reason="its resolver")

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [
    r for r in PROJECT["dependencies"] if r.startswith(("torch", "triton", "numpy"))
]  # of the losses and drop-ins


def resolve(folder: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """flash-attn is left out: its metadata are made by a build that needs torch."""
    (folder / "wanted.in").write_text("\n".join(requirements))
    (folder / "left-out.txt").write_text('flash-attn; sys_platform == "never"')
    command = ["-m", "uv", "pip", "compile", "--quiet", "--python-version", "3.11", "--python-platform", "linux"]
    command += ["--overrides", str(folder / "left-out.txt"), str(folder / "wanted.in")]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def install_lines(page: str) -> list[list[str]]:
    """The requirements of each `pip install` of a page, without those that name rlplus itself."""
    text = (ROOT / f"docs/{page}.md").read_text()
    return [re.findall(r'"([^"]+)"', line) for line in re.findall(r"^pip install (.*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("page", ["verl", "openrlhf", "transformers"])
def test_a_library_resolves_beside_what_the_drop_in_needs(page: str, tmp_path: Path) -> None:
    lines = install_lines(page)
    assert lines[-1] == [], "rlplus itself, without requirements"
    done = resolve(tmp_path, *NEEDED, *(requirement for line in lines for requirement in line))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["verl", "openrlhf"])
def test_a_library_does_not_resolve_beside_the_trainer(page: str, tmp_path: Path) -> None:
    """The reason for the `--no-deps`: where this fails, the page can have a simpler line."""
    wanted = [requirement for line in install_lines(page) for requirement in line]
    done = resolve(tmp_path, *PROJECT["dependencies"], *wanted)
    assert done.returncode != 0
    assert "unsatisfiable" in done.stderr


def test_trl_resolves_beside_the_trainer(tmp_path: Path) -> None:
    extras = PROJECT["optional-dependencies"]
    done = resolve(tmp_path, *PROJECT["dependencies"], *extras["trl"], *extras["lora"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^trl==1\.16\.", done.stdout, re.MULTILINE)


RELEASES = sorted(re.findall(r"\d+\.\d+\.\d+", " ".join(tritons.PINNED.values())))


@pytest.mark.parametrize("torch", RELEASES)
def test_the_triton_of_a_torch_is_one_that_the_kernels_are_compiled_with(torch: str, tmp_path: Path) -> None:
    done = resolve(tmp_path, f"torch=={torch}")
    (triton,) = re.findall(r"^triton==(\S+)", done.stdout, re.MULTILINE)
    assert torch in tritons.PINNED[triton]
