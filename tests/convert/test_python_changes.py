"""Whatever changes a name, or a config, of a Python file makes what it changes unknown to `rlplus convert`."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlplus.tools.convert.python_script import read_python

HEAD = "import sys\nfrom trl import GRPOConfig, GRPOTrainer\nfrom peft import LoraConfig\n"
MADE = "c = GRPOConfig(beta=1, seed=2, kwargs={'x': 1})\n"

# Files in which beta, seed or kwargs.x ends up with another value than the call has.
CHANGED = [
    "def get():\n    return GRPOConfig(beta=1)\nc = get()\nc.beta = 5",
    "class C:\n    pass\nC.c = GRPOConfig(beta=1)\nC.c.beta = 5",
    "class C:\n    def __init__(self):\n        self.c = GRPOConfig(beta=1)\nd = C()\nd.c.beta = 5",
    "for c in [GRPOConfig(beta=1)]:\n    c.beta = 5", "c = [GRPOConfig(beta=1)]\nc[0].change()",
    "c, d = GRPOConfig(beta=1), 2\nc.change()", "(c := GRPOConfig(beta=1)).change()",
    "c = None or GRPOConfig(beta=1)\nc.change()", "c = {'d': GRPOConfig(beta=1)}\nc['d'].change()",
    "c = GRPOConfig(beta=1) if FLAG else None\nc.change()", "GRPOConfig(beta=1).change()",
    "(lambda c: c.change())(GRPOConfig(beta=1))", "[c.change() for c in [GRPOConfig(beta=1)]]",
    "c = d = GRPOConfig(beta=1)\nd.change()", f"{MADE}d = c\nd.change()", f"{MADE}f = c.change\nf()",
    f"{MADE}c.change()", f"{MADE}(lambda: c)().change()", f"{MADE}[c][0].change()",
    f"{MADE}def f(c):\n    c.change()\nf(c)", f"{MADE}def f(d=c):\n    d.change()\nf()",
    f"{MADE}with c as d:\n    d.change()", f"{MADE}getattr(c, 'change')()", f"{MADE}setattr(c, 'beta', 5)",
    f"{MADE}for k in ['beta']:\n    setattr(c, k, 5)", f"{MADE}object.__setattr__(c, 'beta', 5)",
    f"{MADE}s = setattr\ns(c, 'beta', 5)", f"{MADE}c.__dict__['beta'] = 5", f"{MADE}c.__dict__.update(beta=5)",
    f"{MADE}d = c.__dict__\nd['beta'] = 5", f"{MADE}vars(c)['beta'] = 5", f"{MADE}vars(c).update(beta=5)",
    f"{MADE}c.beta *= 5", f"{MADE}c.beta, d = 5, 6", f"{MADE}for c.beta in [5]:\n    pass",
    f"{MADE}del c.beta\nc.beta = 5", f"{MADE}globals()['c'].change()", f"{MADE}locals()['c'].change()",
    f"{MADE}eval('c').change()", f"{MADE}exec('c.beta = 5')", f"{MADE}sys.modules[__name__].c.beta = 5",
    f"{MADE}import builtins as b\nb.exec('c.beta = 5')", f"{MADE}c.kwargs['x'] = 5", f"{MADE}c.kwargs.update(x=5)",
    f"{MADE}d = c.kwargs\nd['x'] = 5", f"{MADE}(c.kwargs or 1).update(x=5)",
    f"{MADE}t = GRPOTrainer(args=c)\nt.args.beta = 5", f"{MADE}t = GRPOTrainer(args=c)\nt.args.change()",
    f"{MADE}t = GRPOTrainer(args=c)\nd = t.args\nd.change()",
    f"{MADE}t = GRPOTrainer(args=c)\nsetattr(t.args, 'beta', 5)",
    "def GRPOConfig(beta):\n    return SimpleNamespace(beta=5)\nc = GRPOConfig(beta=1)\nEND = c.beta",
    "t = GRPOTrainer(args=GRPOConfig(beta=1))\nt.args.change()", "GRPOTrainer(args=GRPOConfig(beta=1)).args.beta = 5",
    f"{MADE}class D:\n    d = c\nD.d.change()", f"{MADE}d = {{**{{'c': c}}}}\nd['c'].change()",
    f"{MADE}import copy\nc = copy.copy(c)\nc.change()", f"{MADE}c.__setattr__('beta', 5)",
    f"{MADE}setattr(*[c, 'beta'], 5)",
    f"{MADE}def print(c):\n    c.change()\nprint(c)", f"{MADE}class C:\n    print = Config.change\nC.print(c)",
    f"{MADE}def GRPOTrainer(args):\n    args.change()\nGRPOTrainer(args=c)",
    f"{MADE}import importlib\nimportlib.import_module('builtins').exec('c.beta = 5')",
    f"{MADE}__import__('builtins').exec('c.beta = 5')",
]  # fmt: skip
# Lines around K = [1], D = {'x': 1, 'y': [1]} and X = 1, after which one of them is another.
SET = [
    "globals()['X'] = 5", "vars()['X'] = 5", "locals()['X'] = 5", "setattr(sys.modules[__name__], 'X', 5)",
    "exec('X = 5')", "eval('[X := 5]')", "sys.modules[__name__].X = 5", "sys.modules[__name__].__dict__['X'] = 5",
    "(lambda: 0).__globals__['X'] = 5", "X, Y = 5, 3", "*Y, X = 2, 5", "class X:\n    pass",
    "import builtins\nbuiltins.exec('X = 5')",
    "sys._getframe().f_globals['X'] = 5", "E = K\nE.append(5)", "E = (K,)\nE[0].append(5)", "E = D['y']\nE.append(5)",
    "E = {**D}\nE['y'].append(5)", "E = dict(D)\nE['y'].append(5)", "E = dict(**D)\nE['y'].append(5)",
    "def f(**k):\n    k['y'].append(5)\nf(**D)", "for E in [K, D['y']]:\n    E.append(5)", "D['y'] += [5]",
    "D |= {'x': 5}", "K += [5]", "K[0] = 5", "del D['x']\nD['x'] = 5", "D.setdefault('y').append(5)",
    "f = K.append\nf(5)", "list.append(K, 5)", "X = 5", "X += 4", "def f():\n    globals()['X'] = 5\nf()", "[X := 5]",
    "import math as X\nX = 5", "for X in [5]:\n    pass", "max([K, [0]]).append(5)", "(K or D).append(5)",
    "with memoryview(b'') as X:\n    pass\nX = 5", "D['y'].append(5)", "D.update(x=5)", "K.append(5)", "K *= 5",
    "sys.modules[__name__].__setattr__('X', 5)", "import importlib\nimportlib.import_module('builtins').exec('X = 5')",
    "from importlib import import_module as f\nf('builtins').exec('X = 5')",
    "def len(E):\n    E.append(5)\nlen(K)", "def dict(**E):\n    E['y'].append(5)\ndict(**D)",
    "repr = list.clear\nrepr(K)",
]  # fmt: skip


class Config(SimpleNamespace):
    """Stands in for the configs, and for the trainer."""

    def change(self) -> None:
        self.beta = 5

    def __enter__(self) -> "Config":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def ends(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The config's fields after a run of the file; keys of a dictionary have dotted names."""
    made: list[Config] = []

    def make(**keywords: Any) -> Config:
        made.append(Config(**keywords))
        return made[-1]

    for name, members in {"trl": {"GRPOConfig": make, "GRPOTrainer": Config}, "peft": {"LoraConfig": Config}}.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
    module = ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", module)
    module.__dict__.update(SimpleNamespace=SimpleNamespace, Config=Config, FLAG=True)
    exec(compile(text, "script", "exec"), module.__dict__)
    fields = vars(made[0] if made else module.c)
    return {f"{name}.{key}" if key else name: inner
            for name, value in fields.items()
            for key, inner in (value.items() if isinstance(value, dict) else [("", value)])}  # fmt: skip


