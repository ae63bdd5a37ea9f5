"""Commands that compute nothing with tensors import no torch, and none of the libraries around it."""

import json
import sys
from pathlib import Path

import processes
import pytest
from report_pages import RLPLUS, evaluation, keep, kept, step_line
from trainer_runs import environment

from rlplus.train.evaluation.results import save_results

COMMAND = """
import importlib, sys
main = importlib.import_module(sys.argv[1]).main
try:
    status = main(sys.argv[2:])
except SystemExit as end:
    status = end.code
slow = {"accelerate", "datasets", "deepspeed", "matplotlib", "pandas", "tokenizers", "torch", "transformers", "triton"}
slow |= {"experiments", "vllm"}
assert not slow & set(sys.modules), slow & set(sys.modules)
sys.exit(status)
"""


def check(module: str, *arguments: str, status: int = 0) -> str:
    """Its output; a failure if it ends with another status, or imports what is slow."""
    done = processes.run([sys.executable, "-c", COMMAND, module, *arguments], env=environment())
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_reports_and_samples(tmp_path: Path) -> None:
    """A run with curves, results with intervals, and samples: the page, and the samples in the terminal."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(RLPLUS)
    (run / "metrics.jsonl").write_text("".join(json.dumps(step_line(i)) + "\n" for i in range(1, 9)))
    save_results(run, {"amc": evaluation((1, 5, 8), "amc")})
    (run / "samples").mkdir()
    keep(run / "samples", "step-000001", kept())
    page = tmp_path / "page.html"
    check("rlplus.tools.cli", "report", str(run), "-o", str(page))
    assert all(part in page.read_text() for part in ("Training reward", "amc", "step 1"))
    assert "1+1=" in check("rlplus.tools.cli", "samples", str(run), "-n", "1")


def test_report_on_a_comparison(tmp_path: Path) -> None:
    """Its file alone is read: of its runs, and of what makes them, nothing is imported."""
    results = Path(__file__).parents[2] / "experiments/compare/results/segments.json"
    check("rlplus.tools.cli", "report", str(results), "-o", str(tmp_path / "page.html"))
    assert "Difference" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage: rlplus-bench"),
        ([], 2, "want --suite, --list or --model"),
        (["--suite", "cpu", "--repeats", "0"], 2, "argument --repeats: want a number >= 1; got 0"),
        (["submit", "--help"], 0, "usage: rlplus-bench submit"),
    ],
)
def test_rlplus_bench(arguments: list[str], status: int, said: str) -> None:
    assert said in check("rlplus.bench.__main__", *arguments, status=status)
