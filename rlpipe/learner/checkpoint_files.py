"""A run's checkpoints on disk: listing, verification, selection by ``resume``, and pruning."""

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
"""Record file, written last; it lists every other file's size, and a folder that does not match it is incomplete."""


class Checkpoint(NamedTuple):
    """Metadata of a checkpoint."""

    step: int
    """Number of steps done when the checkpoint was written."""
    extra: dict[str, Any]
    """The ``extra`` values given to ``CheckpointStore.save``, with those that its ``add`` returned."""


def damaged(folder: Path) -> dict[Path, str]:
    """Return the incomplete checkpoints in the folder, each with a description of the damage."""
    problems = {path: damage(path) for path in _numbered(folder)}
    return {path: problem for path, problem in problems.items() if problem is not None}


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints newer than ``step``, for a run that resumes from an older one; return their new paths."""
    moved = []
    for path in list_checkpoints(folder):
        if read_extra(path).step > step:
            moved.append(path.rename(_free_name(path, "left")))
    return moved


def set_damaged_aside(folder: Path) -> dict[Path, str]:
    """Rename the incomplete checkpoints; return their new paths, each with a description of the damage."""
    return {path.rename(_free_name(path, "damaged")): problem for path, problem in damaged(folder).items()}


def damage(path: Path) -> str | None:
    """Return what is missing or wrong in a checkpoint, or None if it is complete."""
    try:
        files: dict[str, int] = json.loads((path / RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"it has no complete {RECORD}"
    for name, size in files.items():
        file = path / name
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            return f"{name} has {there} of {size} bytes" if there is not None else f"{name} is missing"
    return None


def read_extra(path: Path) -> Checkpoint:
    """Read a checkpoint's metadata without its tensors; raise ``ConfigError`` if it is not complete."""
    record = read_record(path)
    return Checkpoint(record["step"], record["extra"])


def resolve_checkpoint(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that the option ``resume`` selects, or None.

    ``auto`` selects the newest in ``folder``, ``never`` none, and any other value is the path of a checkpoint. Raises
    ``ConfigError`` if that is not a complete checkpoint.
    """
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
    """Return the newest checkpoint of a run: the newest in its folder, or ``first``, which it started from, if later.

    ``first`` may lie in the same folder, where it is pruned once there are enough newer checkpoints.
    """
    newest = latest(folder)
    if newest is None or first is None or not first.exists():
        return newest or first
    return newest if read_extra(newest).step >= read_extra(first).step else first


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in the folder, ordered by step."""
    return [path for path in _numbered(folder) if damage(path) is None]


def _numbered(folder: Path) -> list[Path]:
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def _free_name(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}.{suffix}{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, and the partial ones that a crash left."""
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    remove_rest(folder)


def remove_rest(folder: Path) -> None:
    """Remove the partial checkpoints that a crash left."""
    for rest in folder.glob(".step_*"):
        shutil.rmtree(rest, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of ``complete_checkpoint``; raise ``ConfigError`` if ``path`` is not a complete checkpoint."""
    problem = damage(path)
    if problem is not None:
        raise ConfigError(f"{path} is not a complete checkpoint ({problem}): give another step_... folder")
    record: dict[str, Any] = json.loads((path / RECORD).read_text())
    return record


def complete_checkpoint(temporary: Path, target: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a checkpoint after all its other files, and rename the folder to ``target``."""
    files = {str(path.relative_to(temporary)): path.stat().st_size for path in temporary.rglob("*") if path.is_file()}
    with (temporary / RECORD).open("w") as file:
        file.write(json.dumps({**record, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    complete_folder(temporary, target)
