"""The folders of the runs that are viewed, their names, and the files of their indices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from rlpipe.common import run_files
from rlpipe.common.atomic_io import user_cache
from rlpipe.errors import DataError
from rlpipe.viewer.group_index import SCHEMA

MARKS = (run_files.CONFIG, run_files.METRICS, run_files.LEDGER)
"""Files by which a folder is known as a run's, or as a checkpoint's."""
DEPTH = 3
"""Levels below a folder at which runs are looked for."""
UNUSED_DAYS = 14
"""Days after which the index of a run that nobody looked at is removed."""


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs at these paths or below them; raise ``DataError`` if there is none."""
    folders: dict[Path, Path] = {}
    for path in paths:
        try:
            if not path.exists():
                raise DataError(f"{path} does not exist: give the output folder of a run, or a folder of them")
            runs = [path] if path.is_file() or _is_run(path) else sorted(_runs_below(path, DEPTH), key=_order)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        if not runs:
            raise DataError(f"{path} holds no run: no folder in it has a {', '.join(MARKS[:2])} or {MARKS[2]}")
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())


def _order(run: Path) -> tuple[bool, Path]:
    return run.is_symlink(), run  # so that a run is listed instead of a link to it


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    for child in folder.iterdir():
        with suppress(PermissionError):
            if child.is_dir() and not child.name.startswith("."):
                if _is_run(child):
                    yield child
                elif depth > 1 and not child.is_symlink():  # links to folders of runs may lead round
                    yield from _runs_below(child, depth - 1)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of the paths that are just long enough to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len({*names}) == len(names):
            break
    return names


def index_path(ledger: Path) -> Path:
    """Return the path of a ledger's index in the user's cache, from which indices that are not used any more go."""
    folder = user_cache() / "view"
    for file in folder.glob("*.sqlite"):
        with suppress(OSError):
            if file.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                for name in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))):
                    name.unlink(missing_ok=True)
    return folder / f"{sha256(os.fsencode(ledger.absolute()) + SCHEMA.encode()).hexdigest()[:32]}.sqlite"
