"""Folders through which weights go to a server, in a folder that other users may write to, such as /dev/shm."""

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

FILE = re.compile(r"model-\d{5}\.safetensors")  # the names that are written, and removed


class WeightsFolders:
    """Folders of random names that begin with `prefix` in `place`: this user's, mode 0700. Links are not followed.

    OSError where another user could rename `place`, a folder above it or one in it, and so give the server other
    weights.
    """

    def __init__(self, place: Path, prefix: str) -> None:
        self._given = place
        self._prefix = prefix

    def new(self) -> Path:
        """A new, empty folder. OSError where it cannot be made, or be kept from others."""
        folder = self._place(make=True) / f"{self._prefix}{secrets.token_hex(16)}"
        folder.mkdir(mode=0o700)
        if not _own(folder):
            raise OSError(f"want {folder} this user's alone, mode 0700: its file system does not keep others out")
        return folder

    def clear(self) -> None:
        """Remove this user's folders of the prefix, with the weights in them."""
        with suppress(FileNotFoundError):
            for folder in self._place().iterdir():
                if folder.name.startswith(self._prefix) and _own(folder):
                    _remove(folder)

    def _place(self, make: bool = False) -> Path:
        """The folder behind all links, which others may change later."""
        if make:
            missing = [folder for folder in (self._given, *self._given.parents) if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir(0o755, exist_ok=True)  # no umask lets a group write
        place = self._given.resolve(strict=True)
        for folder in (place, *place.parents):
            _check_keeper(folder)
        return place


def _check_keeper(folder: Path) -> None:
    """OSError where another user can rename what is in this folder."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise OSError(
            f"want rollout.weights_folder, and all above it, this user's or root's; {folder} is that of user "
            f"{found.st_uid}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise OSError(
            "want rollout.weights_folder, and all above it, such that others cannot rename folders; more users may "
            f"write to {folder}: chmod +t keeps them from it, as in /tmp"
        )


def _own(folder: Path) -> bool:
    """Whether it is a folder, no link, of this user, which no other one can look into."""
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return private and found.st_uid == os.geteuid()


def _remove(folder: Path) -> None:
    """Remove the weights' files and, if nothing else is in it, the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in os.listdir(descriptor):
            if FILE.fullmatch(name):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    with suppress(OSError):  # NFS keeps a file that the server still maps, under another name
        folder.rmdir()
