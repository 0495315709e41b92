"""Temporary folders that go even if their process is killed: the next one that makes a folder removes what is left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

REMOVAL_TIMEOUT_S = 30.0


class ScratchFolder:
    """A temporary folder of this process, with a lock that ends with the process.

    It is in ``parent``, or where the system has temporary files. Folders of the same prefix in the same parent whose
    processes have ended are removed first, once in a process.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        folder = tempfile.gettempdir() if parent is None else str(parent)
        remove_abandoned(folder, prefix)
        self.path, lock = _locked_folder(folder, prefix)
        self.close = weakref.finalize(self, _end_folder, self.path, lock)
        """Remove the folder with its content, which otherwise happens at the process's end."""


def _locked_folder(parent: str, prefix: str) -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with suppress(FileNotFoundError):  # another process removed it as abandoned before it was locked
            lock = os.open(path, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, on which no folder counts as abandoned
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(path):
                return path, lock
            os.close(lock)


def _end_folder(path: str, lock: int) -> None:
    remove_folder(path)
    os.close(lock)


@cache
def remove_abandoned(parent: str, prefix: str) -> None:
    """Remove the folders of a prefix in ``parent`` whose processes have ended; those of other users stay."""
    for path in Path(parent).glob(f"{prefix}*"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(str(path))
            finally:
                os.close(lock)


def remove_folder(folder: str) -> None:
    """Remove a folder, if it is there, whatever programs have made of its content."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:  # it is not empty
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, timeout=REMOVAL_TIMEOUT_S, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
