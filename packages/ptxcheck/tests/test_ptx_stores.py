"""Stores by TMA in ptxcheck: two tiles through one buffer of shared memory, right and with mistakes."""

import pytest
import torch
from handwritten import module
from ptxcheck.checked_memory import Memory
from ptxcheck.executor import Executor
from ptxcheck.program import Program, Unsupported

FENCE, BAR, COMMIT = "fence.proxy.async.shared::cta;\n", "bar.sync 0;\n", "cp.async.bulk.commit_group;\n"
READ = "cp.async.bulk.wait_group.read 0;\n"
WRITE = "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};\n"
TILE = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, ROW}], [%r7];\n"
# 64 threads, each with 8 numbers of 16 bits, fill 8 rows of 128 bytes, which are swizzled; then the next 8.
ROUND = WRITE + FENCE + BAR + TILE + COMMIT + READ
BODY = f"""
mov.b64 %rd1, m0; mov.u32 %r7, 0; setp.eq.u32 %p1, %r90, 0;
shr.u32 %r1, %r90, 3; and.b32 %r2, %r90, 7; xor.b32 %r3, %r2, %r1; shl.b32 %r4, %r3, 4;
mad.lo.u32 %r5, %r1, 128, %r4;
mul.lo.u32 %r10, %r90, 524296; add.u32 %r10, %r10, 65536;
add.u32 %r11, %r10, 131074; add.u32 %r12, %r11, 131074; add.u32 %r13, %r12, 131074;
{ROUND.replace("ROW", "0")}{BAR}add.u32 %r10, %r10, 33554944; add.u32 %r11, %r11, 33554944;
add.u32 %r12, %r12, 33554944; add.u32 %r13, %r13, 33554944;
{ROUND.replace("ROW", "8")}"""


def stored(body: str, blocks: int = 1) -> str:
    """The findings. The last two rows and 8 columns of the tiles are outside."""
    out, memory = torch.full((16, 64), -1, dtype=torch.int16), Memory()
    memory.add(out, "out")
    tensor_map = {"base": out.data_ptr(), "shape": (14, 56), "stride": 128, "box": (8, 64), "size": 2, "span": 128}
    try:
        Executor(Program(module(body, 0, 64, 90, 1)), memory, 1152).run((blocks,), [tensor_map])
    except Unsupported as error:
        return str(error)
    want = torch.arange(1024, dtype=torch.int16).view(16, 64)
    want[14:], want[:, 56:] = -1, -1
    assert memory.findings or torch.equal(out, want)
    return " | ".join(memory.findings)


def test_nothing_is_found_in_a_right_program() -> None:
    assert stored(BODY) == ""
    assert stored(BODY.replace(READ, READ.replace(".read", ""))) == ""


FIRST, SECOND = (TILE.replace("ROW", row) for row in "08")
MISTAKES = [  # title, old text, new text, words of the finding
    ("no fence", FENCE, "", "TMA store of what was written without fence.proxy.async behind it"),
    ("a fence before the write", WRITE + FENCE, FENCE + WRITE, "TMA store of what was written without fence"),
    ("a fence of one warp alone", FENCE, "setp.lt.u32 %p2, %r90, 32;\n@!%p2 bra $a;\n" + FENCE + "$a:\n",
     "TMA store of what was written without fence"),
    ("no barrier before the store", FENCE + BAR, FENCE, "race between warps: load after store in shared memory"),
    ("the barrier behind the store", FENCE + BAR + FIRST, FENCE + FIRST + BAR, "race between warps: load after store"),
    ("no wait before the next write", READ + BAR, BAR, "store to what TMA still stores"),
    ("a wait for one group too few", READ, READ.replace("0", "1"), "store to what TMA still stores"),
    ("a group that is not committed", FIRST + COMMIT, FIRST, "store to what TMA still stores"),
    ("no barrier after the wait", READ + BAR, READ, "race between threads: store after load in shared memory"),
    ("no wait at the end", SECOND + COMMIT + READ, SECOND + COMMIT,
     "a TMA store that still reads shared memory at exit"),
    ("every thread stores", FIRST, FIRST.removeprefix("@%p1 "), "race"),
    ("past shared memory", "mov.u32 %r7, 0", "mov.u32 %r7, 1024", "want a tile within the 1152 bytes"),
    ("a form that is not modelled", FIRST, FIRST.replace(".2d", ".3d"), "cp.async.bulk.tensor.2d.global.shared::cta"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_found(old: str, new: str, words: str) -> None:
    assert BODY.count(old) >= 1
    assert words in stored(BODY.replace(old, new, 1))


def test_a_tile_that_two_blocks_store_is_a_race() -> None:
    assert "race across blocks: store after store in out" in stored(BODY, 2)
