"""Finds the ledger that belongs to where a run goes on: the one in place, or the copy in the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlpipe.configs.tree import changed_options
from rlpipe.errors import ConfigError
from rlpipe.replay.ledger import NAME, Ledger, damage

COMPANIONS = ("-wal", "-shm")
"""SQLite's files beside a database."""


@dataclass(kw_only=True, frozen=True)
class RunStart:
    """What the accounts of a run begin or go on with."""

    config: Mapping[str, Any]
    """The resolved config, as ``rlpipe.configs.tree.to_tree`` gives it."""
    changes_allowed: bool = False
    step: int = 0
    checkpoint: Path | None = None
    run_id: str | None = None
    """Which run wrote the checkpoint."""
    num_rows: int | None = None
    """Rows of an epoch, skipped ones included."""


def open_ledger(path: Path, start: RunStart, *, keep_steps: int) -> tuple[Ledger, list[str]]:
    """The ledger to go on with, and what people should know of where it comes from.

    A ledger that is damaged, or that is ahead of the checkpoint, is set aside, and the checkpoint's copy takes its
    place. Raises ``ConfigError`` if the ledger belongs to another run, or if there is nothing to go on with.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    messages = []
    if path.exists():
        messages += _set_aside_unusable(path, start)
    elif start.checkpoint is not None:
        _copy_from(start.checkpoint, path)
        messages.append(f"there is no ledger {path}: the one in {start.checkpoint} takes its place")
    ledger = Ledger(path, keep_steps=keep_steps)
    if ledger.get("run_id") is None:
        ledger.set(run_id=uuid4().hex, config=start.config)
    changed = _check_owner(ledger, start)
    if start.step > ledger.checkpoint_step:
        ledger.checkpointed(start.step)
    ledger.begin_again(start.step, start.config["algorithm"]["num_steps"])
    if changed:
        ledger.change_config(start.config)
    ledger.set(config=start.config, num_rows=start.num_rows)
    return ledger, messages


def _set_aside_unusable(path: Path, start: RunStart) -> list[str]:
    problem = damage(path)
    if problem is None:
        found = Ledger(path)
        owner, known = found.get("run_id"), found.checkpoint_step
        found.close()
        if start.checkpoint is None and known:
            raise ConfigError(
                f"{path} knows a checkpoint after {known} steps, but there is none beside it: put it back, "
                "or choose another output"
            )
        if known <= start.step or owner != start.run_id:
            return []
        reason = f"goes on to step {known}"
    else:
        reason = f"is damaged ({problem})"
    if start.checkpoint is None:
        raise ConfigError(f"{path} {reason}, and there is no checkpoint to go on from: choose another output")
    aside = _set_aside(path)
    _copy_from(start.checkpoint, path)
    return [f"{path} {reason}: it now is {aside}, and the one in {start.checkpoint} takes its place"]


def _check_owner(ledger: Ledger, start: RunStart) -> bool:
    """Whether options that matter for training have changed, which is allowed then."""
    owner = ledger.get("run_id")
    if start.run_id is not None and owner != start.run_id:
        raise ConfigError(
            f"{ledger.path} belongs to another run ({owner}) than {start.checkpoint} ({start.run_id}): "
            "move one of them away, or choose another output"
        )
    changed = changed_options(ledger.get("config"), start.config)
    if changed and not start.changes_allowed:
        raise ConfigError(
            f"{ledger.path} belongs to a run with other options ({'; '.join(changed)}): set them back, "
            "or resume_changes=allow, or choose another output"
        )
    return bool(changed)


def _copy_from(checkpoint: Path, path: Path) -> None:
    copy = checkpoint / NAME
    problem = damage(copy) if copy.exists() else "it is missing"
    if problem is not None:
        raise ConfigError(f"{copy} can't take the place of {path}: {problem}; resume from another checkpoint")
    temporary = path.with_name(f".{path.name}.writing")
    shutil.copyfile(copy, temporary)
    temporary.replace(path)


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    for suffix in ("", *COMPANIONS):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
    return aside
