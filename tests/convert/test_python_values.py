"""The values that `rlplus convert` reads of Python files, beside the ones that these pass to TRL when they run.

A value that is read is the value in every run, and each keyword is in the result.
"""

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlplus.tools.convert import convert
from rlplus.tools.convert.names import READ, called
from rlplus.tools.convert.python_script import read_python
from rlplus.tools.convert.trl_arguments import DEFAULTS
from rlplus.train.config.synonyms import TRL, WITHOUT

FOLDER = Path(__file__).parent / "scripts"
HEAD = "import os\nfrom trl import GRPOConfig, GRPOTrainer\nfrom peft import LoraConfig\nFLAG = os.environ['FLAG']\n"
CONFIG = "GRPOConfig(learning_rate=X, beta=0.5)"

# Scripts, with the values that must be read, and the names that must not.
SCRIPTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "plain": (f"X = 2\n{CONFIG}", {"learning_rate": 2, "beta": 0.5}, set()),
    "chained": ("X = Y = 2\nGRPOConfig(a=X, b=Y)", {"a": 2, "b": 2}, set()),
    "annotated": ("X: float = 3.5\nGRPOConfig(a=X)", {"a": 3.5}, set()),
    "twice": (f"X = 2\n{CONFIG}\nX = 3", {"beta": 0.5}, {"learning_rate"}),
    "branches": (f"if FLAG == '1':\n    X = 1\nelse:\n    X = 2\n{CONFIG}", {}, {"learning_rate"}),
    "expression": (f"X = 1 if FLAG == '1' else 2\n{CONFIG}", {}, {"learning_rate"}),
    "loop": (f"for X in (1, 2):\n    pass\n{CONFIG}", {}, {"learning_rate"}),
    "argument": (f"X = 1\ndef f(X):\n    {CONFIG}\nf(2)", {}, {"learning_rate"}),
    "default argument": (f"def f(X=2):\n    {CONFIG}\nf()", {}, {"learning_rate"}),
    "lambda": (f"X = 1\n(lambda X: {CONFIG})(5)", {}, {"learning_rate"}),
    "comprehension": (f"X = 1\n[{CONFIG} for X in (7,)]", {}, {"learning_rate"}),
    "star import": ("pi = 1\nfrom math import *\nGRPOConfig(a=pi, b=2)", {"b": 2}, {"a"}),
    "match": (f"X = 1\nmatch 2:\n    case X:\n        pass\n{CONFIG}", {}, {"learning_rate"}),
    "exception": (f"X = 1\ntry:\n    pass\nexcept ValueError as X:\n    pass\n{CONFIG}", {}, {"learning_rate"}),
    "arithmetic": (
        "N = 3\nGRPOConfig(a=2 ** 11, b=N * (N + 1), c=-7 // 2, d=-7 % 4, e=1 / 4, f=-N,"
        " g='a' + f'b{N}{N + 1}', h=1e-6 * 3)",
        {"a": 2048, "b": 12, "c": -4, "d": 1, "e": 0.25, "f": -3, "g": "ab34", "h": 3e-6}, set(),
    ),
    "not evaluated": (
        "GRPOConfig(a=int('3'), b=f'{2:03d}', c=3 < 4, d='x' * 3, e=2 if FLAG else 3, f=1 << 3)",
        {}, {"a", "b", "c", "d", "e", "f"},
    ),
    "containers": (
        "B = [1, 2]\nD = {'x': 3, 'y': [4]}\nE = [4]\nGRPOConfig(a=B, b=D['x'], c=(1, 'z'), d=E, e=E[0])",
        {"a": [1, 2], "b": 3, "c": [1, "z"]}, {"d", "e"},
    ),
    "two tables": (
        "A = dict(learning_rate=1, epsilon=int('3'))\nB = {'beta': 0.5, 'seed': int('4')}\nGRPOConfig(**A, **B, a=1)",
        {"learning_rate": 1, "beta": 0.5, "a": 1}, {"epsilon", "seed"},
    ),
    "tables in tables": (
        "A = {'x': 1, 'y': 2}\nB = {**A, 'y': 3}\nGRPOConfig(**B, d={'e': {'f': 4, 'g': int('5')}})",
        {"x": 1, "y": 3, "d.e.f": 4}, {"d.e.g"},
    ),
    "unknown table in a table": (
        "B = {'x': 1, **dict([('x', 5)]), 'y': 3}\nGRPOConfig(**B)", {"y": 3}, {"x", "**dict([('x', 5)])"},
    ),
    "table of a branch": ("A = {'x': 1}\nif FLAG == '1':\n    A = {'x': 2}\nGRPOConfig(**A)", {}, {"**A"}),
    "config's method": (f"X = 1\nc = {CONFIG}\nc.change()", 
     {}, {"learning_rate", "beta", "c.change(), where the config may be changed"}),
    "LoRA": (
        "GRPOTrainer(args=GRPOConfig(), peft_config=LoraConfig(r=4, use_rslora=True, bias=FLAG))",
        {"LoraConfig.r": 4, "LoraConfig.use_rslora": True}, {"LoraConfig.bias"},
    ),
    "LoRA of a branch": (
        "p = None\nif FLAG == '1':\n    p = LoraConfig(r=4)\nGRPOTrainer(args=GRPOConfig(), peft_config=p)",
        {}, {"GRPOTrainer.peft_config"},
    ),
    "two LoRAs": (
        "p = LoraConfig(r=4)\nif FLAG == '1':\n    p = LoraConfig(r=8)\nGRPOTrainer(args=GRPOConfig(), peft_config=p)",
        {}, {"GRPOTrainer.peft_config", "LoraConfig.r"},
    ),
    "trainer": (
        "E = type\nGRPOTrainer('m', print, environment_factory=E, tools=[print], callbacks=[], args=GRPOConfig())",
        {"GRPOTrainer.model": "m", "GRPOTrainer.reward_funcs": ["trl.print"], "GRPOTrainer.callbacks": []},
        {"GRPOTrainer.environment_factory", "GRPOTrainer.tools"},
    ),
    "model of a branch": (
        "m = 'a'\nif FLAG == '1':\n    m = 'b'\nGRPOTrainer(m, args=GRPOConfig())", {}, {"GRPOTrainer.model"},
    ),
    "rewards changed": (
        "r = [print]\nr += [len]\nGRPOTrainer('m', r, args=GRPOConfig())", {}, {"GRPOTrainer.reward_funcs"},
    ),
}  # fmt: skip


