"""The examples in the docstrings of the extension points run, and their configurations are valid."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from head_cases import run, sample
from run_files import MINIMAL

from rlplus.common.lazy import import_function
from rlplus.loss import Objective, backends
from rlplus.loss.backends import selection
from rlplus.loss.objective import objective
from rlplus.loss.objective.surrogates import INTERNAL
from rlplus.train import reward
from rlplus.train.config import Config, load_config
from rlplus.train.recipe import Recipe, make_recipe
from rlplus.train.reward import Scorer
from rlplus.train.rollout import Completion, Request, Response, Sampling, custom_engine, make_respond

EXAMPLE = re.compile(r"^( *)# (\w+\.py), for `(.+)`\n(?:\1.*\n|\n)+", re.MULTILINE)


def write_example(documented: object, folder: Path) -> str:
    """Write the example of a docstring to the file that it names; returns what it is for."""
    (found,) = EXAMPLE.finditer(f"{inspect.getdoc(documented)}\n")
    (folder / found[2]).write_text(inspect.cleandoc(found[0]) + "\n")
    code = [line for line in found[0].splitlines()[1:] if line.strip()]
    assert len(code) <= 6, "an example is short"
    return found[3]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def configured(documented: object, folder: Path) -> Config:
    """The configuration with the example's fragment, which is written to the folder."""
    fragment = yaml.safe_load(write_example(documented, folder))
    merged = {key: value if key == "reward" else MINIMAL.get(key, {}) | value for key, value in fragment.items()}
    (folder / "run.yaml").write_text(yaml.safe_dump(MINIMAL | merged))
    return load_config(folder / "run.yaml")


def test_a_recipe(here: Path) -> None:
    recipe = make_recipe(configured(Recipe, here))
    samples = [SimpleNamespace(reward=value, advantage=None) for value in (0.0, 1.0)]
    recipe.credit(SimpleNamespace(samples=samples))  # type: ignore[arg-type]
    assert [one.advantage for one in samples] == [-1.0, 1.0]


def test_a_surrogate(here: Path) -> None:
    name = configured(objective, here).algorithm.resolve().objective.internal
    try:
        head, constants = sample(11)
        sampled = constants | {"external": None, "behavior_logprob": None, "entropy_weight": None}
        out = run(head, sampled, Objective(internal=name), backend="torch")
        change = out["logprob"] - constants["old_logprob"]
        loss = -constants["advantage"] * change.exp() + change**2 / 2
        counted = constants["token_weight"].where(constants["advantage"] != 0, 0.0)
        torch.testing.assert_close(out["loss"], (counted * loss).sum())
    finally:
        del INTERNAL[name]


def test_a_grader(here: Path) -> None:
    with Scorer(configured(reward, here).reward) as scorer:
        scores = scorer(["It is four.", "It is", " . "], ["four"] * 3)
    assert [(score.value, score.status) for score in scores] == [(1.0, "ok"), (0.0, "ok"), (0.0, "unparsed")]


class Endless:
    """An engine and a tokenizer."""

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[Completion([5] * r.max_tokens, [-1.0] * r.max_tokens, truncated=True)] for r in requests]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [7] * len(text.split())


def test_a_rollout(here: Path) -> None:
    config, engine = configured(custom_engine, here), Endless()
    respond = make_respond(config.rollout.function, engine, 10)  # type: ignore[arg-type]
    task = SimpleNamespace(prompt=[1], answer="")
    ((got,),) = respond(engine, [task], [Request([1], 1, 40)], Sampling(1.0, 0))  # type: ignore[arg-type]
    assert got.tokens == [5] * 32 + [7] * 4 + [5] * 4
    assert got.trained == [token == 5 for token in got.tokens]
    assert Response(task, 40).room == 40


def test_a_backend(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'backend="rounded"' in write_example(backends, here)
    module: ModuleType = sys.modules[import_function("rounded.py:policy_loss").__module__]
    monkeypatch.setitem(sys.modules, "rlplus.loss.backends.rounded", module)
    monkeypatch.setitem(backends.MODULES, "rounded", "rounded")
    monkeypatch.setattr(selection, "BACKENDS", ("reference", *backends.MODULES))
    head, constants = sample(11)
    exact = constants["advantage"] + 2e-3
    got = run(head, constants | {"advantage": exact}, Objective(), backend="rounded")
    want = run(head, constants | {"advantage": exact.round(decimals=2)}, Objective(), backend="reference")
    for name in ("loss", "dhidden", "dweight"):
        torch.testing.assert_close(got[name], want[name])
