"""Loads, stores and instructions of whole warps of ptxcheck against closed forms."""

import numpy as np
import pytest
import torch
from handwritten import execute, module
from ptxcheck.executor import Options
from torch import Tensor

LANE = torch.arange(32, dtype=torch.int32)


def registers_after(body: str, inputs: Tensor, count: int, shared: int = 0, options: Options | None = None) -> Tensor:
    """%r40 and the next ones of the 32 lanes, (32, count), after the body; %rd1 is the lane's word of the inputs."""
    out = torch.zeros(32, count, dtype=torch.int32)
    lines = [
        "add.u64 %rd1, %rd90, %rd80;",
        body,
        f"mul.wide.u32 %rd5, %r90, {4 * count};",
        "add.u64 %rd6, %rd91, %rd5;",
    ]
    lines += [f"st.global.b32 [%rd6 + {4 * i}], %r{40 + i};" for i in range(count)]
    memory = execute(module("\n".join(lines), 2), [inputs, out], shared=shared, options=options)
    assert not memory.findings
    return out


SHUFFLES = [  # operands after the value, and the lane that each lane reads
    ("bfly", "1, 31", lambda i: i ^ 1), ("bfly", "16, 31", lambda i: i ^ 16), ("bfly", "3, 31", lambda i: i ^ 3),
    ("up", "1, 0", lambda i: i - 1 if i >= 1 else i), ("up", "8, 0", lambda i: i - 8 if i >= 8 else i),
    ("down", "2, 31", lambda i: i + 2 if i + 2 < 32 else i), ("idx", "5, 31", lambda i: 5),
    ("idx", "%r90, 31", lambda i: i),
    ("bfly", "4, 6175", lambda i: i ^ 4), ("down", "4, 6175", lambda i: i + 4 if i % 8 < 4 else i),  # segments of 8
]  # fmt: skip


@pytest.mark.parametrize(("mode", "operands", "lane"), SHUFFLES, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_a_shuffle_reads_its_lane(mode: str, operands: str, lane) -> None:
    values = LANE * 100
    got = registers_after(f"ld.global.b32 %r1, [%rd1];\nshfl.sync.{mode}.b32 %r40, %r1, {operands}, -1;", values, 1)
    assert got[:, 0].tolist() == [100 * lane(i) for i in range(32)]


@pytest.mark.parametrize(("bits", "n"), [(16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (64, 1), (64, 2)])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors_are_loaded_and_stored(space: str, bits: int, n: int) -> None:
    width, prefix = n * bits // 8, {16: "%h", 32: "%r", 64: "%rd"}[bits]
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 255, 32 * width).astype(np.uint8))
    out, many = torch.zeros_like(x), "{" + ", ".join(f"{prefix}{i + 20}" for i in range(n)) + "}"
    kind, many = f"{f'.v{n}' * (n > 1)}.b{bits}", many if n > 1 else f"{prefix}20"
    at = f"mul.lo.u32 %r1, %r90, {width};\nmul.wide.u32 %rd1, %r90, {width};\n"
    at += "add.u64 %rd2, %rd90, %rd1;\nadd.u64 %rd3, %rd91, %rd1;\n"
    through = f"st.shared{kind} [%r1], {many};\nld.shared{kind} {many}, [%r1];\n" if space == "shared" else ""
    body = f"{at}ld.global{kind} {many}, [%rd2];\n{through}st.global{kind} [%rd3], {many};"
    memory = execute(module(body, 2), [x, out], shared=32 * width)
    assert not memory.findings
    assert torch.equal(x, out)
    assert memory.traffic["load", "a0", width] == memory.traffic["store", "a1", width] == 32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_of_shared_memory_come_in_fragments(count: int, transposed: bool) -> None:
    """Lane 4 i + j has row i (transposed: column i), elements 2 j and 2 j + 1, of each matrix."""
    x = torch.arange(32 * 8, dtype=torch.int16)  # 4 matrices, one below the other
    names = ", ".join(f"%r{40 + i}" for i in range(count))
    body = "shl.b32 %r1, %r90, 4;\nmul.wide.u32 %rd2, %r90, 16;\nadd.u64 %rd3, %rd90, %rd2;\n"
    body += (
        "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd3];\nst.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};\nbar.sync 0;\n"
    )
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16 {{{names}}}, [%r1];"
    got = registers_after(body, x, count, shared=512).view(torch.int16).view(32, count, 2)
    matrices = x.view(4, 8, 8)
    for matrix in range(count):
        want = matrices[matrix].T if transposed else matrices[matrix]
        assert torch.equal(got[:, matrix].reshape(8, 8), want)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_stored_as_they_are_loaded(transposed: bool) -> None:
    """Lane 4 i + j gives elements 2 j and 2 j + 1 of row i (transposed: column i) of each matrix."""
    x = torch.arange(32 * 8, dtype=torch.int16)
    body = "shl.b32 %r1, %r90, 4;\nmul.wide.u32 %rd2, %r90, 16;\nadd.u64 %rd3, %rd90, %rd2;\n"
    body += "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd3];\n"
    body += (
        f"stmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 [%r1], {{%r2, %r3, %r4, %r5}};\nbar.sync 0;\n"
    )
    body += "ld.shared.v4.b32 {%r40, %r41, %r42, %r43}, [%r1];"
    got = registers_after(body, x, 4, shared=512).view(torch.int16).view(4, 8, 8)
    matrices = x.view(32, 4, 2).transpose(0, 1).reshape(4, 8, 8)
    assert torch.equal(got, matrices.transpose(1, 2) if transposed else matrices)


