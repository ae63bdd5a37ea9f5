"""Modules that imports load: the losses need torch and triton, and reports, plans and configurations no trainer."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rlplus.tools import cli
from rlplus.tools.cli import TRAIN

ROOT = Path(__file__).parents[2]
LOSS = """
import torch
import rlplus
import rlplus.integrations.interface, rlplus.integrations.measures, rlplus.integrations.trl_loss

h, w, t = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4), torch.tensor([1, 2, 3])
inputs = {"advantage": torch.ones(3), "token_weight": torch.ones(3), "old_logprob": None}
rlplus.linear_policy_loss(h, w, t, **inputs, objective="rlplus").loss.backward()
assert rlplus.linear_logprob(h, w, t)[0].isfinite().all() and h.grad.any()
"""
SHOWN = "rlplus.train.evaluation.results, rlplus.train.evaluation.table, rlplus.tools.report"
OURS = ("deepspeed", "experiments", "vllm")  # TRAIN has deepspeed, too
CASES = {
    "import rlplus": ("numpy", "torch", "triton", *TRAIN),
    LOSS: tuple(name for name in TRAIN if name != "numpy"),  # which torch imports where it is installed
    "import rlplus.train.config": ("numpy", "torch", "transformers", *OURS),
    f"import {SHOWN}": (
        "accelerate",
        "torch",
        "transformers",
        "triton",
        *OURS,
    ),
    "import rlplus.tools.watch": ("accelerate", "torch", "transformers", "triton", *OURS),
    "import rlplus.tools.plan, rlplus.tools.plan.plan_text, rlplus.tools.plan.search": OURS,
    "import rlplus.train.learner": ("torch", *OURS),
    "from rlplus.tools.cli import main": TRAIN,
}


def loaded(code: str, names: tuple[str, ...]) -> list[str]:
    """The modules, out of `names`, that a process which runs the code has loaded at its end."""
    code += "\nimport sys\nprint([name for name in sys.argv[1:] if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("code", "absent"), CASES.items(), ids=[code.strip().split("\n")[0] for code in CASES])
def test_an_import_leaves_out(code: str, absent: tuple[str, ...]) -> None:
    assert loaded(code, absent) == []


@pytest.mark.parametrize("command", [["train", "x.yaml"], ["plan", "x.yaml"], ["eval", "x"], ["report", "x"]])
def test_a_command_says_what_is_missing_and_how_to_install_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("deepspeed", "yaml") else name)
    assert cli.main(command) == 2
    want = 'needs packages that are not installed (deepspeed, yaml): pip install -e ".[train]"'
    assert capsys.readouterr().err == f"rlplus {command[0]}: {want}\n"


def test_on_a_python_too_old_for_the_trainer_a_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.sys, "version_info", (3, 10, 13))
    assert cli.main(["train", "x.yaml"]) == 2
    assert "rlplus train: want Python 3.11 or later for all but the loss" in capsys.readouterr().err


def test_the_environment_is_shown_without_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["env"]) == 0


def test_an_older_torch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.9.1+cu128")
    with pytest.raises(
        ImportError, match=r"^want torch 2\.10 or later for the operations of rlplus; got 2\.9\.1\+cu128$"
    ):
        runpy.run_path(str(ROOT / "rlplus/loss/guard/scope.py"))
