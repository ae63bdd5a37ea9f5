"""Refusals of ptxcheck, before anything runs: the instruction, its line, and the forms that are modelled."""

import pytest
from handwritten import module
from ptxcheck.checked_memory import Memory
from ptxcheck.executor import Executor
from ptxcheck.forms import FORMS
from ptxcheck.program import Program, Unsupported

REFUSED = (
    "ld.weak.global.b32 %r1, [%rd1];", "st.local.b32 [%r1], %r1;", "ld.global.v8.b32 {%r1, %r2}, [%rd1];",
    "atom.global.add.u32 %r1, [%rd1], 1;", "shfl.sync.bfly.b32 %r1|%p1, %r1, 1, 31, -1;",
    "shfl.sync.bfly.b32 %r1, %r1, 1, 31, 255;",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r1}, {%r1}, {%r1};",
    "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1}, [%r1];",
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r1};",
    "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1, 1, 1;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1, 1, -1, 0, 0;",
    ".local .align 8 .b8 depot[8];", "brx.idx %r1, $targets;",
    "barrier.cluster.arrive.aligned;", "setmaxnreg.inc.sync.aligned.u32 232;",
    "cp.async.ca.shared.global.L2::128B [%r1], [%rd1], 4;",
    "bar.sync 1;", "fence.acq_rel.gpu;", "mbarrier.arrive.shared::cta.b64 %rd1, [%r1];", "add.rz.f32 %r1, %r1, %r1;",
    "add.s32 %r1, %rd1, %r1;", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
    "add.s32 %r1, %r1, foo;",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text.split()[0])
def test_what_is_not_modelled_is_refused(text: str) -> None:
    tail = '\n.file 1 "/somewhere/kernel.py"\n'
    with pytest.raises(Unsupported) as error:
        Executor(Program(module(f".loc 1 42 9\n{text}") + tail), Memory())
    assert str(error.value).startswith(f"{text[:-1]} (kernel.py:42)")
    assert FORMS.get(text.partition(".")[0], "") in str(error.value)


def test_a_refusal_of_arithmetic_names_the_rows_of_its_name() -> None:
    with pytest.raises(
        Unsupported, match=r"add.sat.s32 .*: no row of the table has it; want add.{s16, .* or add.\[rn\]"
    ):
        Executor(Program(module("add.sat.s32 %r1, %r1, %r1;")), Memory())
