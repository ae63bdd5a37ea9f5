"""The quick cases as pytest-benchmark tests: `pytest -m benchmark tests/test_bench_speed.py`."""

import importlib.util

import pytest

from rlplus.bench.cases import Case, Head, Inputs
from rlplus.bench.measure import call, clear, reason
from rlplus.bench.peers import METHODS
from rlplus.bench.suites import quick

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed"
    ),
]
CASES = [case for case in quick() if not case.name.startswith("sweep")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.name}-{case.dtype}")
def inputs(request: pytest.FixtureRequest) -> Inputs:
    case: Case = request.param
    return Inputs(Head(case, "cpu"), case.shares[0])


@pytest.mark.parametrize("name", METHODS)
def test_speed(name: str, inputs: Inputs, request: pytest.FixtureRequest) -> None:
    method, case = METHODS[name], inputs.head.case
    if name not in (*case.methods, "bare-1u" if case.forward else "bare-3u"):
        pytest.skip("not of this case")
    if method.device == "cuda":
        pytest.skip("needs CUDA")
    try:
        step = method.prepare(inputs)
    except Exception as error:
        pytest.skip(reason(error, method))
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = f"{case.name} {case.dtype}"
    benchmark(lambda: (clear(inputs), call(method, inputs, step)))
