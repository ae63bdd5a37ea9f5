"""The drop-ins import no more than their pages' install lines bring."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DROP_INS = ROOT / "rlplus" / "integrations"
LIBRARIES = {
    "trl": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "prime_rl": "prime_rl",
    "transformers": "transformers",
}
PROBE = """
import sys

blocked = set(sys.argv[1].split(","))


class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is imported")


sys.meta_path.insert(0, Refused())
import torch
import rlplus
import rlplus.integrations.measures, rlplus.integrations.trl_loss

h, w, t = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4), torch.tensor([1, 2, 3])
inputs = {"advantage": torch.ones(3), "token_weight": torch.ones(3), "old_logprob": None}
rlplus.linear_policy_loss(h, w, t, **inputs, objective="rlplus").loss.backward()
assert rlplus.linear_logprob(h, w, t)[0].isfinite().all() and h.grad.any()
"""


def test_the_losses_need_torch_triton_and_numpy_only() -> None:
    """Of the package's requirements."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_") for requirement in wanted}
    assert {"torch", "triton", "numpy", "transformers", "deepspeed", "pydantic"} < names
    blocked = names - {"torch", "triton", "numpy"} | {"yaml", "latex2sympy2_extended"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(blocked)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(DROP_INS.glob("*.py")), ids=lambda path: path.stem)
def test_a_drop_in_imports_its_library_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "rlplus", "transformers", LIBRARIES.get(path.stem, "torch")}
    found, own = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    own = {name.split(".")[1] for name in found if name.startswith("rlplus.")}
    assert {name.partition(".")[0] for name in found} <= allowed
    assert own <= {"errors", "integrations", "loss"}


@pytest.mark.parametrize("page", ["trl", "transformers", "verl", "openrlhf", "prime-rl"])
def test_a_page_states_how_to_install(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    (line,) = re.findall(r"^(?:uv )?pip install .*-e .*$", text, re.MULTILINE)
    assert page == "trl" or "--no-deps" in line
    assert page == "trl" or re.search(r"torch 2\.11.* triton\s+3\.6", text)
