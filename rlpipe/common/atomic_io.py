"""Files and folders that several processes write: whole or not at all, one at a time, with digests that reveal damage.

A file or folder appears complete or not at all, so that a killed process or a full disk leaves no partial result. The
digests do not prove who wrote a file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape, glob
from hashlib import file_digest as hash_file
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

logger = logging.getLogger(__name__)

RESERVE = 16 * 2**20
"""Bytes that large files must leave free, so that the ledger and the metrics can still be written."""
LOCK = ".lock"
WAIT_S = 0.5
"""Seconds between two looks at what another process creates."""
BUSY_PAUSE_S = 0.05
LEFT_AFTER_S = 3600.0
"""Age in seconds after which a text file that is being written counts as a killed process's leftover."""
SEAL, DIGESTS = "digest", "digests"
"""Keys of a record: its own digest, and the digests of files by name; a record that has these also has its own."""


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
        has_lock = _try_lock(file)
        if not has_lock:
            time.sleep(BUSY_PAUSE_S)  # ``is_held`` of another process may have it for a moment
            has_lock = _try_lock(file)
        yield has_lock


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(folder: Path) -> bool:
    """Return whether another process is known to hold the folder's lock; some file systems have no locks."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def create_once(target: Path, create: Callable[[], object]) -> None:
    """Call ``create`` if there is no ``target`` yet; wait while another process creates it, maybe in place."""
    lock = target.with_name(f".{target.name}.creating")
    if target.exists() and not is_held(lock):
        return
    lock.mkdir(parents=True, exist_ok=True)
    has_waited = False
    while True:
        with held(lock) as has_lock:
            if has_lock:
                if not target.exists():
                    create()
                return
        if not has_waited:
            logger.warning("another process is creating %s; waiting for it", target)
        has_waited = True
        time.sleep(WAIT_S)


def write_ahead(database: sqlite3.Connection, timeout_s: float) -> None:
    """Have readers not wait for a writer, unless other processes keep the database busy: it works without, too.

    SQLite does not apply the connection's timeout to this change, but fails at once.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            if time.monotonic() < deadline:
                time.sleep(BUSY_PAUSE_S)
                continue
        return


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
    """Write a text file that replaces ``path`` once it is complete; several processes may do so at one time."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.writing")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    for leftover in path.parent.glob(f".{escape(path.name)}.*.writing"):  # of killed processes
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - LEFT_AFTER_S:
                leftover.unlink()


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it, that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder can't be created or written to, or None if it can."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} can't be written to"


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ``OSError`` if a file of ``num_bytes`` would not leave ``RESERVE`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + RESERVE:
        needed = f"{num_bytes / 2**20:.1f} MiB, plus {RESERVE / 2**20:.0f} MiB for the ledger and the metrics"
        raise OSError(errno.ENOSPC, f"the disk has {free / 2**20:.1f} MiB left, but needs {needed}", str(folder))


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, by SHA-256, the fastest hash of the standard library on today's CPUs."""
    with path.open("rb") as file:
        return hash_file(file, "sha256").hexdigest()


def seal(record: Mapping[str, Any]) -> str:
    """Return a record of JSON values as text, with a digest of the values."""
    return json.dumps({**record, SEAL: _record_digest(record)}, indent=2) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """Read a record that ``seal`` wrote, or one without digests; raise ``ValueError`` if it is damaged."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        digest = record.pop(SEAL, None)
        if (digest is not None or DIGESTS in record) and digest != _record_digest(record):
            raise ValueError("it has changed since it was written")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return record


def _record_digest(record: Mapping[str, Any]) -> str:
    return sha256(json.dumps(record).encode()).hexdigest()
