"""The cost model against independent arithmetic, and its uses."""

import pytest

from rlplus.bench import model
from rlplus.loss.head import cost

N, H, V = model.SHAPE[:3]
WEIGHT, LOGITS, HIDDEN = 0.544538624, 2.489319424, 0.058720256  # 10^9 elements of the shape above
TFLOP = 17.84344  # one GEMM takes these


def test_the_parts_are_those_that_a_count_by_hand_gives() -> None:
    """GB and TFLOP written as numbers: 16,384 tokens in 8 chunks of 2048, exponentials by our GEMM."""
    machine = cost.H200._replace(processors=0)
    got = cost.one_pass(machine, model.SHAPE, 2048, exposed=0.5)
    assert pytest.approx(2 * N * H * V / 1e12, abs=1e-5) == TFLOP
    traffic = {
        "logits": 8 * 2 * WEIGHT + 2 * LOGITS + 2 * HIDDEN,
        "dhidden": 8 * 2 * WEIGHT + 2 * LOGITS + 4 * HIDDEN,
        "dweight": 15 * 4 * WEIGHT + 2 * LOGITS + 2 * HIDDEN,  # 8 times written, 7 times read
    }
    for part, gigabytes in traffic.items():  # every product takes longer to multiply than to move
        times = 1.1 if part == "logits" else 1.0
        assert got[part] == pytest.approx(times * (TFLOP / 750 + 0.5 * gigabytes / 4200), rel=2e-3), part
    assert got["epilogue"] == pytest.approx(6.7 * LOGITS / (132 * 128 * 1.7), rel=1e-6)
    assert got["passes"] == got["scaling"] == 0
    assert got["rounding"] == pytest.approx(6 * WEIGHT / 4200, rel=1e-6)
    assert got["rows"] == pytest.approx((14 + 12 + 4) * HIDDEN / 4200, rel=1e-6)
    assert got["launches"] == pytest.approx(2e-6 * 8 * 22)


@pytest.mark.parametrize(("path", "passes"), [(cost.VENDOR, 6), (cost.TWICE, 10), (cost.TWICE_FP32, 12)])
def test_other_ways_move_fp32_logits_between_the_products(path: cost.Path, passes: int) -> None:
    machine = cost.H200._replace(processors=0)
    got, ours = (cost.one_pass(machine, model.SHAPE, 2048, path=p) for p in (path, cost.OWN))
    assert got["passes"] == pytest.approx(passes * LOGITS / 4200, rel=1e-6)
    assert got["logits"] - ours["logits"] / 1.1 == pytest.approx(0.5 * 2 * LOGITS / 4200, rel=1e-3)
    assert got["epilogue"] == 0
    same = ("dhidden", "dweight", "rounding", "launches")
    assert [got[part] for part in same] == [ours[part] for part in same]
    apart = 0 if path == cost.VENDOR else 12  # targets' elements beside exponentials
    assert ours["rows"] - got["rows"] == pytest.approx(apart * HIDDEN / 4200)


def test_rows_without_a_gradient_pass_the_first_product_alone() -> None:
    machine = cost.A100._replace(processors=0)
    half, whole = (cost.one_pass(machine, model.SHAPE, 2048, share=share, exposed=0.0) for share in (0.5, 1.0))
    assert half["logits"] == pytest.approx(whole["logits"], rel=1e-6)
    assert half["dhidden"] == pytest.approx(whole["dhidden"] / 2, rel=1e-6)
    bonus = cost.one_pass(machine, model.SHAPE, 2048, share=0.5, exposed=0.0, bonus=True)
    assert bonus["passes"] == pytest.approx(4 * LOGITS / 2 / 1700, rel=1e-6)


@pytest.mark.parametrize("machine", model.MACHINES.values(), ids=model.MACHINES)
def test_the_bars_hold_by_the_model(machine: cost.Machine) -> None:
    """For Qwen2.5-7B's head and for one with 1024 columns, as the tables round."""
    (name,) = (name for name, known in model.MACHINES.items() if known == machine)
    for mb in model.SCRATCH_MB[:2]:
        assert round(model.ratio(machine, model.rows_of(mb, machine), exposed=0.0), 2) <= model.BARS[name, mb]
    rows = model.rows_of(1250, machine, model.NARROW)
    assert round(model.ratio(machine, rows, model.NARROW, exposed=0.0), 2) <= 1.12


def test_each_way_is_at_most_as_slow_as_the_one_before() -> None:
    assert model.paths().count("\n") == 1 + len(model.PATHS)
    for machine in model.MACHINES.values():
        ratios = [model.ratio(machine, model.rows_of(1250, machine, path=p), path=p) for p in model.PATHS.values()]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] - ratios[2] > 0.06


def test_idle_processors_count_as_if_they_multiplied() -> None:
    """2560 rows of dhidden are 280 tiles, 3 rounds of 132 processors; 2304 are 252, 2 rounds."""
    seconds = [cost.gemm(cost.H200, model.SHAPE, (n, H, V), 0.0, 0.0) for n in (2560, 2304, 2305)]
    one = 132 * 128 * 256 * 2 * V / 750e12
    assert seconds == pytest.approx([3 * one, 2 * one, 3 * one])


def test_one_chunk_rounds_dweight_by_itself() -> None:
    few = model.SHAPE._replace(N=2048)
    one, two = (cost.one_pass(cost.H200, few, rows) for rows in (2048, 1024))
    assert one["rounding"] == 0
    assert two["rounding"] > 0
    assert one["dweight"] < two["dweight"]


@pytest.mark.parametrize("machine", model.MACHINES.values(), ids=model.MACHINES)
def test_the_backend_chooses_the_rows_that_cost_least(machine: cost.Machine) -> None:
    """Among all multiples of a tile none is better by more than a hundredth."""
    row = 2 * V + 8 * H
    for mb in model.SCRATCH_MB:
        rows = model.rows_of(mb, machine)
        assert rows * row <= mb * 1e6
        best = min(
            sum(cost.one_pass(machine, model.SHAPE, n).values())
            for n in [*range(16, 128, 16), *range(128, 4096, 128)]
            if n * (row + 12 * V // 256) <= mb * 1e6
        )
        assert sum(cost.one_pass(machine, model.SHAPE, rows).values()) <= 1.01 * best


def test_the_tables_have_a_line_for_each_case_and_part() -> None:
    assert model.table().count("\n") == 1 + 2 * (len(model.SCRATCH_MB) + len(model.SHARES) + 1)
    assert model.parts().count("\n") == 1 + 9
