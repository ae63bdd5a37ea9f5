"""Install lines of the drop-ins' pages, and releases of torch, resolved by uv; skipped where no index answers."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tritons

pytest.importorskip("uv", reason="its resolver")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PRIME_RL = ["torch>=2.9.0", "transformers==5.6.2", "vllm>=0.26.0", "numpy>=2.2.6", "pyarrow>=21.0.0"]  # its pyproject
RELEASES = sorted(re.findall(r"\d+\.\d+\.\d+", " ".join(tritons.PINNED.values())))


def resolve(folder: Path, *requirements: str, python: str = "3.11") -> str:
    """The resolved requirements, one per line. flash-attn is left out: its metadata come from a build with torch."""
    (folder / "wanted.in").write_text("\n".join([*PROJECT["dependencies"], *requirements]))
    (folder / "left-out.txt").write_text('flash-attn; sys_platform == "never"')
    command = ["-m", "uv", "pip", "compile", "--quiet", "--python-version", python, "--python-platform", "linux"]
    command += ["--overrides", str(folder / "left-out.txt"), str(folder / "wanted.in")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode and "No solution found" not in done.stderr:
        pytest.skip(f"no index answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def install_lines(page: str) -> list[str]:
    """The requirements of the `pip install` lines of a page, without those that name rlplus itself."""
    text = (ROOT / f"docs/{page}.md").read_text()
    lines = re.findall(r"^pip install (.*)$", text, re.MULTILINE)
    assert "-e ." in lines
    return [requirement for line in lines for requirement in re.findall(r'"([^"]+)"', line)]


@pytest.mark.parametrize("page", ["verl", "openrlhf", "transformers"])
def test_a_library_resolves_beside_the_losses(page: str, tmp_path: Path) -> None:
    assert re.search("^triton==3", resolve(tmp_path, *install_lines(page)), re.MULTILINE)


def test_prime_rl_resolves_beside_the_losses(tmp_path: Path) -> None:
    assert re.search(r"^transformers==5\.6\.2$", resolve(tmp_path, *PRIME_RL, python="3.12"), re.MULTILINE)


@pytest.mark.parametrize("extra", [(), EXTRAS["train"]], ids=["losses", "trainer"])
def test_trl_resolves(extra: list[str], tmp_path: Path) -> None:
    done = resolve(tmp_path, *EXTRAS["trl"], *EXTRAS["lora"], *extra)
    assert re.search(r"^trl==1\.16\.", done, re.MULTILINE)


@pytest.mark.parametrize("torch", RELEASES)
def test_the_triton_of_a_torch_is_one_that_the_kernels_are_compiled_with(torch: str, tmp_path: Path) -> None:
    (triton,) = re.findall(r"^triton==(\S+)", resolve(tmp_path, f"torch=={torch}"), re.MULTILINE)
    assert torch in tritons.PINNED[triton]
