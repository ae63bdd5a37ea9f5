"""Memory whose every access is checked: bounds, alignment, reads of what was never written, races.

The addresses are those of this process. Of each byte is known whether it belongs to a tensor, whether it was written,
whether an asynchronous copy to it is under way, and in shared memory whether its writer has told TMA of it; of each two
or four bytes, which thread wrote and read it last, and between which barriers.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

WARP = 32
POISON = 0xFFA5  # halves of memory that was never written: a NaN in fp32, fp16 and bf16
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
VALID, WRITTEN, PENDING, UNFENCED = 1, 2, 4, 8  # bits of a byte's state
TRACKED = 8 << 20  # bytes of the largest tensor whose races are looked for
Array = Any  # numpy's types of arrays say too little to be worth their length


def every_byte(bits: int, width: int) -> np.unsignedinteger[Any]:
    """The state's bits in each byte of a word; of two words of an access of 16 bytes."""
    word = UNSIGNED[8 * min(width, 8)]
    return word(0x0101010101010101 * bits & int(np.iinfo(word).max))


class Region:
    """Bytes at [base, base + len(data)), with the state, the last writer and the last reader of each grain of them.

    writer, reader: a thread, -1 none; a reader of -2: several. readers: likewise the warp of all that read since the
    last barrier; r_block: the block of all that ever read, since no barrier orders blocks. w_epoch, r_epoch: barriers
    passed at that time; w_warp, r_warp: those of the warp alone.
    """

    def __init__(self, base: int, data: Array, name: str, grain: int, tracked: bool) -> None:
        self.base, self.data, self.name, self.grain = base, data, name, grain
        self.state = np.zeros(len(data), np.uint8)
        self.tracked, self.on_store = tracked, 0  # bits of what is stored
        n = len(data) // grain + 1 if tracked else 0
        self.writer, self.w_epoch, self.w_warp = (np.full(n, -1, np.int32) for _ in range(3))
        self.reader, self.r_epoch, self.r_warp, self.readers = (np.full(n, -1, np.int32) for _ in range(4))
        self.r_block = np.full(n, -1, np.int32)
        self._views: dict[tuple[int, int], Array] = {}

    def view(self, array: Array, width: int) -> Array:
        """`data` or `state` as words of an access of that width; of 16 bytes: pairs of words."""
        key = (id(array), width)
        if key not in self._views:
            words = array[: len(array) // width * width].view(UNSIGNED[8 * min(width, 8)])
            self._views[key] = words.reshape(-1, 2) if width == 16 else words
        return self._views[key]

    def mark(self, at: Array, width: int, on: int = 0, off: int = 0) -> None:
        """Set and clear bits of the state of the accesses at these offsets."""
        state = self.view(self.state, width)
        state[at // width] = (state[at // width] | every_byte(on, width)) & ~every_byte(off, width)

    def has(self, at: Array, width: int, bit: int) -> Array:
        """Which accesses have the bit in every byte."""
        mask = every_byte(bit, width)
        found = self.view(self.state, width)[at // width] & mask == mask
        return found.all(1) if width == 16 else found

    def any(self, at: Array, width: int, bit: int) -> bool:
        """Whether any byte of the accesses has the bit."""
        return bool((self.view(self.state, width)[at // width] & every_byte(bit, width)).any())

    def fenced(self, threads: Array) -> None:
        """These threads tell TMA of what they have written."""
        at = np.flatnonzero(self.state & UNFENCED)
        self.state[at[np.isin(self.writer[at // self.grain], threads)]] &= ~np.uint8(UNFENCED)

    def grains(self, at: Array, width: int) -> Array:
        return (at // self.grain)[:, None] + np.arange(max(1, width // self.grain))


class Race(NamedTuple):
    """Two threads, by their numbers in the grid (-2: several), and the byte of the region that both access."""

    earlier: int
    later: int
    byte: int


class Memory:
    """Regions, and what was found: `findings`, by text; `races`, an example of each finding that is one; `unwritten`,
    reads by region and statement; `traffic`, accesses of lanes by (load or store, region, width). `where` is the
    statement that is executed; `warps`: by warp of the grid, how often it has synchronised alone."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.findings: Counter[str] = Counter()
        self.unwritten: Counter[tuple[str, str]] = Counter()
        self.traffic: Counter[tuple[str, str, int]] = Counter()
        self.races: dict[str, Race] = {}
        self.where = ""
        self.warps: Array = np.zeros(1, np.int32)
        self._bases = np.zeros(0, np.int64)

    def add(self, tensor: Any, name: str) -> None:
        """Let programs access the elements of a torch tensor; POISON in its memory is taken as never written."""
        storage = tensor.untyped_storage()
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return
        base, end = pointer & ~15, (pointer + nbytes + 15) & ~15
        region = next((r for r in self.regions if r.base == base), None)
        if region is None:
            data = np.ctypeslib.as_array((ctypes.c_uint8 * (end - base)).from_address(base))
            region = Region(base, data, name, min(4, max(2, tensor.element_size())), len(data) <= TRACKED)
            poison = POISON if region.grain == 2 else POISON << 16 | POISON
            written = (data.view(UNSIGNED[8 * region.grain]) != poison).astype(np.uint8) * WRITTEN
            region.state[:] = np.repeat(written, region.grain)
            self.put(region)
        size = tensor.element_size()
        if tensor.numel():
            shape, strides = (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1)
            state = region.state[tensor.data_ptr() - base :]
            np.lib.stride_tricks.as_strided(state, shape, strides)[...] |= VALID

    def put(self, region: Region) -> None:
        self.regions = sorted([*self.regions, region], key=lambda r: r.base)
        self._bases = np.array([r.base for r in self.regions], np.int64)

    def find(self, what: str) -> None:
        self.findings[f"{what} at {self.where}"] += 1

    def load(self, address: Array, width: int, threads: Array, epoch: int, block: int) -> Array:
        """Words at these addresses, one access of each thread; POISON where it is not allowed.

        threads: numbers in the grid; epoch: barriers passed; block: threads of a block.
        """
        shape = (len(address), 2) if width == 16 else (len(address),)
        out = np.full(shape, every_byte(POISON & 255, width))
        for region, at, some in self._accesses(address, width, "load"):
            self.traffic["load", region.name, width] += len(at)
            unset = ~region.has(at, width, WRITTEN)
            if unset.any():
                self.unwritten[region.name, self.where] += int(unset.sum())
            if region.tracked:
                self._race(region, at, width, threads[some], epoch, block, False)
            out[some] = region.view(region.data, width)[at // width]
        return out

    def store(self, address: Array, width: int, value: Array, threads: Array, epoch: int, block: int) -> None:
        """Write words, as `load` reads them."""
        for region, at, some in self._accesses(address, width, "store"):
            self.traffic["store", region.name, width] += len(at)
            if region.tracked:
                self._race(region, at, width, threads[some], epoch, block, True)
            words = region.view(region.data, width)
            words[at // width] = value[some]
            if (words[at // width] != value[some]).any():
                self.find(f"two lanes store different values at one address of {region.name}")
            region.mark(at, width, on=WRITTEN | region.on_store)

    def reading(self, region: Region, at: Array, width: int, threads: Array, epoch: int, block: int) -> None:
        """An asynchronous copy from these offsets begins: a load, whose data are not taken yet."""
        self._race(region, at, width, threads, epoch, block, False)

    def copying(self, region: Region, at: Array, width: int, threads: Array, epoch: int, block: int) -> None:
        """An asynchronous copy to these offsets begins: a store, whose data are not there yet."""
        self._race(region, at, width, threads, epoch, block, True)
        region.mark(at, width, on=PENDING)

    def _accesses(self, address: Array, width: int, what: str) -> Iterator[tuple[Region, Array, Array]]:
        """The allowed accesses by region: offsets, and which of the accesses these are; the others are reported."""
        address = address.astype(np.int64)
        aligned = address % width == 0
        if not aligned.all():
            self.find(f"misaligned {what} of {width} bytes")
        which = np.searchsorted(self._bases, address, side="right") - 1
        for k in np.unique(which):
            some = np.flatnonzero((which == k) & aligned)
            if k < 0:
                self.find(f"out of bounds: {what} of {width} bytes below all memory")
                continue
            region = self.regions[k]
            at = address[some] - region.base
            inside = at + width <= len(region.data)
            inside &= region.has(np.where(inside, at, 0), width, VALID)
            if not inside.all():
                self.find(f"out of bounds: {what} of {width} bytes near {region.name}")
                some, at = some[inside], at[inside]
            if len(at):
                yield region, at, some

    def _race(
        self, region: Region, offset: Array, width: int, threads: Array, epoch: int, block: int, store: bool
    ) -> None:
        """Report accesses to one address by two threads in no order, one of them a store: without a barrier between
        them, or from two blocks. Threads of one block may store one value at one address in one instruction."""
        at = region.grains(offset, width)
        who = np.broadcast_to(threads[:, None], at.shape)
        warp = who // WARP
        now = self.warps[warp]
        writer, kind = region.writer[at], "store" if store else "load"
        far = writer // block != who // block
        ordered = (writer // WARP == warp) & (region.w_warp[at] != now)
        bad = (writer >= 0) & (writer != who) & (far | ((region.w_epoch[at] == epoch) & ~ordered))
        if bad.any():
            near = (writer[bad] // WARP == warp[bad]).all()
            place = "across blocks" if (bad & far).any() else "in a warp" if near else "between warps"
            what = f"race {place}: {kind} after store in {region.name}"
            self._find_race(what, writer[bad], who[bad], at[bad] * region.grain)
        if not store:
            self._note_readers(region, at, who, epoch, block)
            return
        reader = region.reader[at]
        far = (region.r_block[at] != -1) & (region.r_block[at] != who // block)
        ordered = (region.readers[at] == warp) & (region.r_warp[at] != now)
        bad = far | ((reader != -1) & (reader != who) & (region.r_epoch[at] == epoch) & ~ordered)
        if bad.any():
            near = (reader[bad] >= 0).all() and (reader[bad] // WARP == warp[bad]).all()
            place = "across blocks" if (bad & far).any() else "in a warp" if near else "between threads"
            what = f"race {place}: store after load in {region.name}"
            self._find_race(what, reader[bad], who[bad], at[bad] * region.grain)
        region.writer[at], region.w_epoch[at], region.w_warp[at] = who, epoch, now
        bad = region.writer[at] // block != who // block  # where several stored, the last lane
        if bad.any():
            what = f"race across blocks: store after store in {region.name}"
            self._find_race(what, who[bad], region.writer[at][bad], at[bad] * region.grain)

    def _find_race(self, what: str, earlier: Array, later: Array, byte: Array) -> None:
        self.find(what)
        i = np.argmax(earlier // WARP != later // WARP)  # within a warp only if there is no other
        self.races.setdefault(f"{what} at {self.where}", Race(int(earlier[i]), int(later[i]), int(byte[i])))

    def _note_readers(self, region: Region, at: Array, who: Array, epoch: int, block: int) -> None:
        """Who reads, since the last barrier of the block; of a warp that has synchronised alone, since then."""
        ours, blocks = who // block, region.r_block[at]
        region.r_block[at] = np.where((blocks == -1) | (blocks == ours), ours, -2)
        region.r_block[at[region.r_block[at] != ours]] = -2  # lanes of several blocks: the last one is there
        warp, before = who // WARP, region.readers[at]
        now = self.warps[warp]
        first = (region.r_epoch[at] != epoch) | (before == -1)
        alone = first | ((before == warp) & (region.r_warp[at] != now)) | (region.reader[at] == who)
        for array, value, mine in ((region.reader, who, alone), (region.readers, warp, first | (before == warp))):
            array[at] = np.where(mine, value, -2)
            array[at[array[at] != value]] = -2  # several lanes of this access: the last one is there
        region.r_epoch[at], region.r_warp[at] = epoch, now
