"""Rounds of the benchmark, their range, and which differences are called none."""

from functools import partial
from math import inf
from typing import Any

from rlplus.bench import measure, output
from rlplus.bench.case import Case
from rlplus.bench.cases import Inputs
from rlplus.bench.measure import Measurement
from rlplus.bench.peers import METHODS, method

NAMES = ("one", "two", "three", "four")
CASE = Case("main", N=128, H=64, V=300, dtype="float32", methods=NAMES, memory=False, seconds=inf)


def calls(called: list[str], name: str, _: Inputs) -> Any:
    return lambda: called.append(name)


def test_each_round_has_every_method_once_in_an_order_of_its_own() -> None:
    called: list[str] = []
    for name in NAMES:
        method(name, "other", "")(partial(calls, called, name))
    try:
        measurement = Measurement(CASE, "cpu", inf)
        called.clear()
        measurement.time()
    finally:
        for name in NAMES:
            del METHODS[name]
    rounds = [tuple(called[i : i + 4]) for i in range(0, len(called), 4)]
    assert len(rounds) == measurement.result["rounds"] == 20
    assert {frozenset(each) for each in rounds} == {frozenset(NAMES)}
    assert len(set(rounds)) > 10
    assert {each[0] for each in rounds} == set(NAMES)


def test_the_range_is_that_of_all_rounds() -> None:
    assert measure.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "greatest": 3.0}


def test_a_difference_below_a_twentieth_is_called_none() -> None:
    def row(name: str, median: float, rho: float = 1.0) -> dict[str, Any]:
        return {"method": name, "rho": rho, "status": "ok", "ratio": {"median": median}}

    rows = [row("bare-3u", 1), row("torch", 1.049), row("TRL", 1.0), row("CCE", 1.051), row("torch kept", 0.3)]
    rows += [row("torch", 0.5, rho=0.25), {"method": "QuACK", "rho": 1.0, "status": "needs CUDA"}]
    assert output.verdict({"rows": rows}) == "fastest: TRL; no difference (below 5%): torch"
    assert output.verdict({"rows": rows[:1]}) == ""
    sizes = {"name": "small", "dtype": "float32", "N": 4, "H": 4, "V": 4}
    for own, cell in ((1.049, "TRL 1.00 (no difference)"), (1.06, "TRL 1.00")):
        ranges = [
            each | {"ratio": each["ratio"] | {"least": 1, "greatest": 1}} for each in (row("triton", own), rows[2])
        ]
        assert f"| {cell} |" in output.other_sizes_table({"cases": [{**sizes, "rows": ranges}]})
