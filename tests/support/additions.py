"""An addition for each row of CONTRIBUTING.md's table: the files it touches, and code that shows that it works."""

from dataclasses import dataclass
from pathlib import Path

Change = str | tuple[tuple[str, str], ...]
RUN = """
from pathlib import Path
from run_files import write_minimal
from rlplus.train.config import load_config

def load(*overrides):
    return load_config(write_minimal(Path()), overrides)
"""


@dataclass(frozen=True)
class Addition:
    """A row of the table, tried.

    name: stands for NAME in the row. changes: a new file's text, or (old, new) for texts that stand once in a file.
    proof: runs in the copy, after RUN. tests: arguments of pytest there.
    """

    row: str
    name: str
    changes: dict[str, Change]
    proof: str = ""
    tests: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        for file, change in self.changes.items():
            path = root / file
            if isinstance(change, str):
                assert not path.exists(), f"{self.row}: {file} is there already"
                path.write_text(change)
                continue
            for old, new in change:
                text = path.read_text()
                assert text.count(old) == 1, f"{self.row}: want {old!r} once in {file}; found {text.count(old)} times"
                path.write_text(text.replace(old, new))


RECIPE = Addition(
    "a recipe",
    "extremes",
    {
        "rlplus/train/recipe/extremes.py": '''"""Training on the rollouts of the highest and the lowest reward."""

from collections.abc import Callable

from rlplus.train.algorithm.options import Extremes
from rlplus.train.recipe.plain import Batch, Recipe


class ExtremesRecipe(Recipe):
    """Keep `pairs` samples at either end."""

    options: Extremes

    def collect(self, draw: Callable[[], Batch]) -> Batch:
        batch, pairs = super().collect(draw), self.options.pairs
        samples = sorted(batch.samples, key=lambda sample: sample.reward)
        batch.samples = [*samples[:pairs], *samples[-pairs:]]
        return batch
''',
        "rlplus/train/recipe/__init__.py": (
            ('    "gate": "gate.', '    "extremes": "extremes.ExtremesRecipe",\n    "gate": "gate.'),
        ),
        "rlplus/train/algorithm/options.py": (
            (
                "\n\nclass Gate(RecipeOptions):",
                '''

class Extremes(RecipeOptions):
    """Only the rollouts with the highest and the lowest rewards (PODS)."""

    name: Literal["extremes"] = "extremes"
    pairs: Count = 2
    """Samples that are kept at either end."""


class Gate(RecipeOptions):''',
            ),
            ("AnyRecipe = (\n    Plain", "AnyRecipe = (\n    Extremes\n    | Plain"),
        ),
    },
    """
from rlplus.train.data import Sample
from rlplus.train.recipe import Batch, make_recipe
recipe = make_recipe(load("algorithm.preset=grpo", "algorithm.recipe.name=extremes", "algorithm.recipe.pairs=1"))
samples = [Sample([1], [2], 0, False, False, None, reward) for reward in (0.5, 0.0, 0.7, 1.0)]
assert [s.reward for s in recipe.collect(lambda: Batch([], samples, 0.0)).samples] == [0.0, 1.0]
""",
)

OPTION = Addition(
    "an option of a recipe",
    "gate",
    {
        "rlplus/train/algorithm/options.py": (
            (
                '    """Whether the rollouts of such a prompt are trained on, too."""\n',
                '    """Whether the rollouts of such a prompt are trained on, too."""\n'
                '    most: Count | None = None\n    """Demonstrations in a step, at most; null = all."""\n',
            ),
        ),
        "rlplus/train/recipe/gate.py": (
            ("for group in gated]\n        return", "for group in sorted(gated)[: self.options.most]]\n        return"),
        ),
    },
    """
from rlplus.train.config.json_schema import json_schema
assert "at most; null = all" in json_schema()["$defs"]["Gate"]["properties"]["most"]["description"]
from rlplus.train.data import Example, Sample
from rlplus.train.recipe import Batch, make_recipe
examples = [Example(i, (i,), "", (7, 8), demonstration_reward=1.0) for i in (0, 1)]
def demonstrations(*options):
    unsolved = [Sample([i], [9], i, False, False, None, reward=0.0) for i in (0, 1)]
    recipe = make_recipe(load("algorithm.preset=superrl", *options))
    return sum(sample.demonstration for sample in recipe.collect(lambda: Batch(examples, unsolved, 0.0)).samples)
assert (demonstrations(), demonstrations("algorithm.recipe.most=1")) == (2, 1)
""",
)

