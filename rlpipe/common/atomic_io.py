"""Folders and files that appear whole or not at all, so that a killed process or a full disk leaves nothing that looks
finished; and whether there is room for them."""

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
"""Bytes that large files leave free, so that the ledger and the metrics beside them can still be written."""
LOCK = ".lock"


def user_cache() -> Path:
    """Under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlpipe"


def python_files(folder: Path) -> list[str]:
    """Python's files in a folder and those below, linked ones too, by their paths in it; in order."""
    return sorted(glob("**/*.py", root_dir=folder, recursive=True))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes ``target``'s place once the block ends without an error."""
    temporary = begin_folder(target)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    complete_folder(temporary, target)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether no other process holds the folder; holds it until the block, or the process, ends."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def begin_folder(target: Path) -> Path:
    """Makes the empty folder beside ``target`` in which it is written."""
    temporary = writing_path(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def writing_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.writing")


def complete_folder(temporary: Path, target: Path) -> None:
    """Renames; what has the name already steps aside first, as a folder can't be renamed onto another."""
    aside = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that takes ``path``'s place once it is whole."""
    temporary = writing_path(path)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def why_not_writable(folder: Path) -> str | None:
    """What keeps files from being written to a folder, or the folder from being made; None where nothing does."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written to"


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises ``OSError`` if a large file would not leave ``RESERVE`` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + RESERVE:
        wanted = f"{num_bytes / 2**20:.1f} MiB, and {RESERVE / 2**20:.0f} MiB for the ledger and the metrics"
        raise OSError(errno.ENOSPC, f"the disk has {free / 2**20:.1f} MiB left, needed are {wanted}", str(folder))
