"""The cost model against independent arithmetic, and its uses."""

import pytest

from rlplus.bench import model
from rlplus.loss import cost

N, H, V = model.SHAPE[:3]

# Rows of a chunk and of the buffer as version 0.1.0 had them, its way of doing the small things, and the ratio to the
# bare GEMMs that was worked out for it: A100 from floor to half, H200 from floor to half.
FIRST = {"launches": cost.Launches(chunk=23), "scaling": 16}
RATIOS = {
    (640, 2560): ((1.11, 1.23), (1.14, 1.28)),
    (122, 732): ((1.25, 1.60), (1.42, 1.80)),
    (99, 297): ((1.72, 2.14), (2.04, 2.48)),
}
SHARES = {0.5: (0.76, 0.79), 0.25: (0.58, 0.60)}  # floors at (640, 2560)


@pytest.mark.parametrize(("sizes", "want"), RATIOS.items())
def test_the_model_gives_the_ratios_of_the_first_version(
    sizes: tuple[int, int], want: tuple[tuple[float, float], ...]
) -> None:
    for machine, pair in zip((cost.A100, cost.H200), want, strict=True):
        got = [model.ratio(machine, *sizes, exposed=exposed, **FIRST) for exposed in (0.0, 0.5)]
        assert got == pytest.approx(pair, abs=0.0101)


def test_the_model_gives_the_ratios_of_few_rows() -> None:
    for share, want in SHARES.items():
        got = [model.ratio(m, 640, 2560, share=share, exposed=0.0, **FIRST) for m in (cost.A100, cost.H200)]
        assert got == pytest.approx(want, abs=0.0051)


def test_the_parts_are_those_that_a_count_by_hand_gives() -> None:
    """GB and TFLOP of the shape above, written as numbers: 16,384 tokens, 22 chunks of 768, 8 emptyings of 2304."""
    machine = cost.H200._replace(processors=0)
    got = cost.one_pass(machine, model.SHAPE, 768, 2304, exposed=0.5)
    weight, logits, hidden = 0.544538624, 2.489319424, 0.058720256  # 10^9 elements
    tflop = 17.84344  # one GEMM's
    assert tflop == pytest.approx(2 * N * H * V / 1e12, abs=1e-5)
    traffic = {
        "logits": 22 * 2 * weight + 4 * logits + 2 * hidden,
        "dhidden": 8 * 2 * weight + 2 * logits + 4 * hidden,
        "dweight": 15 * 4 * weight + 2 * logits + 2 * hidden,  # 8 times written, 7 times read
    }
    for part, gigabytes in traffic.items():  # every product takes longer to multiply than to move, but the last
        rest = 0.0 if part == "logits" else dweight_and_dhidden_of_256_rows(part)
        assert got[part] == pytest.approx(tflop / 750 + 0.5 * gigabytes / 4200 + rest, rel=2e-3), part
    assert got["statistics"] == pytest.approx(4 * logits / 4200, rel=1e-6)
    assert got["gradient"] == pytest.approx(6 * logits / 4200, rel=1e-6)
    assert got["rounding"] == pytest.approx(6 * weight / 4200, rel=1e-6)
    assert got["rows"] == pytest.approx(14 * hidden / 4200, rel=1e-6)
    assert got["launches"] == pytest.approx(2e-6 * (22 * 6 + 8 * 7))
    assert got["scaling"] == 0


def test_two_byte_exponentials_are_written_once_and_read_once() -> None:
    machine = cost.H200._replace(processors=0)
    got, usual = (cost.one_pass(machine, model.SHAPE, 768, 2304, path=p) for p in (cost.EXPONENTIALS, cost.VENDOR))
    logits = 2.489319424  # 10^9 elements
    assert got["statistics"] == 0
    assert got["gradient"] == pytest.approx(4 * logits / 4200, rel=1e-6)
    assert usual["logits"] - got["logits"] == pytest.approx(0.5 * 2 * logits / 4200, rel=1e-3)
    assert all(got[part] == usual[part] for part in usual if part not in ("logits", "statistics", "gradient"))


def test_each_way_to_the_logits_is_at_most_as_slow_as_the_one_before() -> None:
    assert model.paths().count("\n") == 1 + len(model.PATHS)
    for machine in model.MACHINES.values():
        sizes = [model.sizes(1250, machine, path=path) for path in model.PATHS.values()]
        ratios = [model.ratio(machine, *s, path=path) for s, path in zip(sizes, model.PATHS.values(), strict=True)]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] - ratios[2] > 0.06


