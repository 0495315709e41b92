"""The choice of the ledger that a run continues with: the one in place, or the copy in the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlpipe.common import run_files
from rlpipe.common.atomic_io import why_not_writable, write_whole, writing_path
from rlpipe.configs.options import changed_options
from rlpipe.data.sources.row_source import check_num_rows
from rlpipe.errors import ConfigError, LedgerDamaged, LedgerError
from rlpipe.replay.ledger.database import NO_LEDGER
from rlpipe.replay.ledger.query import damage
from rlpipe.replay.ledger.run_ledger import RELEASED, Ledger

COMPANIONS = ("-wal", "-shm")
"""Suffixes of SQLite's files beside a database."""


@dataclass(kw_only=True, frozen=True)
class RunStart:
    """Point at which a run starts or resumes, as its ledger must match it."""

    config: Mapping[str, Any]
    """The resolved config, as returned by ``rlpipe.configs.options.to_tree``."""
    changes_allowed: bool = False
    output: Path | None = None
    """Output folder of the run, which owns the ledger; None: the ledger's own folder."""
    step: int = 0
    checkpoint: Path | None = None
    run_id: str | None = None
    """Id of the run that wrote the checkpoint."""
    num_rows: int | None = None
    """Rows per epoch, including skipped ones."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn an error of the ledger's disk or permissions into ``ConfigError``, because the run has not begun yet."""
    try:
        yield
    except LedgerError as error:
        raise ConfigError(str(error)) from error


@_refusing()
def open_ledger(path: Path, start: RunStart, *, keep_steps: int) -> tuple[Ledger, list[str]]:
    """Open the ledger that a run continues with, and return it with messages for people on where it comes from.

    A ledger that is damaged, or that does not fit the checkpoint, is renamed and replaced by the checkpoint's copy.
    Raises ``ConfigError`` if the ledger belongs to another output or run, or if there is nothing to continue with.
    """
    if (problem := why_not_writable(path.parent)) is not None:
        raise ConfigError(f"the ledger {path} can't be written: {problem}; choose another ledger.folder or output")
    path.parent.mkdir(parents=True, exist_ok=True)
    messages = []
    reason = why_unusable(path, start)
    if reason is not None:
        assert start.checkpoint is not None, "without a checkpoint, there is no other ledger"
        with closing(Ledger(start.checkpoint / run_files.LEDGER, read_only=True, at_rest=True)) as copy:
            _check_num_rows(copy, start, path)
        aside = _replace(path, start.checkpoint / run_files.LEDGER)
        moved = "" if aside is None else f"; it is now {aside}, and"
        messages.append(f"{path} {reason}{moved or ';'} the one in {start.checkpoint} replaces it")
    ledger = Ledger(path, keep_steps=keep_steps)
    owner = None if start.output is None else {"output": str(start.output), "id": output_id(start.output)}
    if reason is not None:
        ledger.set(owner=owner)
    ledger.set_missing(run_id=uuid4().hex, config=start.config, owner=owner)
    _check_owner(ledger, start)  # two runs may have created it at the same time
    changed = _check_run(ledger, start)
    _check_num_rows(ledger, start, path)
    ledger.take_over()
    with ledger.decoding("config"):
        released = _why_released(ledger.get("config"), start.config)
    if released:
        ledger.release(start.step, released)
    if start.step > ledger.checkpoint_step:
        ledger.checkpointed(start.step)
    ledger.begin_again(start.step, start.config["algorithm"]["num_steps"])
    if changed:
        ledger.change_config(start.config)
    ledger.set(config=start.config, num_rows=start.num_rows, owner=owner)
    return ledger, messages


def _check_num_rows(ledger: Ledger, start: RunStart, path: Path) -> None:
    """Raise ``ConfigError`` if the run of the ledger, or copy of the one at ``path``, had another number of rows."""
    if not start.changes_allowed:
        check_num_rows(ledger.get("num_rows"), start.num_rows, f"the run in {path.parent}")


@_refusing()
def why_unusable(path: Path, start: RunStart) -> str | None:
    """Return why the checkpoint's copy must replace the ledger at ``path``, or None if the ledger can be used.

    Changes nothing. Raises ``ConfigError`` if neither can be used, or if the ledger belongs to another run.
    """
    reason = _why_replaced(path, start)
    if reason is None:
        return None
    if start.checkpoint is None:
        raise ConfigError(
            f"{path} {reason}, and there is no checkpoint to resume from: put a backup in its place, or choose another "
            "output and, with ledger.folder, another name"
        )
    copy = start.checkpoint / run_files.LEDGER
    problem = damage(copy) if copy.exists() else "it is missing"
    if problem is not None:
        raise ConfigError(f"{path} {reason}, and {copy} can't replace it: {problem}; resume from another checkpoint")
    return reason


