"""A run's checkpoints on disk: listing, verification, selection by ``resume``, and pruning."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rlpipe.common.atomic_io import DIGESTS, complete_folder, file_digest, seal, unseal
from rlpipe.errors import ConfigError

NAME = re.compile(r"step_(\d+)")
RECORD = "learner.json"
"""Record file, written last; it lists every other file's size and digest, and a folder must match it."""
FORM: dict[str, type] = {"step": int, "num_bad_steps": int, "bad_steps_in_row": int, "extra": dict, "files": dict}
"""Types of the values that every record has."""


class Checkpoint(NamedTuple):
    """Metadata of a checkpoint."""

    step: int
    """Number of steps done when the checkpoint was written."""
    extra: dict[str, Any]
    """The ``extra`` values given to ``CheckpointStore.save``, with those that its ``add`` returned."""


def damaged(folder: Path, *, newer_than: int = -1) -> dict[Path, str]:
    """Return the damaged checkpoints in the folder, each with a description of the damage.

    The contents of files, which take long to read, are compared for steps ``newer_than`` the given one.
    """
    problems = {path: damage(path, contents=step > newer_than) for step, path in _numbered(folder).items()}
    return {path: problem for path, problem in problems.items() if problem is not None}


def set_newer_aside(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints newer than ``step``, for a run that resumes from an older one; return their new paths."""
    moved = []
    for path in list_checkpoints(folder):
        if read_extra(path).step > step:
            moved.append(path.rename(_free_name(path, "left")))
    return moved


def set_damaged_aside(folder: Path, *, newer_than: int = -1) -> dict[Path, str]:
    """Rename the checkpoints that ``damaged`` finds; return their new paths, each with a description of the damage."""
    problems = damaged(folder, newer_than=newer_than)
    return {path.rename(_free_name(path, "damaged")): problem for path, problem in problems.items()}


def damage(path: Path, *, contents: bool = False) -> str | None:
    """Return what is missing or wrong in a checkpoint, or None; with ``contents``, also compare the files' digests."""
    try:
        record = _read(path)
    except (OSError, ValueError):
        return f"it has no complete {RECORD}"
    for name, size in record["files"].items():
        file = path / name
        actual_size = file.stat().st_size if file.is_file() else None
        if actual_size != size:
            return f"{name} has {actual_size} of {size} bytes" if actual_size is not None else f"{name} is missing"
    return changed_file(path, record) if contents else None


def changed_file(path: Path, record: Mapping[str, Any], *, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Return a description of a file that is not as it was written, or None; each rank reads a share of the files.

    Checkpoints of earlier versions of rlpipe have no digests.
    """
    written = dict(sorted(record.get(DIGESTS, {}).items())[rank::num_ranks])
    try:
        with ThreadPoolExecutor() as pool:
            digests = pool.map(file_digest, (path / name for name in written))
            changed = [name for name, digest in zip(written, digests, strict=True) if digest != written[name]]
    except OSError as error:
        return f"a file can't be read: {error}"
    return f"{changed[0]} has changed since it was written" if changed else None


def read_extra(path: Path, *, contents: bool = False) -> Checkpoint:
    """Read a checkpoint's metadata without its tensors; raise ``ConfigError`` if it is not complete."""
    record = read_record(path, contents=contents)
    return Checkpoint(record["step"], record["extra"])


def resolve_checkpoint(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that the option ``resume`` selects, or None.

    ``auto`` selects the newest in ``folder`` that is not damaged, ``never`` none, and any other value is the path of a
    checkpoint. Raises ``ConfigError`` if that is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest_first = reversed(list_checkpoints(folder))
        return next((path for path in newest_first if damage(path, contents=True) is None), None)
    path = Path(resume).expanduser().absolute()  # other processes may run in other folders
    if not path.is_dir():
        raise ConfigError(f"resume={resume} does not exist: give a checkpoint's folder, auto or never")
    read_record(path, contents=True)
    return path


def latest(folder: Path) -> Path | None:
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


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
    return [path for path in _numbered(folder).values() if damage(path) is None]


def _numbered(folder: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by their steps, in order."""
    by_step = {int(match[1]): path for path in folder.glob("step_*") if (match := NAME.fullmatch(path.name))}
    return dict(sorted(by_step.items()))


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
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def read_record(path: Path, *, contents: bool = False) -> dict[str, Any]:
    """Read the record of ``complete_checkpoint``; raise ``ConfigError`` if the checkpoint is damaged."""
    problem = damage(path, contents=contents)
    if problem is not None:
        raise ConfigError(not_complete(path, problem))
    return _read(path)


def not_complete(path: Path, problem: str) -> str:
    return f"{path} is not a complete checkpoint ({problem}): give another step_... folder"


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint's record; raise ``OSError`` or ``ValueError`` if it is missing, damaged or of another form."""
    record = unseal((path / RECORD).read_text())
    for name, expected_type in FORM.items():
        if not isinstance(record.get(name), expected_type):
            raise ValueError(f"{name} is missing")
    digests = record.get(DIGESTS, {})
    if not isinstance(digests, dict) or not digests.keys() <= record["files"].keys():
        raise ValueError(f"{DIGESTS} names other files")
    return record


def complete_checkpoint(temporary: Path, target: Path, record: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Write the record of a checkpoint after all its other files, and rename the folder to ``target``.

    ``digests`` are those of files that need not be read again.
    """
    files = {str(path.relative_to(temporary)): path for path in temporary.rglob("*") if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    all_digests = {name: digests[name] if name in digests else file_digest(path) for name, path in files.items()}
    with (temporary / RECORD).open("w") as file:
        file.write(seal({**record, "files": sizes, DIGESTS: all_digests}))
        file.flush()
        os.fsync(file.fileno())
    complete_folder(temporary, target)
