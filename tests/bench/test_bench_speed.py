"""The quick cases as pytest-benchmark tests: `pytest -m benchmark tests/bench/test_bench_speed.py`."""

import importlib.util
from functools import cache

import pytest

from rlplus.bench.case import Case
from rlplus.bench.cases import Head, Inputs
from rlplus.bench.measure import call, clear, reason
from rlplus.bench.peers import METHODS, Unavailable
from rlplus.bench.suites import quick

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed"
    ),
]
PAIRS = [
    pytest.param(case, name, id=f"{case.name}-{case.dtype}-{name}")
    for case in quick()
    if not case.name.startswith("sweep")
    for name in ("bare-1u" if case.forward else "bare-3u", *case.methods)
]


@cache
def inputs_of(case: Case) -> Inputs:
    return Inputs(Head(case, "cpu"), case.shares[0])


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_speed(case: Case, name: str, request: pytest.FixtureRequest) -> None:
    method, inputs = METHODS[name], inputs_of(case)
    if method.device == "cuda":
        pytest.skip("needs CUDA")
    try:
        step = method.prepare(inputs)
    except (ImportError, Unavailable) as error:
        pytest.skip(reason(error, method))
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = f"{case.name} {case.dtype}"
    benchmark(lambda: (clear(inputs), call(method, inputs, step)))
