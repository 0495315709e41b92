"""Folders that appear whole or not at all, so that a killed process leaves nothing that looks finished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