def _why_replaced(path: Path, start: RunStart) -> str | None:
    """Return what is wrong with the ledger, or None if a run can continue with it, or start without one."""
    if not path.exists():
        return None if start.checkpoint is None else "is missing"
    try:
        problem = damage(path)
        if problem is None:
            return _why_unfit(path, start)
    except LedgerDamaged as error:
        problem = error.problem
    if problem == NO_LEDGER and start.checkpoint is None:  # its run died while creating it
        return None
    return f"is damaged ({problem})"


def _why_unfit(path: Path, start: RunStart) -> str | None:
    with closing(Ledger(path, read_only=True, at_rest=True)) as ledger:
        if ledger.get("run_id") is None:  # its run died while creating it
            return None
        _check_owner(ledger, start)
        recorded_step = ledger.checkpoint_step
        if start.checkpoint is None and recorded_step:
            raise ConfigError(
                f"{path} records a checkpoint after {recorded_step} steps, but none is next to it: put it back, "
                "or choose another output"
            )
        _check_run(ledger, start)
        if recorded_step > start.step:
            return f"continues to step {recorded_step}"
        if not ledger.has_steps(start.step):
            return f"does not have all of the {start.step} steps"
        if start.checkpoint is None or _continues(ledger, start.checkpoint / run_files.LEDGER):
            return None
        return "was continued elsewhere, from an older checkpoint's copy"


def _continues(ledger: Ledger, copy: Path) -> bool:
    """Return whether a ledger goes on from a checkpoint's copy, unless that is not known.

    With ``ledger.folder`` on a local disk, each host has its own, and the one in use may be another's by now.
    """
    try:
        with closing(Ledger(copy, read_only=True, at_rest=True)) as kept:
            return ledger.writers[: len(kept.writers)] == kept.writers
    except LedgerError:  # it is missing or damaged, and not needed
        return True


def _why_released(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why groups that wait to be trained do not fit the remaining steps under the new config, or None."""
    steps, old_steps = new["algorithm"]["num_steps"], old["algorithm"]["num_steps"]
    every, old_every = new["weights"]["every_steps"], old["weights"]["every_steps"]
    is_changed = (
        new["algorithm"]["groups_per_step"] != old["algorithm"]["groups_per_step"],
        new["replay"]["max_staleness"] < old["replay"]["max_staleness"],
        # Groups in flight may need a version that is no longer published, such as the one after the last step.
        steps < old_steps or (steps > old_steps and old_steps % every != 0),
        old_every % every != 0,
    )
    return next((reason for reason, applies in zip(RELEASED, is_changed, strict=True) if applies), None)


def mark_output(output: Path) -> None:
    """Give the output folder an id, if it has none yet."""
    if not output_id(output):
        write_whole(output / run_files.OUTPUT_ID, uuid4().hex)


def output_id(output: Path) -> str:
    """Return the id of the output folder, or an empty text if it has none."""
    try:
        return (output / run_files.OUTPUT_ID).read_text(errors="replace").strip()
    except OSError:
        return ""


def _check_owner(ledger: Ledger, start: RunStart) -> None:
    """Raise ``ConfigError`` if the ledger belongs to another output folder, also to one that this is a copy of.

    A ledger in the output folder itself is moved and copied with it, and old ledgers have no owner.
    """
    owner, output = ledger.get("owner"), start.output
    if owner is None or output is None or ledger.path.parent == output:
        return
    with ledger.decoding("owner"):
        owner_output, owner_id = Path(owner["output"]), str(owner["id"])
    if owner_id != output_id(output) or (owner_id == output_id(owner_output) and not owner_output.samefile(output)):
        raise ConfigError(
            f"the ledger {ledger.path} belongs to the run in {owner_output}, not to output={output}: choose another "
            "name or ledger.folder, or resume that run"
        )


def _check_run(ledger: Ledger, start: RunStart) -> bool:
    """Return whether options that matter for training have changed.

    Raises ``ConfigError`` if they may not change, or if the ledger belongs to another run.
    """
    run_id = ledger.get("run_id")
    if start.run_id is not None and run_id != start.run_id:
        raise ConfigError(
            f"{ledger.path} belongs to another run ({run_id}) than {start.checkpoint} ({start.run_id}): "
            "move one of them away, or choose another output"
        )
    with ledger.decoding("config"):
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
    suffixes = [suffix for suffix in ("", *COMPANIONS) if path.with_name(path.name + suffix).exists()]
    number = 1
    while any((aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).parent.glob(f"{aside.name}*")):
        number += 1
    for suffix in suffixes:
        path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside if suffixes else None
