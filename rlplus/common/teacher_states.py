"""Files with a frozen teacher's hidden states for the tokens of demonstrations, and with its head.

A folder has `states.json`, `head.safetensors` and shards `states-00001.safetensors`, in which each sequence has a
tensor (T, H) under its `digest`. `examples/score_demonstrations.py --states` writes it.
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplus.common.durable import replacing, write_text

if TYPE_CHECKING:
    from torch import Tensor

FACTS, HEAD = "states.json", "head.safetensors"
SHARD_BYTES = 1 << 30
Header = Mapping[str, Mapping[str, Any]]


def digest(prompt: Sequence[int], response: Sequence[int]) -> str:
    """The name of a sequence: of its token ids, and of where the response begins."""
    tokens = array("q", [len(prompt), *prompt, *response]).tobytes()
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A hash of a tokenizer's tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


class TeacherStates:
    """The states in a folder, of which the names are read at once and the tensors when they are asked for.

    facts: what `StatesWriter` was told of the teacher. ValueError for a folder that is no such one, or not complete.
    """

    def __init__(self, folder: str | Path, *, complete: bool = True) -> None:
        self.folder = Path(folder)
        try:
            facts = json.loads((self.folder / FACTS).read_text())
            self.facts: dict[str, Any] = facts["teacher"]
            whole: bool = facts["complete"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"want a folder of examples/score_demonstrations.py --states; got {folder}: {error}"
            ) from error
        if complete and not whole:
            raise ValueError(f"{folder} has a part of the states: run examples/score_demonstrations.py --states again")
        self._open: dict[Path, Any] = {}
        self._shards = {
            name: path for path in sorted(self.folder.glob("states-*.safetensors")) for name in _header(path)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def head_bytes(self) -> int:
        return (self.folder / HEAD).stat().st_size

    def head(self) -> "dict[str, Tensor]":
        """The head's weight, and its bias if it has one."""
        from safetensors.torch import load_file

        return load_file(self.folder / HEAD)

    def read(self, name: str) -> "Tensor":
        """The states (T, H) of a sequence. KeyError if they are not there."""
        from safetensors import safe_open

        path = self._shards[name]
        if path not in self._open:  # and mapped
            self._open[path] = safe_open(path, framework="pt")
        states: Tensor = self._open[path].get_tensor(name)
        return states


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: Header = json.loads(file.read(size))
    return {name: about for name, about in header.items() if name != "__metadata__"}


class StatesWriter:
    """Writes such a folder; goes on where another one of the same teacher was interrupted.

    teacher: facts that the states depend on. head: tensors by name. ValueError for a folder of another teacher.
    """

    def __init__(self, folder: Path, teacher: Mapping[str, Any], head: "Mapping[str, Tensor]") -> None:
        self.folder, self._teacher = folder, dict(teacher)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / FACTS).exists():
            self.known = TeacherStates(folder, complete=False)
            if different := [key for key, value in teacher.items() if self.known.facts.get(key) != value]:
                raise ValueError(
                    f"want an empty folder, or one with this teacher's states; {folder} has another's, whose "
                    f"{different[0]} is {self.known.facts.get(different[0])!r}, not {teacher[different[0]]!r}"
                )
        else:
            if any(folder.iterdir()):
                raise ValueError(f"want an empty folder, or one with states of this teacher; got {folder}")
            self._save(folder / HEAD, head)
            self._note(complete=False)
            self.known = TeacherStates(folder, complete=False)
        self._count = len([*folder.glob("states-*.safetensors")])
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, name: str, states: "Tensor") -> None:
        """Keep a sequence's states (T, H), on the CPU."""
        self._waiting[name] = states.contiguous()
        self._bytes += states.nbytes
        if self._bytes >= SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """All states are there."""
        self._flush()
        self._note(complete=True)

    def _flush(self) -> None:
        if self._waiting:
            self._count += 1
            self._save(self.folder / f"states-{self._count:05}.safetensors", self._waiting)
        self._waiting, self._bytes = {}, 0

    def _save(self, path: Path, tensors: "Mapping[str, Tensor]") -> None:
        from safetensors.torch import save

        with replacing(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def _note(self, *, complete: bool) -> None:
        write_text(self.folder / FACTS, json.dumps({"complete": complete, "teacher": self._teacher}, indent=1) + "\n")
