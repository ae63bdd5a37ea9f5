"""Execute a program: basic blocks of the lowest number first, under masks, until all threads have returned.

    memory = Memory(); memory.add(tensor, "x")
    Executor(Program(ptx), memory, shared_bytes).run(grid, [tensor.data_ptr(), 7])
    assert not memory.findings

Instructions that are not modelled raise Unsupported, with the line of the kernel's source and the forms that are
modelled, before anything runs; what only their operands show, when they run.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import accesses, async_copies, exchanges, hopper, tile_stores
from .arithmetic import arithmetic
from .checked_memory import PENDING, UNFENCED, UNSIGNED, VALID, WARP, Array, Memory, Region
from .forms import wanted
from .lanes import Lanes, Mask
from .opcodes import DTYPES
from .program import ENDS_BLOCK, Program, Statement, Unsupported
from .warpgroups import Products

Handler = Callable[["Executor", Statement], Callable[[Mask], None]]
HANDLERS: dict[str, Handler] = accesses.HANDLERS | async_copies.HANDLERS | exchanges.HANDLERS | hopper.HANDLERS
COLLECTIVE = ("shfl", "redux", "ldmatrix", "stmatrix", "mma", "elect")  # run also where the guard is false everywhere


class Options(NamedTuple):
    """How to execute what the manual leaves open, and in which order.

    approximation: the error of ex2.approx and the like in units of its bound, in [-1, 1]; "random": of each lane.
    truncate: sums of mma round towards 0, not to nearest. seed: of what is random. batch: lanes at once. blocks: the
    blocks to execute, in this order; None: all; "random": all, in random order.
    """

    approximation: float | str = 0.0
    truncate: bool = False
    seed: int = 0
    batch: int = 1 << 14
    blocks: Sequence[int] | str | None = None


class Shared:
    """Shared memory of a batch of blocks, a window for each block, and the copies that are under way."""

    def __init__(self, memory: Memory, size: int, blocks: int, threads: int) -> None:
        stride = -(-size // 1024) * 1024
        data = np.zeros(max(16, stride * blocks), np.uint8)
        self.size, self.region = size, Region(0, data, "shared memory", 2, True)
        self.region.on_store = UNFENCED
        if size:
            self.region.state.reshape(blocks, stride)[:, :size] = VALID
        self.memory = Memory()
        self.memory.findings, self.memory.unwritten = memory.findings, memory.unwritten
        self.memory.traffic, self.memory.warps, self.memory.races = memory.traffic, memory.warps, memory.races
        self.memory.put(self.region)
        self.window = np.repeat(np.arange(blocks, dtype=np.int64) * stride, threads)  # one per lane
        self.copies = async_copies.Copies(blocks * threads)
        self.barriers: dict[tuple[int, int], hopper.Barrier] = {}  # by block of the batch and address
        self.arrivals = hopper.Arrivals(len(data), blocks, threads)
        self.products = Products(blocks * threads)
        self.stores = tile_stores.Stores(blocks * threads)

    def require_delivered(self, at: Array, width: int, who: Array, what: str, size: int = 1) -> None:
        """Report if a copy has not brought what is about to be read at these places by lanes, or by groups of `size`
        lanes, or if they do not know that it has."""
        if self.region.any(at, width, PENDING):
            self.memory.find(f"{what} of what a copy has not delivered")
        self._require_tiles(at, who, f"{what} of", size)

    def _require_tiles(self, at: Array, who: Array, what: str, size: int) -> None:
        if self.arrivals.rows and self.arrivals.unknown(at, who, size):
            self.memory.find(f"{what} a tile by a thread that has not waited for its mbarrier")

    def overwritten(self, at: Array, lanes: Array, what: str) -> None:
        """Lanes are about to write at these places: no tile lies there any more."""
        if self.products.read(at):
            self.memory.find(f"{what} to what wgmma still reads")
        if self.stores.reads(at):
            self.memory.find(f"{what} to what TMA still stores")
        if self.arrivals.rows:
            self._require_tiles(at, lanes, f"{what} over", 1)
            self.arrivals.row[at // 16] = -1


class Executor(Lanes):
    """One launch."""

    def __init__(self, program: Program, memory: Memory, shared_bytes: int = 0, options: Options | None = None) -> None:
        super().__init__(program, memory)
        self.options = options or Options()
        self.shared_bytes = shared_bytes
        self.random = np.random.default_rng(self.options.seed)
        self.executed = np.zeros(len(program.statements), np.int64)  # lanes, of each statement
        self.code = [self._compile(s) for s in program.statements]
        self.parameters: dict[str, Array] = {}
        self.tensor_maps: dict[int, dict[str, Any]] = {}
        self.epoch = 0  # barriers passed
        self.shared = Shared(memory, shared_bytes, 1, program.threads)

    def run(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """arguments: a number for each parameter; of a tensor map a dictionary (launcher.py)."""
        x, y, z = (*grid, 1, 1)[:3]
        if len(arguments) != len(self.program.parameters):
            raise ValueError(f"want {len(self.program.parameters)} arguments, got {len(arguments)}")
        for (name, kind), value in zip(self.program.parameters, arguments, strict=True):
            if kind == "map":
                self.tensor_maps[self.maps[name]] = value
            else:
                self.parameters[name] = _bits(kind, value)
        blocks = self.options.blocks
        if blocks is None:
            blocks = range(x * y * z)
        elif isinstance(blocks, str):
            blocks = self.random.permutation(x * y * z)
        self.memory.warps = np.zeros(x * y * z * self.program.threads // WARP + 1, np.int32)
        each = max(1, self.options.batch // self.program.threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(blocks), each):
                self._run_batch(np.asarray(blocks[first : first + each], np.int64), (x, y, z))

    def error(self, shape: tuple[int, ...]) -> Any:
        """Errors of an approximation, in units of its bound."""
        if isinstance(self.options.approximation, str):
            return self.random.uniform(-1, 1, shape)
        return self.options.approximation

    def find(self, what: str) -> None:
        self.memory.find(what)

    def _compile(self, s: Statement) -> Callable[[Mask], None]:
        if s.kind in ENDS_BLOCK:
            if s.kind == "bar" and not (s.opcode == "bar.warp.sync" or (s.text == "bar.sync 0" and not s.guard)):
                raise Unsupported(f"{s}: of another form{wanted(s)}")
            return lambda m: None
        try:
            return HANDLERS.get(s.kind, arithmetic)(self, s)
        except Unsupported as error:
            raise Unsupported(f"{s}: {error}{wanted(s)}") from error
        except (KeyError, ValueError, IndexError) as error:
            raise Unsupported(f"{s}: of another form{wanted(s)}") from error

    # ---- control

    def _run_batch(self, blocks: Array, grid: tuple[int, int, int]) -> None:
        self.begin(blocks, grid)
        self.shared = Shared(self.memory, self.shared_bytes, len(blocks), self.program.threads)
        self.pending: dict[int, Mask] = {0: None}  # basic block -> the lanes that are to run it
        self.waiting: dict[int, Array] = {}  # the same of lanes at a barrier
        self.exited = np.zeros(self.size, bool)
        starts = [*self.program.starts, len(self.program.statements)]
        try:
            self._run_blocks(starts)
        except Unsupported as error:
            raise Unsupported(f"{self.memory.where}: {error}") from error
        if self.shared.copies.any() or any(barrier.copies for barrier in self.shared.barriers.values()):
            self.find("an asynchronous copy in flight at exit")
        if self.shared.products.flying:
            self.find("wgmma in flight at exit")
        self.shared.stores.finish(self)

    def _run_blocks(self, starts: list[int]) -> None:
        while self.pending or self.waiting:
            if not self.pending:
                self._pass_barrier()
                continue
            block = min(self.pending)
            m = self.pending.pop(block)
            first = starts[block] if block < len(starts) else len(self.program.statements)
            if first >= len(self.program.statements):
                self.exited |= self._lanes(m)
            elif m is None or m.any():
                self._run_block(block, first, starts[block + 1], m)

    def _run_block(self, block: int, first: int, stop: int, m: Mask) -> None:
        self.executed[first:stop] += self.size if m is None else int(m.sum())
        statements = self.program.statements
        for i in range(first, stop):
            s = statements[i]
            self.memory.where = self.shared.memory.where = s
            if s.kind in ENDS_BLOCK:
                self._leave(block, s, m)
                return
            self.code[i](m) if s.guard is None else self._guarded(i, s, m)
        self._go(block + 1, m)

    def _guarded(self, i: int, s: Statement, m: Mask) -> None:
        on = self._guard(s, m)
        if on.all():
            self.code[i](None)
        elif on.any() or s.kind in COLLECTIVE:
            self.code[i](on)

    def _guard(self, s: Statement, m: Mask) -> Array:
        guard = str(s.guard)
        self.require((guard,), m)
        on = ~self.read(guard) if s.negated else self.read(guard)
        return on if m is None else on & m

    def _leave(self, block: int, s: Statement, m: Mask) -> None:
        """Branch, return, or wait at a barrier."""
        if s.opcode == "bar.warp.sync":
            self.whole_warps(m, "bar.warp.sync")
            self.memory.warps[np.unique(self.thread[self.lanes_of(m)] // WARP)] += 1
            self.shared.arrivals.meet(self.lanes_of(m), WARP)
            self._go(block + 1, m)
        elif s.kind == "bar":
            self.waiting[block + 1] = self._lanes(m) | self.waiting.get(block + 1, False)
        else:
            taken = self._lanes(m) if s.guard is None else self._guard(s, m)
            rest = self._lanes(m) & ~taken
            if rest.any():
                self._go(block + 1, rest)
            if s.kind == "bra":
                self._go(self.program.labels[str(s.operands[0])], taken)
            else:
                self.exited |= taken

    def _lanes(self, m: Mask) -> Array:
        return np.ones(self.size, bool) if m is None else m

    def _go(self, block: int, m: Mask) -> None:
        both = m
        if block in self.pending and m is not None:
            other = self.pending[block]
            both = None if other is None else m | other
        if both is None or both.any():
            self.pending[block] = None if both is None or both.all() else both

    def _pass_barrier(self) -> None:
        """All lanes wait or are gone."""
        T = self.program.threads
        here = np.logical_or.reduce(list(self.waiting.values())).reshape(-1, T)
        waits, gone = here.any(1), self.exited.reshape(-1, T)
        self.memory.where = self.program.statements[self.program.starts[min(self.waiting)] - 1]
        if (waits & (~here & ~gone).any(1)).any():
            raise Unsupported("want all threads of the block to reach the barrier or to exit; some wait elsewhere")
        if (waits & gone.any(1)).any():
            self.find("barrier after some threads of the block have exited")
        for m in self.waiting.values():
            one = m.reshape(-1, T)
            if (one.any(1) & (one != here).any(1)).any():
                self.find("threads of a block wait at different barriers")
        self.epoch += 1
        self.shared.arrivals.meet(np.flatnonzero(here), T)
        self.pending, self.waiting = {k: None if m.all() else m for k, m in self.waiting.items()}, {}


def _bits(kind: str, value: float) -> Array:
    """The bits of an argument."""
    dtype = DTYPES[kind]
    bits = 8 * np.dtype(dtype).itemsize
    if kind[0] == "f":
        return np.array([value], dtype).view(UNSIGNED[bits])
    return np.array([int(value) & ((1 << bits) - 1)], UNSIGNED[bits])
