"""The choice of the ledger that a run continues with: the one in place, or the copy in the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlpipe.common.atomic_io import why_not_writable, writing_path
from rlpipe.configs.options import changed_options
from rlpipe.errors import ConfigError, LedgerError
from rlpipe.replay.ledger.database import NAME, damage
from rlpipe.replay.ledger.run_ledger import Ledger

COMPANIONS = ("-wal", "-shm")
"""Suffixes of SQLite's files beside a database."""


@dataclass(kw_only=True, frozen=True)
class RunStart:
    """Point at which a run starts or resumes, as its ledger must match it."""

    config: Mapping[str, Any]
    """The resolved config, as returned by ``rlpipe.configs.options.to_tree``."""
    changes_allowed: bool = False
    step: int = 0
    checkpoint: Path | None = None
    run_id: str | None = None
    """Id of the run that wrote the checkpoint."""
    num_rows: int | None = None
    """Rows per epoch, including skipped ones."""


def open_ledger(path: Path, start: RunStart, *, keep_steps: int) -> tuple[Ledger, list[str]]:
    """Open the ledger that a run continues with, and return it with messages for people on where it comes from.

    A ledger that is damaged, or that does not fit the checkpoint, is renamed and replaced by the checkpoint's copy.
    Raises ``ConfigError`` if the ledger belongs to another run, or if there is nothing to continue with.
    """
    if (problem := why_not_writable(path.parent)) is not None:
        raise ConfigError(f"the ledger {path} can't be written: {problem}; choose another ledger.folder or output")
    path.parent.mkdir(parents=True, exist_ok=True)
    messages = []
    reason = why_unusable(path, start)
    if reason is not None:
        assert start.checkpoint is not None, "without a checkpoint, there is no other ledger"
        aside = _replace(path, start.checkpoint / NAME)
        moved = "" if aside is None else f"; it is now {aside}, and"
        messages.append(f"{path} {reason}{moved or ';'} the one in {start.checkpoint} takes its place")
    ledger = Ledger(path, keep_steps=keep_steps)
    if ledger.get("run_id") is None:
        ledger.set(run_id=uuid4().hex, config=start.config)
    changed = _check_owner(ledger, start)
    if reason := _why_released(ledger.get("config"), start.config):
        ledger.release(start.step, reason)
    if start.step > ledger.checkpoint_step:
        ledger.checkpointed(start.step)
    ledger.begin_again(start.step, start.config["algorithm"]["num_steps"])
    if changed:
        ledger.change_config(start.config)
    ledger.set(config=start.config, num_rows=start.num_rows)
    return ledger, messages


def why_unusable(path: Path, start: RunStart) -> str | None:
    """Return why the checkpoint's copy must replace the ledger at ``path``, or None if the ledger can be used.

    Changes nothing. Raises ``ConfigError`` if neither can be used, or if the ledger belongs to another run.
    """
    if path.exists():
        problem = damage(path)
        reason = f"is damaged ({problem})" if problem is not None else _why_unfit(path, start)
    else:
        reason = None if start.checkpoint is None else "is missing"
    if reason is None:
        return None
    if start.checkpoint is None:
        raise ConfigError(f"{path} {reason}, and there is no checkpoint to resume from: choose another output")
    copy = start.checkpoint / NAME
    problem = damage(copy) if copy.exists() else "it is missing"
    if problem is not None:
        raise ConfigError(f"{path} {reason}, and {copy} can't replace it: {problem}; resume from another checkpoint")
    return reason


def _why_unfit(path: Path, start: RunStart) -> str | None:
    with closing(Ledger(path, read_only=True, at_rest=True)) as found:
        if found.get("run_id") is None:  # its run died while creating it
            return None
        known = found.checkpoint_step
        if start.checkpoint is None and known:
            raise ConfigError(
                f"{path} records a checkpoint after {known} steps, but none is next to it: put it back, "
                "or choose another output"
            )
        _check_owner(found, start)
        if known > start.step:
            return f"continues to step {known}"
        return None if found.has_steps(start.step) else f"does not have all of the {start.step} steps"


def _why_released(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why groups that wait to be trained do not fit the remaining steps under the new config, or None."""
    if new["algorithm"]["groups_per_step"] != old["algorithm"]["groups_per_step"]:
        return "algorithm.groups_per_step was changed"
    if new["replay"]["max_staleness"] < old["replay"]["max_staleness"]:
        return "replay.max_staleness was lowered"
    if new["algorithm"]["num_steps"] < old["algorithm"]["num_steps"]:
        return "algorithm.num_steps was lowered"
    return None


def _check_owner(ledger: Ledger, start: RunStart) -> bool:
    """Return whether options that matter for training have changed.

    Raises ``ConfigError`` if they may not change, or if the ledger belongs to another run.
    """
    owner = ledger.get("run_id")
    if start.run_id is not None and owner != start.run_id:
        raise ConfigError(
            f"{ledger.path} belongs to another run ({owner}) than {start.checkpoint} ({start.run_id}): "
            "move one of them away, or choose another output"
        )
    changed = changed_options(ledger.get("config"), start.config)
    if changed and not start.changes_allowed:
        raise ConfigError(
            f"{ledger.path} belongs to a run with other options ({'; '.join(changed)}): restore "
            "them, set resume_changes=allow, or choose another output"
        )
    return bool(changed)


def _replace(path: Path, copy: Path) -> Path | None:
    """Replace the ledger with the copy, and return the old ledger's new name. A full disk changes nothing."""
    temporary = writing_path(path)
    try:
        shutil.copyfile(copy, temporary)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LedgerError(f"the ledger {path} can't be written: {error}") from error
    aside = _set_aside(path)
    temporary.replace(path)
    return aside


def _set_aside(path: Path) -> Path | None:
    """Rename the ledger with its companions, which SQLite would otherwise use for the next ledger."""
    there = [suffix for suffix in ("", *COMPANIONS) if path.with_name(path.name + suffix).exists()]
    number = 1
    while any((aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).parent.glob(f"{aside.name}*")):
        number += 1
    for suffix in there:
        path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside if there else None
