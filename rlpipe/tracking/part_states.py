"""The parts of a run, engines, scorers and ranks, as its controller last saw them: a file that `rlpipe view` reads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpipe.common import run_files
from rlpipe.common.atomic_io import write_whole


@dataclass(kw_only=True, frozen=True)
class PartState:
    """State of one process, or of a pool of replicas; what a part does not have, or nobody knows yet, is None."""

    kind: str
    name: str
    state: str
    version: int | None = None
    """Policy version that an engine serves."""
    step: int | None = None
    """Step that a rank is in."""
    queue: int | None = None
    """Groups that it works on, or that wait for it."""
    heard_s: float | None = None
    """Seconds since its last answer or heartbeat, when this was written."""
    note: str = ""


def write_parts(output: Path, parts: Iterable[PartState]) -> None:
    """Replace the file; what can't be written, on a full disk for example, is not."""
    record = {"time": time.time(), "parts": [asdict(part) for part in parts]}
    with suppress(OSError):
        write_whole(output / run_files.PARTS, json.dumps(record, ensure_ascii=False) + "\n")


def read_parts(output: Path) -> tuple[float, list[PartState]] | None:
    """Return when the parts were seen last (seconds since 1970), and their states; None if nothing is recorded."""
    try:
        record = json.loads((output / run_files.PARTS).read_bytes())
        return float(record["time"]), [PartState(**part) for part in record["parts"]]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
