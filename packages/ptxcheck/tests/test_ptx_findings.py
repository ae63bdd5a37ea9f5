"""Mistakes in small programs: ptxcheck must report each, and nothing in the program without it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from handwritten import execute, module
from ptxcheck.checked_memory import POISON, Memory
from ptxcheck.executor import Executor, Options
from ptxcheck.program import Program, Unsupported

N = 50
# Elements 0 to N - 1, by two blocks of 32 threads.
COPY = """
setp.lt.u32 %p1, %r92, 50;
add.u64 %rd1, %rd90, %rd80;
add.u64 %rd2, %rd91, %rd80;
@%p1 ld.global.b32 %r1, [%rd1 + 0];
@%p1 st.global.b32 [%rd2 + 0], %r1;
"""
# The first block reads a word before a barrier, the second one its own behind it.
APART = """
setp.eq.u32 %p1, %r91, 0;
@%p1 ld.global.b32 %r1, [%rd90];
bar.sync 0;
@!%p1 st.global.b32 [%rd91], %r91;
"""
# Each thread gives its number to the one on the other side of the block, through shared memory.
REVERSE = """
shl.b32 %r1, %r90, 2;
sub.u32 %r2, 252, %r1;
st.shared.b32 [%r1], %r90;
bar.sync 0;
ld.shared.b32 %r3, [%r2];
add.u64 %rd2, %rd90, %rd80;
bar.sync 0;
st.shared.b32 [%r1], %r3;
st.global.b32 [%rd2], %r3;
"""
# The same within each warp; then all lanes read the number of the last one, and the first lane replaces it.
WARPS = """
xor.b32 %r4, %r90, 31; shl.b32 %r1, %r90, 2; shl.b32 %r2, %r4, 2; or.b32 %r5, %r1, 124;
st.shared.b32 [%r1], %r90;
bar.warp.sync -1;
ld.shared.b32 %r3, [%r2];
ld.shared.b32 %r6, [%r5];
bar.warp.sync -1;
and.b32 %r7, %r90, 31; setp.eq.u32 %p1, %r7, 0;
@%p1 st.shared.b32 [%r5], %r90;
add.u64 %rd2, %rd90, %rd80;
st.global.b32 [%rd2], %r3;
"""
# Two groups of asynchronous copies: each thread's number of the input, and its neighbour's in the next warp.
PIPELINE = """
shl.b32 %r1, %r90, 2;
add.u64 %rd1, %rd90, %rd80;
cp.async.ca.shared.global [%r1 + 0], [%rd1 + 0], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r1 + 256], [%rd1 + 256], 4;
cp.async.commit_group;
cp.async.wait_group 1;
bar.sync 0;
xor.b32 %r2, %r1, 128;
ld.shared.b32 %r3, [%r2];
cp.async.wait_group 0;
bar.sync 0;
ld.shared.b32 %r4, [%r2 + 256];
add.s32 %r5, %r3, %r4;
add.u64 %rd2, %rd91, %rd80;
st.global.b32 [%rd2], %r5;
"""
# 64 x 64 times 64 x 8, of bf16: TMA brings both to shared memory, a warpgroup multiplies.
PRODUCT = """
mov.u32 %r1, 16384; mov.u32 %r2, 0; mov.u32 %r3, 8192;
setp.eq.u32 %p1, %r90, 0; setp.ne.u32 %p3, %r90, %r90;
mov.b64 %rd1, m0; mov.b64 %rd2, m1;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 9216;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {0, 0}], [%r1];
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd2, {0, 0}], [%r1];
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
@!%p2 bra $wait;
mov.b64 %rd10, 0x4000004000000000; mov.b64 %rd11, 0x4000004000000002;
mov.b64 %rd12, 0x4000004000000004; mov.b64 %rd13, 0x4000004000000006;
mov.b64 %rd20, 0x4000004000000200; mov.b64 %rd21, 0x4000004000000202;
mov.b64 %rd22, 0x4000004000000204; mov.b64 %rd23, 0x4000004000000206;
mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, %rd10, %rd20, %p3, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, %rd11, %rd21, 1, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, %rd12, %rd22, 1, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, %rd13, %rd23, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 0;
shr.u32 %r20, %r90, 2; and.b32 %r21, %r90, 3; shr.u32 %r22, %r90, 5; and.b32 %r23, %r20, 7;
mad.lo.u32 %r24, %r22, 16, %r23; mul.lo.u32 %r25, %r24, 32; mad.lo.u32 %r26, %r21, 8, %r25;
cvt.u64.u32 %rd30, %r26; add.u64 %rd31, %rd90, %rd30;
st.global.v2.b32 [%rd31], {%r10, %r11};
st.global.v2.b32 [%rd31 + 256], {%r12, %r13};
"""
LAST_WAIT = "wgmma.wait_group.sync.aligned 0;\n"
ARRIVED = "$wait:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;\n@!%p2 bra $wait;\n"
FIRST_ONLY = f"@!%p1 bra $go;\n{ARRIVED}$go:\n"  # thread 0 waits for the tiles


def found(memory: Memory) -> str:
    texts = [*memory.findings, *(f"unwritten {region}" for region, _ in memory.unwritten)]
    return " | ".join(texts)


def found_or_refused(call: Callable[[], str]) -> str:
    try:
        return call()
    except Unsupported as error:
        return str(error)


def copy(body: str = COPY, x: torch.Tensor | None = None, out: torch.Tensor | None = None) -> str:
    x = torch.arange(N, dtype=torch.int32) if x is None else x
    result = torch.zeros(N, dtype=torch.int32) if out is None else out
    memory = execute(module(body, 2), [x, result], 2)
    assert memory.findings or memory.unwritten or torch.equal(result, x)
    return found(memory)


def reverse(body: str) -> str:
    out = torch.zeros(64, dtype=torch.int32)
    memory = execute(module(body, 1, 64), [out], shared=256)
    assert found(memory) or torch.equal(out, torch.arange(63, -1, -1, dtype=torch.int32))
    return found(memory)


def warps(body: str) -> str:
    out = torch.zeros(64, dtype=torch.int32)
    memory = execute(module(body, 1, 64), [out], shared=256)
    assert found(memory) or torch.equal(out, torch.arange(64, dtype=torch.int32).view(2, 32).flip(1).ravel())
    return found(memory)


def pipeline(body: str) -> str:
    x, out = torch.randint(1000, (128,), dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    memory = execute(module(body, 2, 64), [x, out], shared=512)
    assert memory.findings or torch.equal(out, (x[:64] + x[64:]).roll(32))
    return found(memory)


def product(body: str, grid: int = 1) -> str:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 64, generator=g).bfloat16() for n in (60, 8))  # rows 60 to 63 lie outside, and come as 0
    out, memory = torch.full((64, 8), 9.0), Memory()
    maps = []
    for tensor, name, rows in ((a, "a", 64), (b, "b", 8)):
        memory.add(tensor, name)
        maps.append({"base": tensor.data_ptr(), "shape": tensor.shape, "stride": 128, "box": (rows, 64), "size": 2,
                     "span": 128})  # fmt: skip
    memory.add(out, "out")
    ptx = module(body, 1, 128, 90, 2)
    try:
        Executor(Program(ptx), memory, 16392).run((grid,), [out.data_ptr(), *maps])
    except Unsupported as error:
        return f"{found(memory)} {error}"
    want = torch.zeros(64, 8)
    want[:60] = (a.double() @ b.double().T).float()
    assert memory.findings or (out - want).abs().max() < 1e-5
    return found(memory)


RIGHT = [(copy, COPY), (reverse, REVERSE), (warps, WARPS), (pipeline, PIPELINE), (product, PRODUCT)]


@pytest.mark.parametrize(("run", "body"), RIGHT, ids=lambda x: getattr(x, "__name__", ""))
def test_nothing_is_found_in_a_right_program(run, body: str) -> None:
    assert run(body) == ""


BAR, WARP_BAR, WAIT = "bar.sync 0;\n", "bar.warp.sync -1;\n", "cp.async.wait_group"
MISTAKES = [
    # title, program, old text, new text, words of the finding
    ("one element too many", copy, "%r92, 50", "%r92, 51", "out of bounds: load of 4 bytes near a0"),
    ("a load without a mask", copy, "@%p1 ld", "ld", "out of bounds: load"),
    ("a store without a mask", copy, "@%p1 st", "st", "register %r1 is used where it was not written"),
    ("one element before", copy, "[%rd1 + 0]", "[%rd1 + -4]", "out of bounds: load"),
    ("a store one past the end", copy, "[%rd2 + 0]", "[%rd2 + 4]", "out of bounds: store"),
    ("an address no multiple of the width", copy, "[%rd1 + 0]", "[%rd1 + 2]", "misaligned load of 4 bytes"),
    ("different values at one address", copy, "add.u64 %rd2, %rd91, %rd80", "mov.u64 %rd2, %rd91", "two lanes store"),
    ("no barrier after the store", reverse, BAR + "ld", "ld", "race between warps: load after store in shared"),
    ("no barrier before the next store", reverse, BAR + "st", "st", "race between threads: store after load"),
    ("shared memory past its end", reverse, "252", "256", "out of bounds: load of shared memory"),
    ("shared memory that nobody wrote", reverse, "st.shared.b32 [%r1], %r90;", "", "unwritten shared memory"),
    ("no barrier of the warp after the store", warps, WARP_BAR + "ld", "ld", "race in a warp: load after store"),
    ("no barrier of the warp before the next store", warps, WARP_BAR + "and", "and", "store after load in shared"),
    ("a barrier of the warp for two warps", warps, "%r90, 31; shl", "%r90, 63; shl", "race between warps: load after"),
    ("a barrier of a part of the warp", warps, WARP_BAR + "ld", "setp.lt.u32 %p2, %r4, 7;\n@%p2 bra $a;\n" + WARP_BAR
     + "$a:\nld", "bar.warp.sync by a part of a warp"),
    ("a wait for one group too few", pipeline, WAIT + " 0", WAIT + " 1", "load of what a copy has not delivered"),
    ("no wait at all", pipeline, WAIT + " 1;", "", "load of what a copy has not delivered"),
    ("no barrier after the wait", pipeline, BAR + "xor", "xor", "race between warps: load after store in shared"),
    ("no barrier after the last wait", pipeline, BAR + "ld.shared.b32 %r4", "ld.shared.b32 %r4", "race between warps"),
    ("a copy that is never awaited", pipeline, WAIT + " 0;\n" + BAR, "", "an asynchronous copy in flight at exit"),
    ("a copy to where one is under way", pipeline, "[%r1 + 256], [%rd1", "[%r1 + 0], [%rd1",
     "cp.async to where a copy"),
    ("copies past the end of the input", pipeline, "[%rd1 + 256]", "[%rd1 + 260]",
     "out of bounds: load of 4 bytes near a0"),
    ("copies past shared memory", pipeline, "[%r1 + 256], [", "[%r1 + 260], [",
     "out of bounds or misaligned: cp.async"),
    ("no barrier of the tiles", product, ARRIVED, "", "wgmma of what a copy has not delivered"),
    ("a barrier of the tiles for one thread", product, ARRIVED, FIRST_ONLY,
     "wgmma of a tile by a thread that has not waited for its mbarrier"),
    ("a barrier of the tiles for one warp", product, ARRIVED, FIRST_ONLY + "bar.warp.sync -1;\n",
     "wgmma of a tile by a thread that has not waited for its mbarrier"),
    ("a tile loaded by one who has not waited", product, ARRIVED,
     FIRST_ONLY + "ld.shared.b32 %r40, [%r2];\n" + BAR, "load of a tile by a thread that has not waited"),
    ("a tile overwritten by one who has not waited", product, ARRIVED,
     FIRST_ONLY + "st.shared.b32 [%r2], 0;\n" + BAR, "store over a tile by a thread that has not waited"),
    ("more bytes than expected", product, "9216", "8192", "mbarrier: more bytes than expected"),
    ("no wait for the product", product, LAST_WAIT, "", "wgmma in flight at exit"),
    ("a wait for one product too few", product, LAST_WAIT, LAST_WAIT.replace("0", "1"), "wgmma in flight at exit"),
    ("a sum stored before the wait", product, LAST_WAIT, "st.global.b32 [%rd90], %r10;\n" + LAST_WAIT,
     "register %r10 is read before the sum of wgmma is there"),
    ("a sum overwritten before the wait", product, LAST_WAIT, "mov.b32 %r13, 0;\n" + LAST_WAIT,
     "register %r13 is written before the sum of wgmma is there"),
    ("a factor overwritten before the wait", product, "wgmma.commit", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16."
     "bf16 {%r14,%r15,%r16,%r17}, {%r3,%r3,%r3,%r3}, %rd20, %p3, 1, 1, 0;\nmov.b32 %r3, 0;\nwgmma.commit",
     "register %r3 is written before wgmma has taken its factor from it"),
    ("a tile over one that is read", product, "wgmma.wait", "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::"
     "complete_tx::bytes [%r2], [%rd1, {0, 0}], [%r1];\nwgmma.wait", "TMA to what wgmma still reads"),
    ("a store over what is read", product, "wgmma.wait", "st.shared.b32 [%r2], %r1;\nwgmma.wait",
     "store to what wgmma still reads"),
    ("a copy over what is read", product, "wgmma.wait", "cp.async.ca.shared.global [%r2], [%rd90], 4;\nwgmma.wait",
     "cp.async to what wgmma still reads"),
    ("two arrivals for one", product, "@%p1 mbarrier.arrive", "mbarrier.arrive", "mbarrier: more arrivals"),
    ("products by a part of a group", product, "wgmma.commit", "setp.lt.u32 %p5, %r90, 64;\n@%p5 wgmma.mma_async.sync."
     "aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13}, %rd13, %rd23, 1, 1, 1, 0, 0;\nwgmma.commit",
     "wgmma by a part of a warpgroup"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "old", "new", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_found(run, old: str, new: str, words: str) -> None:
    body = dict(RIGHT)[run]
    assert body.count(old) >= 1
    assert words in run(body.replace(old, new, 1))


def test_threads_that_meet_one_who_waited_for_a_tile_may_use_it() -> None:
    assert product(PRODUCT.replace(ARRIVED, FIRST_ONLY + BAR)) == ""


@pytest.mark.parametrize("grid", [1, 2])
def test_a_group_of_products_counts_in_its_block_only(grid: int) -> None:
    """The second block commits one more, behind which its product is awaited; the first one's is not."""
    more = "setp.eq.u32 %p6, %r91, 0;\n@%p6 bra $one;\nwgmma.commit_group.sync.aligned;\n$one:\n"
    texts = product(PRODUCT.replace(LAST_WAIT, more + LAST_WAIT.replace("0", "1")), grid)
    assert "register %r10 is read before the sum of wgmma is there" in texts
    assert "wgmma in flight at exit" in texts