def dweight_and_dhidden_of_256_rows(part: str) -> float:
    """For 16,384 - 7 * 2304 = 256 rows: the amount by which max(c, m) + min(c, m) / 2 exceeds c + m / 2."""
    compute = 2 * 256 * H * V / 750e12
    memory = ((8 if part == "dweight" else 2) * V * H + 2 * 256 * V) / 4.2e12
    return max(compute, memory) + min(compute, memory) / 2 - compute - memory / 2


def test_idle_processors_count_as_if_they_multiplied() -> None:
    """2560 rows of dhidden are 280 tiles, 3 rounds of 132 processors; 2304 are 252, 2 rounds."""
    seconds = [cost.gemm(cost.H200, model.SHAPE, (n, H, V), 0.0, 0.0) for n in (2560, 2304, 2305)]
    one = 132 * 128 * 256 * 2 * V / 750e12
    assert seconds == pytest.approx([3 * one, 2 * one, 3 * one])


def test_one_emptying_rounds_dweight_by_itself() -> None:
    few = model.SHAPE._replace(N=2048)
    one, two = (cost.one_pass(cost.H200, few, 512, capacity) for capacity in (2048, 1024))
    assert one["rounding"] == 0
    assert two["rounding"] > 0
    assert one["dweight"] < two["dweight"]


@pytest.mark.parametrize("machine", model.MACHINES.values(), ids=model.MACHINES)
def test_the_backend_chooses_the_sizes_that_cost_least(machine: cost.Machine) -> None:
    """Among all whole numbers of chunks, at every multiple of a tile, none is better by more than a hundredth."""
    row, gradient_row = 4 * V, 2 * V + 8 * H
    for mb in model.SCRATCH_MB:
        rows, capacity = model.sizes(mb, machine)
        assert rows * row + capacity * gradient_row <= mb * 1e6
        best = min(
            sum(cost.one_pass(machine, model.SHAPE, n, n * k).values())
            for k in range(1, 17)
            for n in [*range(16, 128, 16), *range(128, 2048, 128)]
            if n * (row + k * gradient_row) <= mb * 1e6
        )
        assert sum(cost.one_pass(machine, model.SHAPE, rows, capacity).values()) <= 1.01 * best


def test_the_tables_have_a_line_for_each_case_and_change() -> None:
    assert model.table().count("\n") == 1 + 2 * (len(model.SCRATCH_MB) + len(model.SHARES))
    assert model.worth().count("\n") == 1 + len(model.CHANGES)
    values = [float(cell) for line in model.worth().splitlines()[2:] for cell in line.split("|")[2:-1]]
    assert min(values) > 0


# ---- memory=None


def test_two_passes_are_the_faster_way_with_little_scratch_alone() -> None:
    """The crossing that the docstring of linear_policy_loss names; one chunk of few tokens needs no second pass."""
    ways = {mb: cost.faster_memory(model.SHAPE, mb * 1e6) for mb in range(20, 1300, 10)}
    assert {mb for mb, way in ways.items() if way == "least"} == set(range(20, 190, 10))
    for shape in (cost.Shape(0, 8, 8), cost.Shape(5, 8, 8), cost.Shape(100, 896, 151_936)):
        assert cost.faster_memory(shape, 80e6) == "fast"


def test_the_faster_way_is_that_of_the_smaller_sum() -> None:
    machine = cost.A100._replace(processors=0)
    for mb, columns in ((150, 1408), (250, 2432)):  # 10^6 mb / 6 N, whole tiles
        rows, capacity = cost.buffers(cost.A100, model.SHAPE, 4 * V, 2 * V + 8 * H, mb * 1e6)
        one = sum(cost.one_pass(machine, model.SHAPE, rows, capacity, exposed=0.0).values())
        two = sum(cost.two_passes(machine, model.SHAPE, columns, exposed=0.0).values())
        assert cost.faster_memory(model.SHAPE, mb * 1e6) == ("least" if two < one else "fast")
    assert two > one


def test_two_passes_by_hand() -> None:
    """Blocks of 2432 of 151,936 columns are 62 and a rest of 1152; the lent part of 0.216 is done twice."""
    machine = cost.H200._replace(processors=0)
    got = cost.two_passes(machine, model.SHAPE, 2432, exposed=0.0)
    lent = N * 2 / V
    assert got["dhidden"] == pytest.approx(17.84344 / 750, rel=1e-5)  # all products hide their traffic
    assert got["dweight"] == pytest.approx(17.84344 / 750, rel=1e-5)
    assert got["logits"] == pytest.approx((2 + lent) * 17.84344 / 750, rel=1e-5)
    assert got["statistics"] == pytest.approx(4 * N * V / 4.2e12)
    assert got["gradient"] == pytest.approx((1 + lent) * 6 * N * V / 4.2e12)
    assert got["launches"] == pytest.approx(2e-6 * (63 * 10 + 60))
