"""Files with a frozen teacher's hidden states for the tokens of demonstrations, and with its head.

A folder has `states.json`, `head.safetensors` and shards `states-00001.safetensors`, in which each sequence has a
tensor (T, H) under its `digest`. `examples/score_demonstrations.py --states` writes it.
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplus.common.durable import remove_unfinished, replacing, write_text

if TYPE_CHECKING:
    from torch import Tensor

FACTS, HEAD, LOCK = "states.json", "head.safetensors", ".lock"
SHARD_BYTES = 1 << 28  # writing takes three times as much memory
AGAIN = "run examples/score_demonstrations.py --states again"


def digest(prompt: Sequence[int], response: Sequence[int]) -> str:
    """The name of a sequence: of its token ids, and of where the response begins."""
    tokens = array("q", [len(prompt), *prompt, *response]).tobytes()
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """A hash of a tokenizer's tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


class TeacherStates:
    """The states in a folder; names are read when one is asked for, and tensors one at a time.

    facts: what `StatesWriter` was told of the teacher. ValueError for a folder that is no such one, or not complete,
    and for a damaged file.
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
            raise ValueError(f"{folder} has a part of the states: {AGAIN}")
        self._open: dict[Path, Any] = {}

    @cached_property
    def _shards(self) -> dict[str, Path]:
        return {name: path for path in sorted(self.folder.glob("states-*.safetensors")) for name in _names(path)}

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

        _names(self.folder / HEAD)
        return load_file(self.folder / HEAD)

    def read(self, name: str) -> "Tensor":
        """The states (T, H) of a sequence. KeyError if they are not there."""
        from safetensors import safe_open

        path = self._shards[name]
        if path not in self._open:  # and mapped
            self._open[path] = safe_open(path, framework="pt")
        states: Tensor = self._open[path].get_tensor(name)
        return states


def _names(path: Path) -> list[str]:
    """The names of a file's tensors; ValueError unless it is as long as it says."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > path.stat().st_size:
                raise ValueError("no safetensors")
            header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        end = 8 + size + max((about["data_offsets"][1] for about in header.values()), default=0)
        if end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes of {end}")
    except (OSError, ValueError, struct.error, AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and {AGAIN}") from error
    return list(header)


class StatesWriter:
    """Writes such a folder; goes on where another one of the same teacher was interrupted.

    For one process at a time, which holds the lock `folder / LOCK`. teacher: facts that the states depend on. head:
    tensors by name. known: the states that are there. ValueError for a folder of another teacher.
    """

    def __init__(self, folder: Path, teacher: Mapping[str, Any], head: "Mapping[str, Tensor]") -> None:
        self.folder, self._teacher = folder, dict(teacher)
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder, r".*\.safetensors|states\.json")
        if (folder / FACTS).exists():
            there = TeacherStates(folder, complete=False)
            if different := [key for key, value in teacher.items() if there.facts.get(key) != value]:
                key = different[0]
                raise ValueError(
                    f"want an empty folder, or one with this teacher's states; {folder} has another's, whose {key} is "
                    f"{there.facts.get(key)!r}, not {teacher[key]!r}"
                )
            len(there)  # raises for a damaged file
        elif any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"want an empty folder, or one with states of this teacher; got {folder}")
        self._note(complete=False)
        if not (folder / HEAD).exists():
            self._save(folder / HEAD, head)
        self.known = TeacherStates(folder, complete=False)
        self._number = max(
            (int(path.stem.rpartition("-")[2]) for path in folder.glob("states-*.safetensors")), default=0
        )
        self._added: list[str] = []
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, name: str, states: "Tensor") -> None:
        """Keep a sequence's states (T, H)."""
        self._added.append(name)
        self._waiting[name] = states.cpu().clone()  # a view would hold its whole batch
        self._bytes += states.nbytes
        if self._bytes >= SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """All states are there. ValueError if they are not."""
        self._flush()
        there = TeacherStates(self.folder, complete=False)
        if lost := sum(name not in there for name in self._added):
            raise ValueError(f"{lost} of {len(self._added)} states that were written are not in {self.folder}: {AGAIN}")
        self._note(complete=True)

    def _flush(self) -> None:
        if self._waiting:
            self._number += 1
            self._save(self.folder / f"states-{self._number:05}.safetensors", self._waiting)
        self._waiting, self._bytes = {}, 0

    def _save(self, path: Path, tensors: "Mapping[str, Tensor]") -> None:
        from safetensors.torch import save

        with replacing(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def _note(self, *, complete: bool) -> None:
        write_text(self.folder / FACTS, json.dumps({"complete": complete, "teacher": self._teacher}, indent=1) + "\n")
