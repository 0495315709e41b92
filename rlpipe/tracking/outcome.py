"""Record in a run's folder of how its commands ended, which `rlpipe doctor RUN` and the view read."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlpipe.common import run_files
from rlpipe.common.atomic_io import write_whole
from rlpipe.common.formatting import without_password
from rlpipe.common.imports import one_line
from rlpipe.errors import Interrupted

RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
MAX_EARLIER = 50
"""Earlier commands that are kept."""


@dataclass(kw_only=True, frozen=True)
class RunOutcome:
    """The end of a command; its state stays ``running`` if its process was killed."""

    state: str
    host: str
    pid: int
    began_at: float
    """Seconds since 1970, as is ``ended_at``."""
    ended_at: float | None = None
    error: str | None = None
    """Name of the exception's class."""
    message: str | None = None
    earlier: Sequence[RunOutcome] = field(default_factory=list)
    """Outcomes of the commands before it, the newest last; each has no earlier ones itself."""


@contextmanager
def recorded_outcome(output: Path) -> Iterator[None]:
    """Record that a command runs, and how it ends; what can't be written, on a full disk for example, is not."""
    previous = read_outcome(output)
    earlier = [] if previous is None else [*previous.earlier, replace(previous, earlier=[])][-MAX_EARLIER:]
    running = RunOutcome(
        state=RUNNING, host=socket.gethostname(), pid=os.getpid(), began_at=time.time(), earlier=earlier
    )
    _write(output, running)
    try:
        yield
    except BaseException as error:
        _write(output, _ended_by(error, running))
        raise
    _write(output, replace(running, state=FINISHED, ended_at=time.time()))


def record_error(output: Path, error: BaseException) -> None:
    """Record the error that ends this process's command at once, without leaving ``recorded_outcome``."""
    running = read_outcome(output)
    if running is not None and running.state == RUNNING and running.pid == os.getpid():
        _write(output, _ended_by(error, running))


def _ended_by(error: BaseException, running: RunOutcome) -> RunOutcome:
    state = INTERRUPTED if isinstance(error, Interrupted | KeyboardInterrupt) else FAILED
    message = without_password(one_line(error))
    return replace(running, state=state, ended_at=time.time(), error=type(error).__name__, message=message)


def _write(output: Path, outcome: RunOutcome) -> None:
    with suppress(OSError):
        write_whole(output / run_files.OUTCOME, json.dumps(asdict(outcome), ensure_ascii=False) + "\n")


def read_outcome(output: Path) -> RunOutcome | None:
    """Return how the latest command of a run ended; None if nothing, or nothing readable, was recorded."""
    try:
        record = json.loads((output / run_files.OUTCOME).read_bytes())
        return _outcome_of({**record, "earlier": [_outcome_of(entry) for entry in record.get("earlier", ())]})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _outcome_of(record: Mapping[str, Any]) -> RunOutcome:
    """Return an outcome from JSON; raise ``TypeError`` or ``ValueError`` if it is none."""
    outcome = RunOutcome(**record)
    if not (0 < int(outcome.pid) < 2**31 and math.isfinite(outcome.began_at) and math.isfinite(outcome.ended_at or 0)):
        raise ValueError("it has no process or time")
    return outcome
