"""Files with a frozen teacher's hidden states for the tokens of demonstrations, and with its head.

A folder has `states.json`, `head.safetensors` and shards `states-00001.safetensors`, in which each sequence has a
tensor (T, H) under its `digest`. `examples/score_demonstrations.py --states` writes it. states.json is sealed and has
the CRC-32 of each file's header, which has the tensors' own: a file of another folder is damage, as a changed bit.
"""

import hashlib
import json
import logging
import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplus.common.durable import UNSEALED, is_sealed, remove_unfinished, replacing, write_text

if TYPE_CHECKING:
    from torch import Tensor

FACTS = "states.json"
HEAD = "head.safetensors"
LOCK = ".lock"
SHARD_BYTES = 1 << 28  # writing takes three times as much memory
logger = logging.getLogger(__name__)

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

    facts: what `StatesWriter` was told of the teacher. files: the CRC-32 of each file's header by its name; None for a
    folder of rlplus 0.3 or earlier, which has no checksums. ValueError for a folder that is no such one, or not
    complete, and for a damaged file; a tensor is compared with its checksum when it is read first.
    """

    def __init__(self, folder: str | Path, *, complete: bool = True) -> None:
        self.folder = Path(folder)
        try:
            content = (self.folder / FACTS).read_bytes()
            facts = json.loads(content)
            self.facts: dict[str, Any] = facts["teacher"]
            whole: bool = facts["complete"]
            self.files: dict[str, str] | None = facts.get("files")
            if not is_sealed(content, self.folder / FACTS) and self.files is not None:
                raise ValueError("its checksum is missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"want a folder of examples/score_demonstrations.py --states; got {folder}: {error}"
            ) from error
        if complete and not whole:
            raise ValueError(f"{folder} has a part of the states: {AGAIN}")
        if complete and self.files is None:
            logger.warning("%s was written by rlplus 0.3 or earlier, without checksums: damage is not noticed", folder)
        self._open: dict[Path, Any] = {}
        self._compared: set[str] = set()

    @cached_property
    def _shards(self) -> dict[str, tuple[Path, str | None]]:
        """The file of each sequence, and the tensor's checksum."""
        names = sorted(path.name for path in self.folder.glob("states-*")) if self.files is None else sorted(self.files)
        paths = [self.folder / name for name in names if name != HEAD]
        return {name: (path, crc) for path in paths for name, crc in self._tensors(path).items()}

    def _tensors(self, path: Path) -> dict[str, str | None]:
        """The checksum of each tensor of a file by name; ValueError for another header than was written."""
        tensors, crc = header(path)
        if self.files is not None and (want := self.files.get(path.name)) != crc:
            raise ValueError(f"{path} is damaged (want a header with CRC-32 {want}; got {crc}): remove it, and {AGAIN}")
        return tensors

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

        checksums = self._tensors(self.folder / HEAD)
        path = self.folder / HEAD
        head = load_file(path)
        for name, tensor in head.items():
            _compare(tensor, checksums[name], path)
        return head

    def read(self, name: str) -> "Tensor":
        """The states (T, H) of a sequence. KeyError if they are not there."""
        from safetensors import safe_open

        path, checksum = self._shards[name]
        if path not in self._open:  # and mapped
            self._open[path] = safe_open(path, framework="pt")
        states: Tensor = self._open[path].get_tensor(name)
        if name not in self._compared:
            _compare(states, checksum, path)
            self._compared.add(name)
        return states


def header(path: Path) -> tuple[dict[str, str | None], str]:
    """The checksum of each tensor of a file by name, and the header's; ValueError unless it is as long as it says."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > path.stat().st_size:
                raise ValueError("no safetensors")
            text = file.read(size)
        tensors: dict[str, Any] = json.loads(text)
        checksums = tensors.pop("__metadata__", {})
        end = 8 + size + max((about["data_offsets"][1] for about in tensors.values()), default=0)
        if end != path.stat().st_size:
            raise ValueError(f"{path.stat().st_size} bytes of {end}")
        return {name: checksums.get(name) for name in tensors}, f"{zlib.crc32(text):08x}"
    except (OSError, ValueError, struct.error, AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and {AGAIN}") from error


def _checksum(tensor: "Tensor") -> str:
    import torch

    return f"{zlib.crc32(tensor.view(torch.uint8).numpy().data):08x}"


def _compare(tensor: "Tensor", want: str | None, path: Path) -> None:
    if want is not None and (got := _checksum(tensor)) != want:
        raise ValueError(f"{path} is damaged (want a tensor with CRC-32 {want}; got {got}): remove it, and {AGAIN}")


class StatesWriter:
    """Writes such a folder; goes on where another one of the same teacher was interrupted.

    For one process at a time, which holds the lock `folder / LOCK`. teacher: facts that the states depend on. head:
    tensors by name. known: the states that are there. ValueError for a folder of another teacher.
    """

    def __init__(self, folder: Path, teacher: Mapping[str, Any], head: "Mapping[str, Tensor]") -> None:
        self.folder = folder
        self._teacher = dict(teacher)
        folder.mkdir(exist_ok=True)
        remove_unfinished(folder, r".*\.safetensors|states\.json")
        self._files: dict[str, str] = {}
        if (folder / FACTS).exists():
            there = TeacherStates(folder, complete=False)
            if different := [key for key, value in teacher.items() if there.facts.get(key) != value]:
                key = different[0]
                raise ValueError(
                    f"want an empty folder, or one with this teacher's states; {folder} has another's, whose {key} is "
                    f"{there.facts.get(key)!r}, not {teacher[key]!r}"
                )
            self._take_over(there)
        elif any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"want an empty folder, or one with states of this teacher; got {folder}")
        self._note(complete=False)
        if HEAD not in self._files:
            self._save(folder / HEAD, head)
        self.known = TeacherStates(folder, complete=False)
        self._number = max(
            (int(path.stem.rpartition("-")[2]) for path in folder.glob("states-*.safetensors")), default=0
        )
        self._added: list[str] = []
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def _take_over(self, there: TeacherStates) -> None:
        """Keep the whole files of an earlier writer, without those that it did not note; ValueError for damage."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if there.files is not None and path.name not in there.files:
                path.unlink()  # the writer was killed before the next line of `_save`
                continue
            _, crc = header(path)
            if there.files is not None and there.files[path.name] != crc:
                raise ValueError(f"{path} is damaged, its header has another CRC-32: remove it, and {AGAIN}")
            self._files[path.name] = crc

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
        self._waiting = {}
        self._bytes = 0

    def _save(self, path: Path, tensors: "Mapping[str, Tensor]") -> None:
        from safetensors.torch import save

        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(path) as file:
            file.write(save(whole, {name: _checksum(tensor) for name, tensor in whole.items()}))
        self._files[path.name] = header(path)[1]
        self._note(complete=False)

    def _note(self, *, complete: bool) -> None:
        facts = {"complete": complete, "teacher": self._teacher, "files": self._files, "seal": UNSEALED}
        write_text(self.folder / FACTS, json.dumps(facts, indent=1) + "\n", sealed=True)
