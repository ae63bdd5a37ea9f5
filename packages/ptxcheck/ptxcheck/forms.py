"""The forms of the instructions that are modelled, by the first part of their names; arithmetic is in opcodes.py.

{a, b}: one of these. [.a]: may be left out. `shared::cta` may be written for `shared`.
"""

from .opcodes import TABLE, lookup
from .program import Statement

_MEMORY = (
    ".{global, shared}[.v2, .v4].{b, u, s, f}{8, 16, 32, 64}, at most 16 bytes, with hints to the caches or without"
)
_MATRICES = ".sync.aligned.m8n8.{x1, x2, x4}[.trans].shared.b16"
FORMS = {
    "ld": f"ld.param.TYPE of a whole parameter, or ld{_MEMORY}",
    "st": f"st{_MEMORY}",
    "cp": "cp.async.{ca, cg}.shared.global [to], [from], bytes[, bytes to read: all or 0], cp.async.commit_group, "
          "cp.async.wait_group n, or cp.async.bulk.tensor.2d.shared.global.mbarrier::complete_tx::bytes "
          "[to], [map, {column, row}], [mbarrier], cp.async.bulk.tensor.2d.global.shared::cta.bulk_group "
          "[map, {column, row}], [from], cp.async.bulk.commit_group or cp.async.bulk.wait_group[.read] n",
    "shfl": "shfl.sync.{bfly, up, down, idx}.b32 to, from, by, clamp, -1",
    "redux": "redux.sync.{min, max}[.NaN].f32 or redux.sync.{add, min, max}.{s32, u32}",
    "elect": "elect.sync to|predicate, -1",
    "ldmatrix": f"ldmatrix{_MATRICES}",
    "stmatrix": f"stmatrix{_MATRICES}",
    "mma": "mma.sync.aligned.m16n8k16.row.col.f32.{bf16, f16}.{bf16, f16}.f32 with both factors of one type",
    "mbarrier": "mbarrier.{init, inval}.shared.b64, mbarrier.arrive.expect_tx.shared.b64 _, [mbarrier], bytes, or "
                "mbarrier.try_wait.parity.shared.b64",
    "wgmma": "wgmma.mma_async.sync.aligned.m64nNk16.f32.{bf16, f16}.{bf16, f16} with both factors of one type and "
             "neither negated, or wgmma.{fence, commit_group, wait_group}.sync.aligned",
    "fence": "fence.proxy.async[.shared::cta]",
    "cvta": "cvta.param.u64",
    "bar": "bar.sync 0 without a guard, or bar.warp.sync",
}  # fmt: skip


def wanted(s: Statement) -> str:
    """The end of a refusal, behind the instruction and the reason."""
    if s.kind in FORMS:
        return f"; want {FORMS[s.kind]}"
    rows = [row for row in TABLE if s.opcode.startswith(f"{row.name}.")]
    if lookup(s.opcode) or not rows:
        return ""
    name = max((row.name for row in rows), key=len)
    forms = [
        ".".join([row.name, *(f"[{option}]" for option in row.options.split()), f"{{{', '.join(row.types.split())}}}"])
        for row in rows
        if row.name == name
    ]
    return f"; want {' or '.join(forms)}"
