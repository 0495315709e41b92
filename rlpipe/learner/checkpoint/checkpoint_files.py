"""A run's checkpoints as files: which are whole, which is the newest, which one ``resume`` means."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlpipe.common.atomic_io import complete_folder
from rlpipe.errors import ConfigError

NAME = re.compile(r"step_(\d+)")
RECORD = "learner.json"
"""Written last, with the size of every other file; a folder without it, or with other sizes, is no checkpoint."""


class Checkpoint(NamedTuple):
    """What a checkpoint says of itself."""

    step: int
    """Steps done when it was written."""
    extra: dict[str, Any]
    """What the caller gave to ``save``."""


def damaged(folder: Path) -> dict[Path, str]:
    """The checkpoints that are not whole, with what is wrong."""
    problems = {path: damage(path) for path in _numbered(folder)}
    return {path: problem for path, problem in problems.items() if problem is not None}


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Renames the checkpoints after more than ``step`` steps, which a run leaves that goes on from an older one."""
    moved = []
    for path in list_checkpoints(folder):
        if read_extra(path).step > step:
            moved.append(path.rename(_free_name(path, "left")))
    return moved


def set_damaged_aside(folder: Path) -> dict[Path, str]:
    """Renames the checkpoints that are not whole; answers their new names, with what is wrong."""
    return {path.rename(_free_name(path, "damaged")): problem for path, problem in damaged(folder).items()}


def damage(path: Path) -> str | None:
    """What is missing in a checkpoint, or None."""
    try:
        files: dict[str, int] = json.loads((path / RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"it has no whole {RECORD}"
    for name, size in files.items():
        file = path / name
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            return f"{name} has {there} of {size} bytes" if there is not None else f"{name} is missing"
    return None


def read_extra(path: Path) -> Checkpoint:
    """What a checkpoint says of itself, without loading it; raises ``ConfigError`` if ``path`` is none."""
    record = read_record(path)
    return Checkpoint(record["step"], record["extra"])


def resolve_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint that the option ``resume`` means: ``auto``, the newest in ``folder``; ``never``; or a path."""
    if resume == "never":
        return None
    if resume == "auto":
        return latest(folder)
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ConfigError(f"resume={resume} does not exist: give a checkpoint's folder, auto or never")
    read_record(path)
    return path


def latest(folder: Path) -> Path | None:
    found = list_checkpoints(folder)
    return found[-1] if found else None


def newest_of_run(folder: Path, first: Path | None) -> Path | None:
    """The newest in a run's folder, or, before that is newer, the one that the run began with.

    The first one may lie in the folder too, and goes once enough newer ones are there.
    """
    newest = latest(folder)
    if newest is None or first is None or not first.exists():
        return newest or first
    return newest if read_extra(newest).step >= read_extra(first).step else first


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in the folder, by step."""
    return [path for path in _numbered(folder) if damage(path) is None]


def _numbered(folder: Path) -> list[Path]:
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def _free_name(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}.{suffix}{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def prune(folder: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints, and what a crash left half written."""
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    remove_rest(folder)


def remove_rest(folder: Path) -> None:
    """Removes what a crash left half written."""
    for rest in folder.glob(".step_*"):
        shutil.rmtree(rest, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """What ``complete_checkpoint`` wrote; raises ``ConfigError`` if ``path`` is no whole checkpoint."""
    problem = damage(path)
    if problem is not None:
        raise ConfigError(f"{path} is no whole checkpoint ({problem}): give another step_... folder")
    record: dict[str, Any] = json.loads((path / RECORD).read_text())
    return record


def complete_checkpoint(temporary: Path, target: Path, record: Mapping[str, Any]) -> None:
    """Writes the record of a checkpoint whose other files are there, and gives it its name."""
    files = {str(path.relative_to(temporary)): path.stat().st_size for path in temporary.rglob("*") if path.is_file()}
    with (temporary / RECORD).open("w") as file:
        file.write(json.dumps({**record, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    complete_folder(temporary, target)