def check(text: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Compare what is read with what a run ends with; -> the names of known values."""
    script = read_python(HEAD + text, "a.py")
    for name, value in ends(HEAD + text, monkeypatch).items():
        assert (
            name in script.settings or name in script.unread or any(mark in "".join(script.unread) for mark in "*,")
        ), (name, text)
        assert script.settings.get(name, value) == value, (name, text)
    return {*script.settings}


@pytest.mark.parametrize("text", CHANGED)
def test_a_config_that_is_changed_is_unknown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(text, monkeypatch) < {"beta", "seed", "kwargs.x"}


@pytest.mark.parametrize("line", SET)
@pytest.mark.parametrize("place", ["before", "in a function"])
def test_a_name_that_is_changed_is_unknown(line: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "X = 1\nK = [1]\nD = {'x': 1, 'y': [1]}\n"
    if place == "before":
        text = f"{start}{line}\n"
    else:
        inner = "".join(f"    {part}\n" for part in line.splitlines())
        text = f"def change():\n    global X, K, D, E, f\n{inner}{start}change()\n"
    try:
        known = check(f"{text}c = GRPOConfig(beta=X, seed=K, a=D['x'], b=D['y'])", monkeypatch)
    except SyntaxError:
        return
    assert known < {"beta", "seed", "a", "b"}


@pytest.mark.parametrize("use", [
    "", "print(c)", "print(c.beta)", "GRPOTrainer(args=c)", "GRPOTrainer('m', len, c)", "print(c.beta + 1)",
    "d = c.beta", "if c.seed: pass",
])  # fmt: skip
def test_a_config_that_is_only_read_is_known(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "__init__", lambda self, *_, **given: vars(self).update(given))
    assert {"beta", "seed", "kwargs.x"} <= check(f"{MADE}{use}", monkeypatch)


@pytest.mark.parametrize(("text", "doubted"), [
    ("p = LoraConfig(r=4, bias='all')\np.r = 5\nGRPOTrainer(args=GRPOConfig(), peft_config=p)", {"LoraConfig.r"}),
    ("p = q = LoraConfig(r=4)\nGRPOTrainer(args=GRPOConfig(), peft_config=p)", {"LoraConfig.r"}),
    ("p = LoraConfig(r=4)\nf(p)\nGRPOTrainer(args=GRPOConfig(), peft_config=p)", {"LoraConfig.r"}),
    ("t = GRPOTrainer(model='m', args=GRPOConfig())\nt.model = 'n'", {"GRPOTrainer.model"}),
    ("t = GRPOTrainer(model='m', args=GRPOConfig())\nsetattr(t, n, 'n')", {"GRPOTrainer.model"}),
    ("c = GRPOConfig()\ndef f(x):\n    x.beta = 5", {"beta"}),
])  # fmt: skip
def test_other_calls_and_attributes_of_anything_are_doubted(text: str, doubted: set[str]) -> None:
    script = read_python(HEAD + text, "a.py")
    assert doubted <= script.unread.keys()
    assert not doubted & script.settings.keys()


@pytest.mark.parametrize("change", [
    "d['train'] = d['train'].filter(f)", "d['train'].set_transform(f)", "d.set_transform(f)", "del d['x']", "f(d)",
    "e = [d]", "e = d", "d['train'].x = 5", "d.update(x=5)", "setattr(d, 'x', 5)", "d |= e", "globals()['d'] = f(d)",
    "(d or e).set_transform(f)",
])  # fmt: skip
def test_data_that_are_changed_are_unknown(change: str) -> None:
    text = f"d = load_dataset('x/y')\n{change}\nGRPOTrainer(args=GRPOConfig(), train_dataset=d['train'])"
    script = read_python(HEAD + text, "a.py")
    assert "GRPOTrainer.train_dataset" in script.unread
    assert "load_dataset.path" not in script.settings