@pytest.mark.parametrize("order", ["in order", "random"])
def test_no_barrier_orders_what_several_threads_of_another_block_read(order: str) -> None:
    x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    options = Options(blocks=order) if order == "random" else None
    for stored, words in (("%rd91", ""), ("%rd90", "race across blocks: ")):
        body = APART.replace("st.global.b32 [%rd91]", f"st.global.b32 [{stored}]")
        findings = execute(module(body, 2, 32), [x, out], 2, options=options).findings
        assert any(text.startswith(words) for text in findings) if words else not findings


def test_gaps_between_the_elements_of_a_tensor_are_out_of_bounds() -> None:
    wide = torch.arange(4 * N, dtype=torch.int32)
    assert "out of bounds: load of 4 bytes near a0" in copy(x=wide.view(N, 4)[:, 0])


def test_a_read_of_what_was_never_written_is_counted() -> None:
    x = torch.full((2 * N,), POISON - 65536, dtype=torch.int16).view(torch.int32)
    assert copy(x=x) == "unwritten a0"


def test_tensors_of_one_storage_are_one_region() -> None:
    both = torch.arange(2 * N, dtype=torch.int32)
    assert copy(x=both[:N], out=both[N:]) == ""
    assert "race across blocks: store after load in a0" in copy(x=both[:N], out=both[4 : N + 4])