def factor_in_shared_memory(x: Tensor, span: int, transposed: bool) -> tuple[Tensor, int]:
    """The bytes of a factor (n, 16) of wgmma, halves, and its descriptor at address 0; as the manual has its layouts.

    Rows of `span` bytes, of the inner dimension or transposed of the other one; 8 rows under each other, pieces of 16
    bytes swizzled among them. Then the next 8 rows; then, transposed only, the next columns.
    """
    n, per = x.shape[0], span // 2
    image = torch.zeros(65536, dtype=torch.int16)
    for i in range(n):
        for k in range(16):
            row, column = (k, i) if transposed else (i, k)
            panel, column = divmod(column, per)
            byte = panel * 2 * 8 * span + row // 8 * 8 * span + row % 8 * span
            piece = column // 8 ^ (byte // 128) % (span // 16)
            image[(byte + 16 * piece) // 2 + column % 8] = x[i, k].view(torch.int16)
    lead, by = 2 * 8 * span, 8 * span
    return image, lead // 16 << 16 | by // 16 << 32 | {128: 1, 64: 2, 32: 3}[span] << 62


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("spans", "transposed", "n"), [
    ((128, 128), (0, 0), 8), ((32, 64), (0, 0), 64), ((64, 32), (0, 1), 32), ((128, 128), (1, 1), 128),
    ((32, 64), (1, 0), 16), ((64, 32), (1, 1), 96),
])  # fmt: skip
def test_a_product_of_a_warpgroup(
    held: bool, kind: str, spans: tuple[int, int], transposed: tuple[int, int], n: int
) -> None:
    """Lane 4 i + j of warp w has of rows 16 w + i and 16 w + 8 + i the columns 8 c + 2 j and the next one; held: of the
    first factor, too."""
    g, dtype = torch.Generator().manual_seed(0), {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a, b = (torch.randn(rows, 16, generator=g).to(dtype) for rows in (64, n))
    (image_a, at_a), (image_b, at_b) = (
        factor_in_shared_memory(x, s, bool(t)) for x, s, t in zip((a, b), spans, transposed, strict=True)
    )
    rows = 16 * (torch.arange(128) // 32) + torch.arange(128) % 32 // 4
    pairs = [[a[rows + 8 * (i % 2), 8 * (i // 2) + 2 * (torch.arange(128) % 4) + k] for k in (0, 1)] for i in range(4)]
    words = torch.stack([torch.stack(pair, 1) for pair in pairs], 1).view(torch.int16)
    inputs, out = torch.cat([image_a[:8192], image_b[:8192], words.ravel()]), torch.zeros(128, n // 2)
    names = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    body = "shl.b32 %r1, %r90, 4;\nmul.wide.u32 %rd2, %r90, 16;\nadd.u64 %rd3, %rd90, %rd2;\n"
    for i in range(0, 32768, 2048):
        body += f"ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd3 + {i}];\n"
        body += f"st.shared.v4.b32 [%r1 + {i}], {{%r2, %r3, %r4, %r5}};\n"
    body += f"bar.sync 0;\nmov.b64 %rd10, {at_a:#x};\nmov.b64 %rd11, {at_b | 16384 // 16:#x};\n"
    body += "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd3 + 32768];\n"
    body += "".join(f"mov.b32 %r{100 + i}, 0;\n" for i in range(n // 2))
    body += f"wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{names}}}, "
    body += "{%r2, %r3, %r4, %r5}" * held + "%rd10" * (not held)
    body += f", %rd11, 1, 1, 1, {f'{transposed[0]}, ' * (not held)}{transposed[1]};\nwgmma.commit_group.sync.aligned;\n"
    body += f"wgmma.wait_group.sync.aligned 0;\nmul.wide.u32 %rd5, %r90, {2 * n};\nadd.u64 %rd6, %rd91, %rd5;\n"
    body += "".join(f"st.global.b32 [%rd6 + {4 * i}], %r{100 + i};\n" for i in range(n // 2))
    memory = execute(module(body, 2, 128, 90).replace("%r<100>", "%r<200>"), [inputs, out], shared=32768)
    assert not memory.findings
    want = (a.double() @ b.double().T).float().view(4, 2, 8, n // 8, 4, 2)  # warp, row // 8, row, columns, lane, pair
    assert torch.equal(out.view(4, 8, 4, n // 8, 2, 2), want.permute(0, 2, 4, 3, 1, 5))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_product_of_a_warp_is_the_exact_sum_rounded_once(kind: str, truncate: bool) -> None:
    g, dtype = torch.Generator().manual_seed(0), {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a, b = torch.randn(16, 16, generator=g).to(dtype), torch.randn(16, 8, generator=g).to(dtype)
    c = torch.randn(16, 8, generator=g)
    row, column = LANE // 4, LANE % 4 * 2
    pairs = [a[row + 8 * (i % 2)][:, None].expand(32, 2, 16) for i in range(4)]
    fragments = [torch.stack([pairs[i][LANE, 0, column + 8 * (i // 2) + k] for k in range(2)], 1) for i in range(4)]
    fragments += [torch.stack([b[column + 8 * i + k, row] for k in range(2)], 1) for i in range(2)]
    words = [fragment.contiguous().view(torch.int32)[:, 0] for fragment in fragments]
    words += [c[row + 8 * i, column + k].view(torch.int32) for i in range(2) for k in range(2)]
    body = "mul.wide.u32 %rd2, %r90, 40;\nadd.u64 %rd3, %rd90, %rd2;\n"
    body += "\n".join(f"ld.global.b32 %r{i}, [%rd3 + {4 * i}];" for i in range(10))
    body += f"\nmma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r40, %r41, %r42, %r43}}, "
    body += "{%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9};"
    got = registers_after(body, torch.stack(words, 1).contiguous(), 4, options=Options(truncate=truncate)).view(
        torch.float32
    )
    exact = c.double() + a.double() @ b.double()
    want = exact.float()
    if truncate:
        want = torch.where(want.abs() > exact.abs(), torch.nextafter(want, torch.zeros(())), want)
        assert not torch.equal(want, exact.float())
    for i in range(2):
        for k in range(2):
            assert torch.equal(got[:, 2 * i + k], want[row + 8 * i, column + k])


def test_one_lane_of_a_warp_is_elected() -> None:
    got = registers_after("elect.sync %r1|%p1, -1;\nselp.b32 %r40, 1, 0, %p1;", LANE, 1)
    assert got[:, 0].tolist() == [1] + [0] * 31


def test_numbers_are_packed_and_unpacked() -> None:
    body = (
        "ld.global.b32 %r1, [%rd1];\nmov.b32 {%h1, %h2}, %r1;\nmov.b32 %r40, {%h2, %h1};\nmov.b64 %rd9, {%r1, %r40};\n"
    )
    body += "mov.b64 {%r41, %r42}, %rd9;"
    got = registers_after(body, LANE + 0x70000, 3)
    assert torch.equal(got[:, 0], (LANE << 16) + 7)
    assert torch.equal(got[:, 1], LANE + 0x70000)
    assert torch.equal(got[:, 2], got[:, 0])


@pytest.mark.parametrize("name", ["max", "min", "max.NaN"])
def test_the_largest_and_the_smallest_of_three(name: str) -> None:
    x = torch.stack([torch.randn(32) for _ in range(3)], 1)
    x[5, 1] = torch.nan
    body = "mul.wide.u32 %rd2, %r90, 12;\nadd.u64 %rd3, %rd90, %rd2;\n"
    body += "".join(f"ld.global.b32 %r{i}, [%rd3 + {4 * i}];\n" for i in range(3)) + f"{name}.f32 %r40, %r0, %r1, %r2;"
    got = registers_after(body, x.view(torch.int32), 1).view(torch.float32)[:, 0]
    want = {"max": np.nanmax, "min": np.nanmin, "max.NaN": np.max}[name](x.numpy(), 1)
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("name", ["max", "min", "max.NaN"])
def test_the_largest_and_the_smallest_of_a_warp(name: str) -> None:
    x = torch.randn(32)
    for nan in (False, True):
        x[5] = torch.nan if nan else x[5]
        body = f"ld.global.b32 %r1, [%rd1];\nmov.b32 %r2, -1;\nredux.sync.{name}.f32 %r40, %r1, %r2;"
        got = registers_after(body, x.view(torch.int32), 1).view(torch.float32)[:, 0]
        want = {"max": np.nanmax, "min": np.nanmin, "max.NaN": np.max}[name](x.numpy())
        np.testing.assert_array_equal(got.numpy(), np.full(32, want))


@pytest.mark.parametrize("name", ["max.s32", "min.s32", "max.u32", "min.u32", "add.s32", "add.u32"])
def test_the_largest_and_the_smallest_integer_and_the_sum_of_a_warp(name: str) -> None:
    x = torch.randint(-(2**31), 2**31, (32,)).int()
    body = f"ld.global.b32 %r1, [%rd1];\nmov.b32 %r2, -1;\nredux.sync.{name} %r40, %r1, %r2;"
    got = registers_after(body, x, 1)[:, 0]
    numbers = x.numpy() if name.endswith("s32") else x.numpy().view(np.uint32)
    want = {"max": np.max, "min": np.min, "add": lambda x: x.sum(dtype=x.dtype)}[name[:3]](numbers)
    assert (got.numpy().view(numbers.dtype) == want).all()


def test_the_largest_integer_of_a_warp_where_another_block_takes_another_way() -> None:
    out = torch.zeros(2, 32, dtype=torch.int32)
    body = "mov.u32 %r40, 7;\nsetp.eq.u32 %p1, %r91, 1;\n@%p1 bra $skip;\nmov.b32 %r2, -1;\n"
    body += "redux.sync.max.s32 %r40, %r90, %r2;\n$skip:\nmul.wide.u32 %rd1, %r92, 4;\nadd.u64 %rd2, %rd90, %rd1;\n"
    assert not execute(module(body + "st.global.b32 [%rd2], %r40;", 1), [out], 2).findings
    assert out.tolist() == [[31] * 32, [7] * 32]


def test_threads_leave_a_loop_one_by_one() -> None:
    body = "mov.u32 %r40, 0; mov.u32 %r1, 0;\n$again:\nadd.u32 %r40, %r40, %r1; add.u32 %r1, %r1, 1;\n"
    body += "setp.le.u32 %p1, %r1, %r90;\n@%p1 bra $again;\n"
    got = registers_after(body, LANE, 1)
    assert got[:, 0].tolist() == [i * (i + 1) // 2 for i in range(32)]


def test_the_place_of_a_thread_and_the_size_of_the_grid() -> None:
    out = torch.zeros(6, 32, 4, dtype=torch.int32)
    body = "mov.u32 %r1, %laneid; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x;\nmul.wide.u32 %rd1, %r92, 16;\n"
    body += "add.u64 %rd2, %rd90, %rd1;\nst.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r91};"
    assert not execute(module(body, 1), [out], 6).findings
    assert torch.equal(out[..., 0], LANE.expand(6, 32))
    assert out[..., 1].unique().item() == 6
    assert out[..., 2].unique().item() == 32
    assert torch.equal(out[..., 3], torch.arange(6, dtype=torch.int32)[:, None].expand(6, 32))
