"""Every arithmetic instruction of ptxcheck against Python's integers and exact numbers; random programs as well."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import scalar
import torch
from handwritten import execute, module
from ptxcheck import opcodes, rounding
from ptxcheck.checked_memory import UNSIGNED
from ptxcheck.executor import Options
from ptxcheck.opcodes import TABLE, Opcode
from ptxcheck.program import Program

LANES, THREADS = 256, 128
CASES = [(row, types) for row in TABLE for types in row.types.split()]
EDGES = {
    "f32": [0.0, -0.0, 1.0, -1.0, 0.5, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.2e-38, np.inf, -np.inf, np.nan, 65519.0,
            65520.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 6e-8, 2.98e-8],
    "f64": [0.0, -0.0, 1.0, -1.0, 1e308, 5e-324, np.inf, -np.inf, np.nan, 1 + 2.0**-24, 1e-40],
}  # fmt: skip


def name(case: tuple[Opcode, str]) -> str:
    return f"{case[0].name}.{case[1]}"


def operand_kinds(row: Opcode, types: str) -> list[str]:
    """The types of the operands, after that of the result."""
    d, _, s = types.partition(".")
    kinds = {"t": d, "d": d, "s": s or d, "p": "pred", "u": "u32", "i": "i"}
    if "w" in row.operands:
        kinds["w"] = f"{d[0]}{2 * int(d[1:])}"
    return [kinds[letter] for letter in row.operands.replace("=", "")]


def samples(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Raw bits: numbers of every size, and those at the edges."""
    if kind == "pred":
        return rng.integers(0, 2, LANES).astype(np.uint32)
    bits = scalar.bits_of(kind)
    raw = rng.integers(0, 1 << 32, (LANES, 2), dtype=np.uint32).view(np.uint64)[:, 0]
    raw = (raw >> rng.integers(0, bits, LANES).astype(np.uint64)).astype(UNSIGNED[bits])
    if kind in EDGES:
        dtype = np.float32 if kind == "f32" else np.float64
        some = (rng.standard_normal(LANES) * 2.0 ** rng.integers(-12, 12, LANES)).astype(dtype)
        raw[::2] = some.view(UNSIGNED[bits])[::2]
        edges = np.array(EDGES[kind], dtype).view(UNSIGNED[bits])
    else:
        edges = np.array([0, 1, 2, 7, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1], np.uint64).astype(raw.dtype)
    return np.where(rng.random(LANES) < 0.4, rng.choice(edges, LANES), raw)


def registers(kind: str) -> tuple[str, str, int]:
    """The first part of a register's name, the type to load it by, and its bits."""
    bits = max(16, scalar.bits_of(kind)) if kind != "pred" else 1
    return {1: ("%p", "b32", 1), 16: ("%h", "b16", 16), 32: ("%r", "b32", 32), 64: ("%rd", "b64", 64)}[bits]


