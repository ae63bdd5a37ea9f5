"""The toy task with demonstrations that a user can make: the base model's own right responses.

`prepare` calls the commands of the manual (docs/data.md): `rlplus eval` samples and grades the training problems, and
examples/own_demonstrations.py writes the data.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments import toy
from experiments.toy.base_model import ToyBase

ROOT = Path(__file__).parents[2]
RUN = ROOT / "experiments/demo.yaml"  # the reward, and the names of the columns
SAMPLING = (
    "evaluation.temperature=1",
    "evaluation.k=[1]",
    "rollout.engine=transformers",
    "rollout.max_response_length=31",
)


def prepare(folder: Path, seed: int, base: ToyBase = toy.PLAIN_BASE, samples: int = 8) -> None:
    """As `experiments.toy.prepare`, of which the demonstrations are replaced: null where no sample is right."""
    toy.prepare(folder, seed, base)
    folder = folder.resolve()
    data = folder / "train.jsonl"
    with TemporaryDirectory() as sampled:
        model = ("--model", folder / "model", "--data", data, "--output", sampled)
        _call("-m", "rlplus", "eval", RUN, *model, *SAMPLING, f"evaluation.samples={samples}", f"train.seed={seed}")
        own = (f"model.path={folder / 'model'}", f"data.path={data}", "--samples", sampled, "--output", data)
        _call(ROOT / "examples/own_demonstrations.py", RUN, *own)


def _call(*command: str | Path) -> None:
    """Python with these arguments; what it prints is shown where it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))} failed: {done.stdout}{done.stderr}")