GRADER = Addition(
    "a grader",
    "ending",
    {
        "rlplus/train/reward/graders/ending.py": '''"""The end of a text."""

from collections.abc import Mapping
from typing import Any

from .base import Grade


def ending(text: str, answer: str, row: Mapping[str, Any]) -> Grade:
    """1 if the text ends with the answer."""
    return float(text.rstrip().endswith(answer)), "ok", ""
''',
        "rlplus/train/reward/graders/__init__.py": (
            (
                '    if name == "oat":\n',
                '    if name == "ending":\n        from .ending import ending\n\n        return ending\n'
                '    if name == "oat":\n',
            ),
        ),
        "rlplus/train/config/sections.py": (
            ('Literal["exact_match", "choice"', 'Literal["ending", "exact_match", "choice"'),
        ),
    },
    """
from rlplus.common.lazy import import_function
from rlplus.train.reward.graders import make_grader
grade = make_grader({**load("reward.kind=ending").reward.model_dump(), "columns": ()}, import_function)
assert [grade(text, "4", {})[:2] for text in ("It is 4", "4 it is")] == [(1.0, "ok"), (0.0, "ok")]
load("reward={function: {ending: 1.0, exact_match: 0.5}}")
""",
)

BENCHMARK = Addition(
    "a benchmark",
    "hmmt",
    {
        "rlplus/train/config/benchmarks.py": (
            ('    "amc": _math', '    "hmmt": _mathematical("hf://owner/hmmt/test"),\n    "amc": _math'),
        )
    },
    """
from rlplus.train.config.benchmarks import BENCHMARKS, is_test_benchmark
assert BENCHMARKS["hmmt"].layout({"problem": "1+1", "answer": 2}) == ("1+1", "2") and is_test_benchmark("HMMT")
config = load("evaluation={benchmarks: [hmmt]}")
assert config.evaluation.benchmarks == ["hmmt"]
""",
)

ENGINE = Addition(
    "a rollout engine",
    "echo",
    {
        "rlplus/train/rollout/echo_engine.py": '''"""An engine that repeats the prompt."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from rlplus.train.config import RolloutConfig
from rlplus.train.rollout.protocol import Completion, Request, Sampling


class EchoEngine:
    name = "echo"

    def __init__(self, config: RolloutConfig, model_path: str, **settings: Any) -> None: ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[Completion(list(r.prompt), [0.0] * len(r.prompt), True)] * r.n for r in requests]

    def push_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...
''',
        "rlplus/train/rollout/__init__.py": (
            ('ENGINES = {"transformers"', 'ENGINES = {"echo": "echo_engine.EchoEngine", "transformers"'),
        ),
        "rlplus/train/config/rollout_section.py": (('Literal["auto", "vllm"', 'Literal["auto", "echo", "vllm"'),),
    },
    """
from rlplus.train.rollout import Request, Sampling, make_engine
settings = {"dtype": "float32", "max_model_len": 8, "end_ids": [0], "pad_token_id": 0, "seed": 0}
engine = make_engine(load("rollout.engine=echo").rollout, "model", **settings)
((one, two),) = engine.generate([Request([5, 6], 2, 4)], Sampling(1.0, 0))
assert engine.name == "echo" and one == two and one.tokens == [5, 6]
""",
)

COMMAND = Addition(
    "a command",
    "hello",
    {
        "rlplus/tools/cli/hello.py": '''"""`rlplus hello`."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplus.tools.cli.common import Commands


def add(commands: "Commands") -> None:
    hello = commands.add_parser("hello", help="greets")
    hello.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    print("hello")
''',
        "rlplus/tools/cli/__init__.py": (
            ("    evaluate,\n", "    evaluate,\n    hello,\n"),
            ("(upload, env)", "(upload, env, hello)"),
        ),
    },
    """
import contextlib, io
from rlplus.tools.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert main(["hello"]) == 0
    with contextlib.suppress(SystemExit):
        main(["--help"])
assert printed.getvalue().startswith("hello\\n") and "greets" in printed.getvalue()
""",
)

KEY = Addition(
    "a key of the configuration",
    "sections",
    {
        "rlplus/train/config/sections.py": (
            (
                "    wandb: Text | None = None\n",
                '    notes: Text | None = None\n    """Text that is kept with the run."""\n'
                "    wandb: Text | None = None\n",
            ),
        ),
    },
    """
from run_files import problems
from rlplus.train.config.json_schema import json_schema
assert load("log.notes=first").log.notes == "first" and load().log.notes is None
assert json_schema()["$defs"]["LogConfig"]["properties"]["notes"]["description"] == "Text that is kept with the run."
assert any("nearest: log.notes" in line for line in problems(write_minimal(Path()), "log.nots=first"))
""",
)

TO_THE_TRAINER = (RECIPE, OPTION, GRADER, BENCHMARK, ENGINE, COMMAND, KEY)
