"""The store of a run's checkpoints, each written to a temporary folder and renamed once complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlpipe.common.atomic_io import begin_folder, check_room, writing_path
from rlpipe.learner.checkpoint.checkpoint_files import Checkpoint, complete_checkpoint, prune, read_record, remove_rest
from rlpipe.learner.checkpoint.learner_state import read_state, state_bytes, write_state
from rlpipe.learner.step import Learner
from rlpipe.learner.strategies.sharding import Reduce, Sharding

Add = Callable[[Path], Mapping[str, Any]]


class CheckpointStore:
    """Checkpoints in a folder that all ranks can access; every rank must make the same ``save`` and ``load`` calls."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, learner: Learner, *, step: int, extra: Mapping[str, Any], add: Add | None = None) -> Path:
        """Write the checkpoint ``step_<step>`` and remove all but the newest ``keep``; ``extra`` must be JSON values.

        ``add`` is called on rank 0 with the folder being written; what it returns is added to ``extra``. Raises
        ``OSError`` if the checkpoint can't be written; the earlier checkpoints then remain complete.
        """
        sharding = learner.policy.sharding
        target = self._folder / f"step_{step:06d}"
        temporary = writing_path(target)
        bad_steps = {"num_bad_steps": learner.num_bad_steps, "bad_steps_in_row": learner.bad_steps_in_row}

        def complete() -> None:
            own = {**extra, **(add(temporary) if add is not None else {})}
            complete_checkpoint(temporary, target, {"step": step, **bad_steps, "extra": own})

        def begin() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_rest(self._folder)
            check_room(self._folder, state_bytes(learner))
            begin_folder(target)

        _on_first_rank(sharding, begin)
        try:
            write_state(learner, temporary)
            _on_first_rank(sharding, complete)
        except OSError:
            if sharding.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if sharding.rank == 0:
            prune(self._folder, self._keep)
        return target

    def load(self, path: Path, learner: Learner) -> Checkpoint:
        """Restore the learner's state; raise ``ConfigError`` if the checkpoint does not fit the learner."""
        record = read_record(path)
        read_state(learner, path)
        learner.num_steps_done = record["step"]
        learner.num_bad_steps = record["num_bad_steps"]
        learner.bad_steps_in_row = record["bad_steps_in_row"]
        return Checkpoint(record["step"], record["extra"])


def _on_first_rank(sharding: Sharding, action: Callable[[], Any]) -> None:
    """Run ``action`` on rank 0 while the other ranks wait; an ``OSError`` there is raised on all ranks."""
    failure: OSError | None = None
    if sharding.rank == 0:
        try:
            action()
        except OSError as error:
            failure = error
    if sharding.reduce(torch.tensor(float(failure is not None)), Reduce.MAX):
        raise failure or OSError("rank 0 can't write the checkpoint")
