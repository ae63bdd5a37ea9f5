"""What an import loads: the losses need torch and triton, and reports, plans and configurations no trainer."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlplus.cli import TRAIN

ROOT = Path(__file__).parent.parent
LOSS = """
import torch
import rlplus
import rlplus.integrations.interface, rlplus.integrations.measures, rlplus.integrations.trl_loss

h, w, t = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4), torch.tensor([1, 2, 3])
inputs = {"advantage": torch.ones(3), "token_weight": torch.ones(3), "old_logprob": None}
rlplus.linear_policy_loss(h, w, t, **inputs, objective="rlplus").loss.backward()
assert rlplus.linear_logprob(h, w, t)[0].isfinite().all() and h.grad.any()
"""
SHOWN = "from rlplus.evaluation import load_results, result_table; from rlplus.report import write_report"
OURS = ("deepspeed", "experiments", "vllm")  # TRAIN has deepspeed, too
CASES = {
    "import rlplus": ("numpy", "torch", "triton", *TRAIN),
    LOSS: tuple(name for name in TRAIN if name != "numpy"),  # which torch imports where it is installed
    "import rlplus.config": ("numpy", "torch", "transformers", *OURS),
    f"import rlplus.evaluation, rlplus.report; {SHOWN}": ("accelerate", "torch", "transformers", "triton", *OURS),
    "import rlplus.plan, rlplus.plan.plan_text, rlplus.plan.search": OURS,
    "import rlplus.learner": ("torch", *OURS),
    "from rlplus.cli import main": TRAIN,
}


@pytest.mark.parametrize(("code", "absent"), CASES.items(), ids=[code.strip().split("\n")[0] for code in CASES])
def test_an_import_leaves_out(code: str, absent: tuple[str, ...]) -> None:
    code += "\nimport sys\nfound = [name for name in sys.argv[1:] if name in sys.modules]\nassert not found, found"
    done = subprocess.run([sys.executable, "-c", code, *absent], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