def test_a_register_of_an_idle_lane_may_be_computed_with_but_not_used() -> None:
    """As where a reduction goes over lanes that loaded nothing."""
    sums = "shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;\nadd.s32 %r3, %r1, %r2;\n@%p1 st.global.b32 [%rd2], %r3;"
    body = COPY.replace("%r92, 50", "%r90, 16").replace("@%p1 st.global.b32 [%rd2 + 0], %r1;", sums)
    memory = execute(module(body, 2), [torch.zeros(N), torch.zeros(N)], 1)
    assert "register %r3 is used where it was not written" in found(memory)
    chosen = sums.replace("@%p1 st", "selp.b32 %r3, %r1, 0, %p1;\nst")
    memory = execute(module(body.replace(sums, chosen), 2), [torch.zeros(N), torch.zeros(N)], 1)
    assert found(memory) == ""


def test_a_part_of_a_register_that_was_not_written_is_not_the_other_one() -> None:
    packed = "mov.b64 %rd7, {%r90, %r1};\nmov.b64 {%r2, %r3}, %rd7;\nst.global.b32 [%rd2], %r2;"
    body = f"add.u64 %rd2, %rd90, %rd80;\n{packed}"
    assert found(execute(module(body, 1), [torch.zeros(32)], 1)) == ""
    memory = execute(module(body.replace("[%rd2], %r2", "[%rd2], %r3"), 1), [torch.zeros(32)], 1)
    assert "register %r3 is used where it was not written" in found(memory)


