"""The table of budgets is compared and written as it says of itself; the numbers are in test_kernel_compile.py."""

import re
from pathlib import Path
from typing import Any

import budgets
import pytest
import torch
from kernel_names import KERNELS

import rlplus
from rlplus.loss.head import cost
from rlplus.loss.operations import library, logprob_library

KERNEL = {
    "arch": 90, "kernel": "_a_kernel", "variant": "bias", "aligned": True, "registers": 40, "spills": 0, "shared": 16,
    "loops": [9.5, 2.0], "once": 20.0, "estimate": 2.5,
}  # fmt: skip
OPERATION = {"arch": 80, "operation": "loss", "launches": 6, "operations": 80, "waits": 1, "scratch": 1024}
ROWS = [KERNEL, OPERATION]


@pytest.fixture
def table() -> budgets.Table:
    limits = [
        {"of": "", "registers": 128, "spills": 0, "reason": "any"},
        {"of": "_a_kernel, .*bias, aligned", "spills": 4, "reason": "a bias"},
    ]
    empty = {"limits": limits, "kernels": {}, "operations": {}}
    return budgets.updated(ROWS, empty, "first")


def test_more_and_less_are_differences(table: budgets.Table) -> None:
    assert budgets.differences(ROWS, table, whole=True) == []
    for row, name, value in (
        (KERNEL, "registers", 41), (KERNEL, "registers", 39), (KERNEL, "loops", [9.5, 2.25]),
        (KERNEL, "estimate", None),
        (OPERATION, "launches", 7), (OPERATION, "waits", 0), (OPERATION, "scratch", 512),
    ):  # fmt: skip
        (found,) = budgets.differences([row | {name: value}], table)
        assert f"{name}: want {row[name]}; got {value}" in found
    (new,) = budgets.differences([KERNEL | {"variant": "other"}], table)
    assert "want an entry" in new
    (gone,) = budgets.differences([KERNEL], table, whole=True)
    assert "sm_80, loss" in gone
    assert budgets.differences([KERNEL | {"arch": 120, "registers": 99}], table) == []


def test_with_other_releases_only_upper_limits_hold(table: budgets.Table) -> None:
    other = table | {"triton": "3.0.0"}
    changed: list[dict[str, Any]] = [KERNEL | {"registers": 99}, OPERATION | {"launches": 5}]
    assert budgets.differences(changed, other) == []
    assert len(budgets.differences([OPERATION | {"launches": 7}], other | {"torch": "2.0.0"})) == 1
    assert budgets.limits(KERNEL, other)["spills"] == 4
    assert budgets.limits(KERNEL | {"aligned": False}, other)["spills"] == 0


def test_a_number_that_grew_is_written_with_the_reason(table: budgets.Table, tmp_path: Path) -> None:
    entry = ("kernels", "sm_90 _a_kernel", "bias")
    more = budgets.updated([KERNEL | {"loops": [9.5, 2.25]}, OPERATION | {"launches": 5}], table, "a check")
    assert more[entry[0]][entry[1]][entry[2]]["reason"] == "a check"
    assert "reason" not in more["operations"]["sm_80"]["loss"]
    again = budgets.updated([KERNEL | {"loops": [9.5, 2.25]}, OPERATION], more, "another")
    assert again[entry[0]][entry[1]][entry[2]]["reason"] == "a check"
    assert "reason" not in budgets.updated(ROWS, more, "less")[entry[0]][entry[1]][entry[2]]
    budgets.write(more, tmp_path / "budgets.toml")
    assert budgets.read(tmp_path / "budgets.toml") == more


def test_every_limit_has_a_reason() -> None:
    assert all(limit["reason"] for limit in budgets.read()["limits"])


def test_every_kernel_has_numbers() -> None:
    assert set(budgets.read()["kernels"]) == {f"sm_{arch} {name}" for arch in budgets.EXACT for name in KERNELS}


def test_every_operation_has_numbers() -> None:
    """Those that are registered, but for the product of `reference` and the policy loss that adds to a buffer, which
    is the policy loss; operation_counts.py checks that an operation of the table calls what it says."""
    table = budgets.read()["operations"]
    assert table.keys() == {f"sm_{arch}" for arch in budgets.EXACT}
    assert all(entries.keys() == budgets.OPERATIONS.keys() for entries in table.values())
    assert library.linear_policy_loss  # imported, so that all are registered
    assert logprob_library.sampled_logprob
    found = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rlplus::")}
    assert {name for name in rlplus.__all__ if name.startswith("linear_")} <= found
    counted = {name for called in budgets.OPERATIONS.values() for name in called.split()}
    assert found - {"product", "linear_policy_loss_into"} == counted


def test_our_gemm_may_end_with_as_many_instructions_as_the_cost_model_says() -> None:
    limits = [limit for limit in budgets.read()["limits"] if "end" in limit]
    ends = {re.findall(r"sm_\d+", limit["of"])[0]: limit["end"] for limit in limits}
    assert ends == {"sm_80": cost.A100.epilogue, "sm_90": cost.H200.epilogue}
