"""Draw race.svg, the picture of README.md, from the report of a race that is planted here: `python tests/picture.py`.

TRITON_INTERPRET must not be set.
"""

import re
from html import escape
from pathlib import Path

import torch
import triton
import triton.language as tl
from ptxcheck.checked_memory import WARP
from ptxcheck.launcher import executed

PICTURE = Path(__file__).parents[1] / "race.svg"
STYLE = """
text { font: 14px ui-monospace, monospace; fill: #1f2328; }
.head { font-weight: bold; } .small { font-size: 12px; }
.box { fill: #f6f8fa; stroke: #59636e; } .line { stroke: #59636e; }
.bad { stroke: #d1242f; stroke-dasharray: 6 4; stroke-width: 2; } text.red { fill: #d1242f; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .box { fill: #151b23; stroke: #9198a1; } .line { stroke: #9198a1; }
  .bad { stroke: #ff7b72; } text.red { fill: #ff7b72; }
}
"""


@triton.jit
def transpose(out, x, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(out + j[:, None] * M + i[None, :], v.T)  # other threads hold what a column needs: through shared memory


def without_barrier(name: str, ptx: str) -> str:
    return re.sub(r"bar\.sync\s+0;", "", ptx, count=1)


def draw() -> str:
    with executed(80, edit=without_barrier) as runs:
        transpose[(1,)](torch.zeros(32, 64), torch.randn(64, 32), 64, 32)
    memory, statements = runs[0].memory, runs[0].program.statements
    finding, race = next(iter(memory.races.items()))
    what, _, where = finding.partition(" at ")
    load = next(s for s in statements if str(s) == where)
    store = next(s for s in statements if s.opcode.startswith("st.shared"))
    writer, reader = (f"warp {thread // WARP}, lane {thread % WARP}" for thread in race[:2])
    rows = [
        '<rect class="box" x="250" y="70" width="180" height="150" rx="6"/>',
        text(340, 60, "shared memory", "head", "middle"), text(120, 60, writer, "head", "middle"),
        text(560, 60, reader, "head", "middle"), text(340, 152, f"byte {race.byte}", "", "middle"),
        text(120, 100, store.opcode, "", "middle"), text(120, 118, store.source, "small", "middle"),
        text(560, 195, load.opcode, "", "middle"), text(560, 213, load.source, "small", "middle"),
        arrow(200, 96, 290, 138), arrow(390, 158, 480, 191),
        '<line class="bad" x1="450" y1="120" x2="670" y2="120"/>',
        '<line class="bad" x1="20" y1="145" x2="230" y2="145"/>',
        text(120, 168, "bar.sync 0", "red", "middle"), text(560, 110, "bar.sync 0", "red", "middle"),
        text(120, 186, "left out: nothing orders", "small", "middle"),
        text(120, 202, "the store and the load", "small", "middle"), text(20, 30, what, "head"),
    ]  # fmt: skip
    label = f"{what}: {writer} stores, {reader} loads, and the barrier between them is left out."
    body = "\n".join(rows)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 240" role="img" '
        f'aria-label="{escape(label)}">\n<style>{STYLE}</style>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path class="line" d="M1 1 7 4 1 7" fill="none"/></marker></defs>\n{body}\n</svg>\n'
    )


def text(x: int, y: int, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