class Recorder:
    """Stands in for a class of another library. calls: what it made, and an attribute, by the name of a keyword."""

    def __init__(self, name: str, calls: dict[str, Any]) -> None:
        self.name, self.calls = name, calls

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        names = ("model", "reward_funcs") if self.name == "GRPOTrainer" else ("output_dir",)
        prefix = "" if self.name == "GRPOConfig" else f"{self.name}."
        given = dict(zip(names, positional, strict=False)) | keywords
        made = type(self.name, (), {"change": lambda this: setattr(this, "beta", 8)})()
        made.__dict__.update(given)
        self.calls.update({f"{prefix}{name}": (made, name) for name in given})
        return made


def passed(text: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments at the end of a run of the script, flat."""
    calls: dict[str, Any] = {}
    for module, names in {"trl": ("GRPOConfig", "GRPOTrainer"), "peft": ("LoraConfig",)}.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name in names:
            setattr(sys.modules[module], name, Recorder(name, calls))
    monkeypatch.setenv("FLAG", flag)
    exec(compile(HEAD + text, "script", "exec"), {"__name__": "__main__"})
    ends: dict[str, Any] = {}
    for name, (made, attribute) in calls.items():
        flatten(name, getattr(made, attribute), ends)
    return ends


def flatten(name: str, value: Any, ends: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            flatten(f"{name}.{key}", inner, ends)
    else:
        ends[name] = list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_value_that_is_read_is_the_value_of_every_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, known, unknown = SCRIPTS[name]
    (path := tmp_path / "a.py").write_text(HEAD + text)
    script = read_python(HEAD + text, "a.py")
    assert {key: script.settings.get(key, "absent") for key in known} == known
    assert unknown <= script.unread.keys()
    assert not script.settings.keys() & script.unread.keys()
    for flag in "01":
        for key, value in passed(text, flag, monkeypatch).items():
            if key in script.settings and key != "GRPOTrainer.reward_funcs":
                assert script.settings[key] == value, key
            elif not key.startswith("GRPOTrainer.") and key not in script.unread:
                assert any(mark.startswith("**") for mark in script.unread), key
    result = convert_or_refuse(path)
    for key in (*script.settings, *script.unread):
        assert result is None or key in result, key


def convert_or_refuse(path: Path) -> str | None:
    try:
        return convert(path).text
    except ValueError:
        return None


# 8 is no value of these.
REFUSED = {"reward_weights", "top_entropy_quantile", "trust_remote_code", "warmup_ratio"}


@pytest.mark.parametrize("name", sorted({*TRL, *WITHOUT["TRL"], *DEFAULTS}))
def test_a_keyword_that_is_used_or_not_is_in_the_result(name: str, tmp_path: Path) -> None:
    for value in (repr(DEFAULTS.get(name, 8)), "other()"):
        (path := tmp_path / "a.py").write_text(f"GRPOConfig(\n{name}={value})")
        result = convert_or_refuse(path)
        assert result is None or f"{name} (line 2" in result or f"{name}: line 2" in result, (name, value)
        assert result or name in REFUSED, name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_each_keyword_of_the_scripts_is_in_the_result(path: Path) -> None:
    result = convert(path, gpus=4 if path.stem == "trl_accumulation" else 1).text
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    keywords = [keyword.arg for call in calls if called(call) in READ for keyword in call.keywords]
    assert keywords
    for name in keywords:  # the three are made by calls with keywords
        assert name in (None, "args", "peft_config", "train_dataset") or name in result


LOADED = "from datasets import load_dataset\n"


@pytest.mark.parametrize(
    ("text", "path", "listed"),
    [
        ("e = load_dataset('x/test')\nd = load_dataset('x/y', 'main')\nGRPOTrainer(train_dataset=d, eval_dataset=e)",
         "hf://x/y/main/train", {"load_dataset('x/test')", "GRPOTrainer.eval_dataset"}),
        ("d = load_dataset('x/y')\nd = d.map(f)\nGRPOTrainer(train_dataset=d['test'])", "hf://x/y/test",
         {"GRPOTrainer.train_dataset.map"}),
        ("def get():\n    return load_dataset('x/y', revision='a').filter(f)\nGRPOTrainer(train_dataset=get())",
         "hf://x/y/train", {"GRPOTrainer.train_dataset.filter", "load_dataset.revision"}),
        ("d = load_dataset('x/y')\nif z:\n    d = load_dataset('x/z')\nGRPOTrainer(train_dataset=d)", "FILL-IN.jsonl",
         {"GRPOTrainer.train_dataset", "load_dataset('x/y')", "load_dataset('x/z')"}),
        ("d = load_dataset('x/y')\nd, e = f(d)\nGRPOTrainer(train_dataset=d)", "FILL-IN.jsonl",
         {"load_dataset('x/y')"}),
        ("d = load_dataset('x/y', split=s)\nGRPOTrainer(train_dataset=d)", "FILL-IN.jsonl", {"load_dataset.split"}),
        ("d = load_dataset('x/y')[s]\nGRPOTrainer(train_dataset=d)", "FILL-IN.jsonl", {"load_dataset.split"}),
        ("GRPOTrainer(train_dataset=load_dataset('json', data_files='a.jsonl', split='train[:9]'))", "FILL-IN.jsonl",
         {"load_dataset.split", "load_dataset.data_files"}),
        ("load_dataset('x/y')", "FILL-IN.jsonl", {"load_dataset('x/y')"}),
        ("def f():\n    return f()\nGRPOTrainer(train_dataset=f())", "FILL-IN.jsonl", {"GRPOTrainer.train_dataset"}),
    ],
)  # fmt: skip
def test_the_training_data_are_the_trainers(text: str, path: str, listed: set[str], tmp_path: Path) -> None:
    (script := tmp_path / "a.py").write_text(f"{LOADED}c = GRPOConfig(output_dir='o')\n{text}")
    converted = convert(script)
    assert converted.config.data.path == path
    lines = [*converted.lost, *converted.missing]
    for name in listed:
        assert any(name in line for line in lines), (name, lines)
    assert (path == "FILL-IN.jsonl") == any(line.startswith("data.path:") for line in converted.missing)


def test_a_grader_of_the_scripts_own_is_not_trls(tmp_path: Path) -> None:
    trainer = "GRPOTrainer('m', accuracy_reward, args=GRPOConfig())"
    (path := tmp_path / "a.py").write_text(f"from trl.rewards import accuracy_reward\n{trainer}")
    assert convert(path).config.reward.kind == "math_verify"
    for own in ("from mine import accuracy_reward", "def accuracy_reward(completions):\n    return []"):
        path.write_text(f"{own}\n{trainer}")
        assert convert(path).config.reward.function == "rewards.py:accuracy_reward"


def test_the_reasons_of_what_surrounds_the_config(tmp_path: Path) -> None:
    text = "GRPOTrainer('m', f, environment_factory=E, args=GRPOConfig(lr_scheduler_kwargs={'num_cycles': 2}),"
    (path := tmp_path / "a.py").write_text(f"{text} peft_config=LoraConfig(use_rslora=True))")
    lost = convert(path).lost
    assert (
        "GRPOTrainer.environment_factory (line 1): environments are rollout.environment here, see docs/environments.md"
        in lost
    )
    assert "LoraConfig.use_rslora (line 1): no counterpart" in lost
    assert "lr_scheduler_kwargs.num_cycles (line 1): train.lr_min_ratio" not in lost
    assert any(line.startswith("lr_scheduler_kwargs.num_cycles (line 1): ") for line in lost)


@pytest.mark.parametrize(
    "text",
    [
        "GRPOConfig(beta=1 // 0)", "GRPOConfig(beta=1 / 0)", "GRPOConfig(beta=1 % 0)", "GRPOConfig(beta=10**400 / 3)",
        f"GRPOConfig(beta=1{'0' * 400} / 3)", f"GRPOConfig(beta=1{'0' * 400})", f"GRPOConfig(seed=1{'0' * 4000})",
        f"GRPOConfig(beta={'-' * 20_000}1)", f"GRPOConfig(beta=1{' + 1' * 20_000})", f"GRPOConfig(beta={'(' * 20_000})",
        f"GRPOConfig(beta={'-' * 500}1)", f"GRPOConfig(beta=1{' + 1' * 500})", "GRPOConfig(beta=9 ** 9 ** 9)",
        "GRPOConfig(beta=(-8) ** 0.5)", "GRPOConfig(beta=2.0 ** 64 ** 3)", "X = Y\nY = X\nGRPOConfig(beta=X)",
        "GRPOConfig(beta=\0)", "GRPOConfig(*a, **b, beta=[1][5])", "GRPOConfig(beta={1: 2}['a'])",
        "GRPOConfig(beta=[1]['a'])", "GRPOConfig(**{1: 2, f(): 3})",
        "X = {**X, 'a': X}\nGRPOConfig(**X)", "setattr(GRPOConfig(), 'a', 1)", "c = GRPOConfig()\nsetattr(c)",
    ],
    ids=range(24),
)  # fmt: skip
def test_no_file_ends_in_a_traceback(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.py").write_text(text)
    result = convert_or_refuse(path)
    assert result is None or "beta" in result


@pytest.mark.parametrize("value", ["f'{{{0}}}{{{0}}}'", "{0} + {0}", "[{0}, {0}]", "{{**{0}, 'b{1}': {{**{0}}}}}"])
def test_values_that_double_have_an_end(value: str, tmp_path: Path) -> None:
    """Evaluated as they are, 60 of them take years."""
    lines = ["A0 = {}" if "**" in value else "A0 = 'x'"]
    lines += [f"A{i + 1} = {value.format(f'A{i}', i)}" for i in range(60)]
    (path := tmp_path / "a.py").write_text(
        "\n".join([*lines, "GRPOConfig(output_dir=A60, model_init_kwargs=A60, **A60)"])
    )
    text = convert_or_refuse(path)
    assert text is None or "line 62" in text
