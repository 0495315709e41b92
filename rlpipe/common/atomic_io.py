"""Atomic writing of files and folders, and checks for free disk space.

A file or folder appears complete or not at all, so that a killed process or a full disk leaves no partial result.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

RESERVE = 16 * 2**20
"""Bytes that large files must leave free, so that the ledger and the metrics can still be written."""
LOCK = ".lock"


def user_cache() -> Path:
    """Return rlpipe's folder under ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlpipe"


def python_files(folder: Path) -> list[str]:
    """Return the relative paths of the Python files in a folder and its subfolders, also linked ones, sorted."""
    return sorted(glob("**/*.py", root_dir=folder, recursive=True))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write to, which replaces ``target`` when the block ends without an error."""
    temporary = begin_folder(target)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    complete_folder(temporary, target)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Lock the folder until the block or the process ends; yield False if another process holds the lock."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def begin_folder(target: Path) -> Path:
    """Create an empty temporary folder next to ``target``, in which its content is written."""
    temporary = writing_path(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def writing_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.writing")


def complete_folder(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; an existing folder there is moved away first and then removed."""
    aside = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that replaces ``path`` once it is complete."""
    temporary = writing_path(path)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder can't be created or written to, or None if it can."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written to"


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ``OSError`` if a file of ``num_bytes`` would not leave ``RESERVE`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + RESERVE:
        wanted = f"{num_bytes / 2**20:.1f} MiB, plus {RESERVE / 2**20:.0f} MiB for the ledger and the metrics"
        raise OSError(errno.ENOSPC, f"the disk has {free / 2**20:.1f} MiB left, but needs {wanted}", str(folder))