def test_threads_that_do_not_reach_a_barrier_are_refused() -> None:
    loop = REVERSE.replace(BAR, "setp.lt.u32 %p1, %r90, 32;\n@%p1 ret;\n" + BAR, 1)
    assert "barrier after some threads of the block have exited" in reverse(loop)
    apart = REVERSE.replace(
        BAR, "setp.lt.u32 %p1, %r90, 32;\n@%p1 bra $a;\nbar.sync 0;\nbra $b;\n$a:\nbar.sync 0;\n$b:\n", 1
    )
    assert "threads of a block wait at different barriers" in reverse(apart)


def test_a_finding_and_a_refusal_name_the_line_of_the_source() -> None:
    lines = ".loc 1 41 7\n{};\n.loc 1 42 9\n"
    tail = '\n.file 1 "/somewhere/kernel.py"\n'
    body = COPY.replace("@%p1 ld", "ld").replace("ld.global", lines.format("mov.u32 %r9, 0") + "ld.global")
    memory = execute(module(body, 2) + tail, [torch.zeros(N), torch.zeros(N)], 2)
    assert "out of bounds: load of 4 bytes near a0 at ld.global.b32 %r1, [%rd1 + 0] (kernel.py:42)" in memory.findings
    body = body.replace(
        "add.u64 %rd2", lines.format("mov.u32 %r9, 0") + "vote.sync.any.pred %p2, %p1, -1;\nadd.u64 %rd2"
    )
    with pytest.raises(Unsupported, match=r"vote.sync.any.pred .*\(kernel.py:42\): no row of the table has it"):
        execute(module(body, 2) + tail, [torch.zeros(N), torch.zeros(N)], 2)


INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;\n"
REFUSED_WHEN_RUN = [  # program, old text, new text, what the refusal begins with
    (product, INIT, "", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 9216: want an mbarrier at byte 16384"),
    (product, "9216", "9232", "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0: waits forever"),
    (product, "0x4000004000000002", "0x0000004000000002", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
     "{%r10,%r11,%r12,%r13}, %rd11, %rd21, 1, 1, 1, 0, 0: want one descriptor, swizzled"),
    (product, "%r3, 8192", "%r3, 8320", "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
     "[%r3], [%rd2, {0, 0}], [%r1]: want a tile within the 16392 bytes"),
    (pipeline, "[%rd1 + 0], 4", "[%rd1 + 0], 4, 3",
     "cp.async.ca.shared.global [%r1 + 0], [%rd1 + 0], 4, 3: want 4 bytes to read, or 0; got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "old", "new", "words"), REFUSED_WHEN_RUN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_refusal_while_it_runs_names_the_instruction(run, old: str, new: str, words: str) -> None:
    body = dict(RIGHT)[run]
    assert body.count(old) == 1
    assert words in found_or_refused(lambda: run(body.replace(old, new)))


@pytest.mark.parametrize("batch", [1, 1 << 14])
def test_blocks_that_store_one_value_race_however_many_run_at_once(batch: int) -> None:
    for blocks, words in ((2, "race across blocks"), (1, "")):
        out = torch.zeros(1, dtype=torch.int32)
        memory = execute(module("st.global.b32 [%rd90], 7;", 1), [out], blocks, options=Options(batch=batch))
        assert words in found(memory)
        assert bool(words) == bool(memory.findings)


def test_blocks_run_in_the_order_asked_for() -> None:
    """Blocks add to a number in turn: the order is seen, and reported as a race."""
    body = "ld.global.b32 %r1, [%rd90];\nmul.lo.u32 %r1, %r1, 10;\nadd.u32 %r1, %r1, %r91;\nst.global.b32 [%rd90], %r1;"
    for order, want in (([3, 1, 2], 312), (None, 123)):
        out = torch.zeros(1, dtype=torch.int32)
        memory = execute(module(body, 1, 1), [out], 4, options=Options(batch=1, blocks=order))
        assert out.item() == want
        assert "race across blocks" in found(memory)
    results = set()
    for seed in range(8):
        out = torch.zeros(1, dtype=torch.int32)
        execute(module(body, 1, 1), [out], 4, options=Options(batch=1, blocks="random", seed=seed))
        results.add(out.item())
    assert len(results) > 3
    assert np.all([sorted(f"{result:04}") == list("0123") for result in results])
