"""States in which a crash of the machine may leave a folder, by a small model of a file system's durability.

Files and folders are nodes, each with a list of changes. A folder's are its names: one that is made, renamed (which is
atomic) or removed. What fsync of a node has flushed stays; fsync of a file flushes no name, and a folder's no
contents. Of the later changes
    a file keeps any first ones, the next one whole, half or as zeros of its length;
    a folder keeps any first ones, or all but one, which the others have overtaken.
Nodes are independent. Their combinations are too many: those that are enumerated have one node at each of its cuts and
all others at an end, names and contents for themselves: all that was written, or only what was flushed.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from file_calls import Call

Cut = tuple[int, str]  # so many changes, and what of the next: nothing, "torn" or "zeros"; "lost": all but this one


@dataclass(eq=False)
class _Node:
    """changes: of a file (offset, data), or (size, None) where it is cut or lengthened; of a folder (names that are
    removed, name that is added or None, its node). noise: nothing depends on it."""

    folder: bool
    noise: bool
    changes: list[tuple] = field(default_factory=list)
    flushed: int = 0
    digests: dict[Cut, str] = field(default_factory=dict)

    def cuts(self) -> list[Cut]:
        """The states that a crash may leave; the first is what was flushed."""
        pending = range(self.flushed, len(self.changes))
        found = [(count, "") for count in (*pending, len(self.changes))]
        if self.folder:
            return found + [(place, "lost") for place in pending[:-1]]
        return found + [(p, how) for p in pending if len(self.changes[p][1] or b"") > 1 for how in ("torn", "zeros")]

    def content(self, cut: Cut) -> bytes:
        count, how = cut
        content = bytearray()
        for offset, data in self.changes[:count]:
            _change(content, offset, data)
        if how:
            offset, data = self.changes[count]
            _change(content, offset, bytes(len(data)) if how == "zeros" else data[: len(data) // 2])
        return bytes(content)

    def names(self, cut: Cut) -> dict[str, int]:
        count, how = cut
        kept = self.changes[:count] if how != "lost" else self.changes[:count] + self.changes[count + 1 :]
        names: dict[str, int] = {}
        for removed, added, node in kept:
            for name in removed:
                names.pop(name, None)
            if added is not None:
                names[added] = node
        return names

    def digest(self, cut: Cut) -> str:
        if cut not in self.digests:
            self.digests[cut] = hashlib.sha1(self.content(cut)).hexdigest()
        return self.digests[cut]


def _change(content: bytearray, offset: int | None, data: bytes | None) -> None:
    at = len(content) if offset is None else offset
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data) if data is not None else None] = data or b""


@dataclass
class State:
    """A folder as a crash may leave it. after: the number of calls. marks: that the process had passed."""

    files: dict[str, bytes | None]  # None: a folder
    after: int
    marks: tuple[str, ...]
    what: str

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for name, content in self.files.items():
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)


class Disk:
    """A folder, empty at first, to which calls happen. noise: whether nothing depends on a path."""

    def __init__(self, noise: Callable[[str], bool] = lambda path: False) -> None:
        self.noise = noise
        self.nodes = [_Node(folder=True, noise=False)]

    def apply(self, call: Call) -> None:
        """A call that succeeds, or fails because its file exists already, or is missing, or its folder is."""
        if call.kind in ("write", "truncate", "fsync"):
            if (node := self._find(call.path)) is None:
                assert call.path.endswith(" (deleted)"), call.path
            elif call.kind == "fsync":
                node.flushed = len(node.changes)
            else:
                node.changes.append((call.offset, call.data if call.kind == "write" else None))
            return
        if call.kind == "rename":
            self._rename(call)
        elif call.kind in ("unlink", "rmdir"):
            if self._find(call.path) is not None:
                self._name(call.path).changes.append(((_last(call.path),), None, 0))
        elif (node := self._find(call.path)) is None:
            if (call.kind == "mkdir" or call.create) and self._find(str(Path(call.path).parent)) is not None:
                self._make(call.path, call.kind == "mkdir")
        elif call.kind == "open" and call.empty and node.content((len(node.changes), "")):
            node.changes.append((0, None))

    def _make(self, path: str, folder: bool) -> None:
        self.nodes.append(_Node(folder, self.noise(path)))
        self._name(path).changes.append(((), _last(path), len(self.nodes) - 1))

    def _rename(self, call: Call) -> None:
        if (node := self._find(call.path)) is None:
            return
        assert Path(call.path).parent == Path(call.to).parent, f"{call} into another folder is not understood here"
        self._name(call.path).changes.append(((_last(call.path),), _last(call.to), self.nodes.index(node)))

    def _name(self, path: str) -> _Node:
        """The folder that has the path's last name."""
        parent = self._find(str(Path(path).parent))
        assert parent is not None, f"no folder has {path}"
        return parent

    def _find(self, path: str) -> _Node | None:
        node = self.nodes[0]
        for name in Path(path).parts:
            names = node.names((len(node.changes), "")) if node.folder else {}
            if name not in names:
                return None
            node = self.nodes[names[name]]
        return node

    def crashes(self, most: int = 0) -> Iterator[tuple[str, list[Cut]]]:
        """The states that a crash may leave now: a cut of each node. most: so many combinations are enumerated."""
        cuts = [node.cuts() if not node.noise else [(len(node.changes), "")] for node in self.nodes]
        combinations = 1
        for each in cuts:
            combinations *= len(each)
        if combinations <= most:
            for each in product(*cuts):
                yield "a combination", list(each)
            return
        for names, contents in product((True, False), repeat=2):
            whole = [names if node.folder else contents for node in self.nodes]
            base = [
                (len(node.changes), "") if all_of or node.noise else (node.flushed, "")
                for node, all_of in zip(self.nodes, whole, strict=True)
            ]
            about = f"names {'written' if names else 'flushed'}, contents {'written' if contents else 'flushed'}"
            yield about, base
            for place, each in enumerate(cuts):
                for cut in each:
                    if cut != base[place]:
                        yield f"{about}, node {place} at {cut}", [*base[:place], cut, *base[place + 1 :]]

    def tree(self, cuts: Sequence[Cut], root: int = 0, place: str = "") -> Iterator[tuple[str, int]]:
        """Paths and their nodes."""
        for name, node in self.nodes[root].names(cuts[root]).items():
            yield place + name, node
            if self.nodes[node].folder:
                yield from self.tree(cuts, node, f"{place}{name}/")

    def files(self, cuts: Sequence[Cut] | None = None) -> dict[str, bytes | None]:
        """Contents by path; without cuts all that was written."""
        cuts = cuts or [(len(node.changes), "") for node in self.nodes]
        found = dict(self.tree(cuts))
        return {path: None if self.nodes[n].folder else self.nodes[n].content(cuts[n]) for path, n in found.items()}

    def key(self, cuts: Sequence[Cut]) -> tuple[tuple[str, str], ...]:
        """The parts of a state that may matter."""
        return tuple(
            sorted(
                (path, "" if self.nodes[n].folder else self.nodes[n].digest(cuts[n]))
                for path, n in self.tree(cuts)
                if not self.nodes[n].noise
            )
        )


@dataclass
class Counts:
    """Counts of an enumeration."""

    calls: int = 0
    states: int = 0
    distinct: int = 0


def states(
    calls: Sequence[Call], counts: Counts, noise: Callable[[str], bool] = lambda path: False, most: int = 0
) -> Iterator[State]:
    """Every state, once, that a crash may leave after each of the calls."""
    disk, seen, marks = Disk(noise), set(), []
    for after, call in enumerate(calls, 1):
        if call.kind == "mark":
            marks.append(call.path)
        else:
            counts.calls += 1
            disk.apply(call)
        if noise(call.path):
            continue
        for what, cuts in disk.crashes(most):
            counts.states += 1
            key = (disk.key(cuts), len(marks))
            if key not in seen:
                seen.add(key)
                counts.distinct += 1
                yield State(disk.files(cuts), after, tuple(marks), f"after {call.kind} {call.path} ({after}): {what}")


def _last(path: str) -> str:
    return Path(path).name
