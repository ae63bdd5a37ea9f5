"""Files that are whole whenever a process or the machine dies, that tell when they are damaged, and locks.

A file is written beside its place as <name>.<process>.new, flushed to the disk and renamed; so is its folder's list of
names. A sealed file contains the text `UNSEALED` in a place of its format that holds any text; its zeros become the
CRC-32 of the file as it was with them.
"""

import errno
import fcntl
import logging
import os
import platform
import re
import shlex
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_SEAL = b"crc32 of this file: "
_DIGITS = 8
UNSEALED = _SEAL.decode() + "0" * _DIGITS
_UNFINISHED = re.compile(r"(.+)\.\d+\.new")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST_COMMAND = 200  # characters of the holder's in a message

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path, *, sealed: bool = False) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` at the end of the block; after an exception the old one stays.

    Links are followed. A device or a pipe is written to directly. OSError names the file, which Python's own error for
    a full disk does not. ValueError for a sealed file without `UNSEALED`.
    """
    place = Path(os.path.realpath(path))
    direct = place.exists() and not place.is_file()
    new = place if direct else place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        with new.open("wb" if direct else "w+b") as file:
            yield file
            file.flush()
            if not direct:
                if sealed:
                    _seal(file, path)
                os.fsync(file.fileno())
        if not direct:
            new.replace(place)
            flush(place.parent)
    except BaseException as error:
        if not direct:
            with suppress(OSError):  # the first error is the one to show
                new.unlink()
        if isinstance(error, OSError):
            raise OSError(f"could not write {path}: {error.strerror or error}") from error
        raise


def write_text(path: Path, text: str, *, sealed: bool = False) -> None:
    """Write UTF-8 as in `replacing`."""
    with replacing(path, sealed=sealed) as file:
        file.write(text.encode())


def flush(path: Path) -> None:
    """Flush a file's contents, or a folder's list of names, to the disk. OSError names it, which Python's does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # network file systems without lists to flush
            raise OSError(f"could not flush {path} to the disk: {error.strerror}") from error
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flush all that is in a folder, the lists of names in it, and its own name."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_file() or path.is_dir():  # no pipe, and no link to nothing
            flush(path)


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, unless they exist. New names are on the disk when this returns."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(new):
        flush(each.parent)


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove what killed processes left of the files whose names fully match this regular expression.

    For the process that holds the lock: another one's file, still being written, is removed too.
    """
    for path in folder.glob("*.new"):
        if (match := _UNFINISHED.fullmatch(path.name)) and re.fullmatch(names, match[1]):
            path.unlink(missing_ok=True)


def _seal(file: IO[bytes], path: Path) -> None:
    file.seek(0)
    content = file.read()
    place = content.rfind(_SEAL)
    if place < 0 or content.rfind(UNSEALED.encode()) != place:
        raise ValueError(f"want {UNSEALED!r} in {path}, and nothing like it behind that")
    file.seek(place + len(_SEAL))
    file.write(_crc(content))
    file.flush()


def _crc(content: bytes) -> bytes:
    return f"{zlib.crc32(content):0{_DIGITS}x}".encode()


def is_sealed(content: bytes, path: Path) -> bool:
    """Whether there is a seal in the content of a file; ValueError, with the file's name, if it is broken."""
    if (place := content.rfind(_SEAL)) < 0:
        return False
    digits = slice(place + len(_SEAL), place + len(UNSEALED))
    if content[digits] != _crc(content[: digits.start] + b"0" * _DIGITS + content[digits.stop :]):
        raise ValueError(f"{path} is damaged: its CRC-32 is wrong")
    return True


@contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold a lock until the end of the block; ValueError with `refusal` and the holder while another one holds it.

    The operating system releases the lock of a process that was killed. On a file system without locks: a warning.
    """
    with file.open("a+b", buffering=0) as stream:  # a buffer would fail a second time, at the end
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read().decode(errors="replace").strip() or "an unknown process"
            raise ValueError(f"{refusal}. It is held by {holder}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("no locks in %s (%s): nothing keeps others out of it", file.parent, error)
        try:
            stream.truncate(0)
            stream.write(f"{_this_process()}\n".encode())
        except OSError as error:
            raise OSError(f"could not write {file}: {error.strerror}") from error
        yield


def claimed(folder: Path, mark: str, what: str) -> Path:
    """The folder, created if needed. Files of an earlier one with this mark may be replaced, others may not."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"want a folder as output; got the file {folder}")
    make_folder(folder)
    if not (folder / mark).exists() and any(folder.iterdir()):
        raise ValueError(f"want an empty folder, or an earlier {what}'s, as output; got {folder}, which is neither")
    (folder / mark).touch()
    flush(folder)  # a folder with files is refused without its mark
    return folder


def _this_process() -> str:
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    shown = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}…"
    since = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return f"process {os.getpid()} on {platform.node()} since {since}: {' '.join(shown.split())}"