def run_one(opcode: str, kinds: list[str], operands: list[np.ndarray], table: int, options: Options) -> np.ndarray:
    """The raw results of the instruction in all lanes."""
    lines, texts = ["mul.wide.u32 %rd81, %r92, 8;", "add.u64 %rd82, %rd90, %rd81;"], []
    for i, kind in enumerate(kinds[1:]):
        if kind == "i":
            texts.append(str(table))
            continue
        prefix, load, bits = registers(kind)
        register = f"{prefix}{i + 1}"
        target = f"%r{i + 1}" if bits == 1 else register
        lines.append(f"ld.global.{load} {target}, [%rd82 + {8 * LANES * i}];")
        lines += [f"setp.ne.u32 {register}, {target}, 0;"] if bits == 1 else []
        texts.append(register)
    prefix, store, bits = registers(kinds[0])
    lines.append(f"{opcode} {prefix}40, {', '.join(texts)};")
    lines += ["selp.b32 %r40, 1, 0, %p40;"] if bits == 1 else []
    lines += ["add.u64 %rd83, %rd91, %rd81;", f"st.global.{store} [%rd83], {'%r' if bits == 1 else prefix}40;"]
    data = np.zeros((3, LANES), np.uint64)
    for i, raw in enumerate(operands):
        data[i] = raw
    inputs, out = torch.from_numpy(data.view(np.int64)), torch.zeros(LANES, dtype=torch.int64)
    memory = execute(module("\n".join(lines), 2, THREADS), [inputs, out], LANES // THREADS, options=options)
    assert not memory.findings
    return out.numpy().view(np.uint64)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_an_instruction_computes_what_its_row_says(case: tuple[Opcode, str]) -> None:
    row, types = case
    rng = np.random.default_rng(len(name(case)))
    kinds = operand_kinds(row, types)
    operands = [samples(kind, rng) for kind in kinds[1:] if kind != "i"]
    for ftz in (False, True) if "ftz" in row.options and "f64" not in types else (False,):
        opcode = f"{row.name}{'.ftz' * ftz}.{types}"
        table = int(rng.integers(256))
        got = run_one(opcode, kinds, operands, table, Options())
        _, _, width = registers(kinds[0])
        found = opcodes.lookup(opcode)
        assert found is not None
        assert found[0] is row
        for lane, (result, *raw) in enumerate(zip(got, *operands, strict=True)):
            numbers = [int(x) for x in raw] + [table] * ("i" in kinds)
            want = scalar.evaluate(*found, numbers, width)
            if row.bound is not None:  # the second evaluator's functions may round another way, once in double
                assert abs(_ordered(int(result)) - _ordered(want)) <= 1, (lane, numbers)
            else:
                assert int(result) == want, (lane, numbers)


def _ordered(bits: int) -> int:
    """fp32 as integers in their order."""
    return -(bits & 0x7FFFFFFF) if bits >> 31 else bits


APPROXIMATE = [row for row in TABLE if row.bound is not None]


@pytest.mark.parametrize("row", APPROXIMATE, ids=lambda row: row.name)
def test_an_approximation_errs_as_far_as_it_may(row: Opcode) -> None:
    rng = np.random.default_rng(0)
    kinds = operand_kinds(row, "f32")
    values = [rng.uniform(0.01, 9.0, LANES).astype(np.float32) for _ in kinds[1:]]
    exact = row.run(*values)
    limit = row.bound(exact, *values)
    for approximation in (1.0, -1.0, "random"):
        bits = run_one(f"{row.name}.f32", kinds, [x.view(np.uint32) for x in values], 0, Options(approximation))
        error = bits.astype(np.uint32).view(np.float32).astype(np.float64) - exact
        half = np.abs(exact) * 2.0**-24
        assert (np.abs(error) <= limit + half).all()
        if approximation == "random":
            assert (error > 0).any()
            assert (error < 0).any()
        else:
            assert (error * approximation >= limit - half).all()


def test_a_row_is_found_by_its_whole_name_only() -> None:
    for opcode in (
        "add.sat.s32",
        "fma.rz.f32",
        "max.xorsign.abs.f32",
        "cvt.rz.f32.s32",
        "mul.s32",
        "add.cc.u32",
        "vote",
    ):
        assert opcodes.lookup(opcode) is None, opcode


def test_fma_rounds_once() -> None:
    """Also where the sum lies next to the middle between two numbers, cancels, or is subnormal."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (3, 4000), dtype=np.uint32)
    with np.errstate(all="ignore"):
        bits[2, :2000] = (-bits[0, :2000].view(np.float32) * bits[1, :2000].view(np.float32)).view(np.uint32)
    halfway = np.float32(1) + np.float32(2.0**-23) * rng.integers(0, 2**20, 1000).astype(np.float32)
    bits[0, -1000:], bits[1, -1000:] = halfway.view(np.uint32), np.float32(1 + 2.0**-12).view(np.uint32)
    bits[2, -1000:] = (np.float32(2.0**-70) * rng.choice([-1, 1], 1000)).astype(np.float32).view(np.uint32)
    a, b, c = bits.view(np.float32)
    with np.errstate(all="ignore"):
        got = rounding.fma32(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        if all(map(np.isfinite, (x, y, z, r))):
            assert scalar.nearest32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) == r


@pytest.mark.parametrize("sign", [1, -1])
def test_a_product_and_a_sum_of_bf16_are_rounded_once(sign: int) -> None:
    """The product lies in the middle between two numbers, and the sum next to it by less than a double can tell."""
    numbers = (1 + 2.0**-7, 1.5, sign * 2.0**-100)
    a, b, c = (rounding.to_bf16(np.array([x], np.float32)) for x in numbers)
    (got,) = rounding.from_bf16(rounding.fma16("bf16", a, b, c))
    assert got == 1.5 + (2.0**-6 if sign > 0 else 2.0**-7)


# ---- random programs

WIDTHS = {"%h": 16, "%r": 32, "%rd": 64}
PER_CLASS, STATEMENTS = 6, 40
EXACT = [case for case in CASES if case[0].bound is None]


def random_program(rng: np.random.Generator) -> str:
    """Arithmetic on registers of all kinds, under guards, in branches and in a loop of as many rounds as a lane wants.
    In and out go all registers."""
    places = [(prefix, i) for prefix in WIDTHS for i in range(PER_CLASS)]
    size = 8 * len(places)
    at = [f"mul.wide.u32 %rd81, %r92, {size};", "add.u64 %rd82, %rd90, %rd81;", "add.u64 %rd83, %rd91, %rd81;"]
    lines = at + [f"ld.global.b{WIDTHS[p]} {p}{i}, [%rd82 + {8 * n}];" for n, (p, i) in enumerate(places)]
    lines += [f"setp.lt.s32 %p{i}, %r{i}, %r{i + 1};" for i in range(4)]
    lines += ["and.b32 %r60, %r90, 3;", "mov.u32 %r61, 0;", "$again:"]
    body = [statement(rng) for _ in range(STATEMENTS)]
    for label in range(3):
        start, stop = sorted(rng.choice(len(body), 2, replace=False))
        body.insert(stop, f"$skip{label}:")
        body.insert(start, f"@{'!' * int(rng.integers(2))}%p{rng.integers(4)} bra $skip{label};")
    lines += [*body, "add.u32 %r61, %r61, 1;", "setp.lt.u32 %p60, %r61, %r60;", "@%p60 bra $again;"]
    lines += [f"st.global.b{WIDTHS[p]} [%rd83 + {8 * n}], {p}{i};" for n, (p, i) in enumerate(places)]
    return module("\n".join(lines), 2, 32)


def statement(rng: np.random.Generator) -> str:
    row, types = EXACT[rng.integers(len(EXACT))]
    kinds = operand_kinds(row, types)

    def operand(kind: str) -> str:
        if kind == "i":
            return str(rng.integers(256))
        prefix = registers(kind)[0]
        return f"{prefix}{rng.integers(4 if prefix == '%p' else PER_CLASS)}"

    guard = f"@{'!' * int(rng.integers(2))}%p{rng.integers(4)} " if rng.random() < 0.3 else ""
    ftz = ".ftz" if "ftz" in row.options and types == "f32" and rng.random() < 0.3 else ""
    return f"{guard}{row.name}{ftz}.{types} {', '.join(operand(kind) for kind in kinds)};"


def compare(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ptx, n = random_program(rng), 3 * PER_CLASS
    raw = np.stack([samples("f32" if i % 2 else "u64", rng)[:64] for i in range(n)], 1).astype(np.uint64)
    inputs = torch.from_numpy(np.ascontiguousarray(raw).view(np.int64))
    got, want = torch.zeros(64, n, dtype=torch.int64), torch.zeros(64, n, dtype=torch.int64)
    assert not execute(ptx, [inputs, got], 2).findings
    program = Program(ptx)
    for block, thread in itertools.product(range(2), range(32)):
        scalar.Thread(program, [inputs.data_ptr(), want.data_ptr()], block, thread).run()
    assert torch.equal(got, want), (seed, ptx)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_agree_with_the_second_evaluator(seed: int) -> None:
    compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 400))
def test_many_random_programs_agree_with_the_second_evaluator(seed: int) -> None:
    compare(seed)
