"""The workflows' commands, and the oldest stack, on which one of them runs the benchmark."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS = {
    f"{file.stem}/{name}": job
    for file in sorted((ROOT / ".github/workflows").glob("*.yml"))
    for name, job in yaml.safe_load(file.read_text())["jobs"].items()
}


def commands(job: str) -> list[str]:
    return [line for step in JOBS[job].get("steps", []) for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize(
    "command", ["make lint", "make test", "make test-slow", "make test-peers", "make compatibility"]
)
def test_every_kind_of_test_is_run_by_a_workflow(command: str) -> None:
    assert [job for job in JOBS if command in commands(job)]


def test_sandboxes_of_every_kind_are_tried_as_a_user_and_as_root() -> None:
    job = "slow/sandbox"
    assert JOBS[job]["env"] == {"RLPLUS_SANDBOX": "1"}
    tests = ".venv/bin/python -m pytest -rs tests/sandbox"
    assert [c for c in commands(job) if c.endswith(tests)] == [tests, f"sudo --preserve-env=RLPLUS_SANDBOX {tests}"]
    assert any("install -y bubblewrap" in c for c in commands(job))


def test_what_a_workflow_imports_exists() -> None:
    """Every `from MODULE import NAME` in a workflow's `python -c` is executed."""
    scripts = re.findall(r'python -c "([^"]*)"', "\n".join(command for job in JOBS for command in commands(job)))
    nodes = [node for script in scripts for node in ast.walk(ast.parse(script)) if isinstance(node, ast.ImportFrom)]
    assert nodes
    for node in nodes:
        exec(ast.unparse(node), {})


def test_the_oldest_stack_runs_the_benchmark() -> None:
    """The oldest torch of the trainer, the oldest Triton, and no package of the trainer's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = re.findall(r"^torch>=([\d.]+),", "\n".join(project["optional-dependencies"]["train"]), re.MULTILINE)
    (triton,) = re.findall(r"^triton>=([\d.]+);", "\n".join(project["dependencies"]), re.MULTILINE)
    job = "slow/oldest"
    steps = JOBS[job]["steps"]
    (python,) = (step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", ""))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    (install,) = (command for command in commands(job) if "pip install" in command)
    packages = {word for word in install.partition(" install ")[2].split() if not re.match("-|https:", word)}
    assert packages == {f"torch=={torch}.0+cpu", f"triton=={triton}.0", "numpy", "pytest", "hypothesis"}
    assert "PYTHONPATH=. python -m bench --suite gpu --tiny" in commands(job)
