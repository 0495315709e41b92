"""Operators that DeepSpeed compiles at their first use: after a process that compiled one was killed, others go on."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

logger = logging.getLogger(__name__)

LOCK = "lock"
"""Name of the file that torch's ``FileBaton`` creates in an operator's folder, and keeps open, while it compiles."""
BUILD_S = 120.0
"""Seconds after which a lock that no process here holds is not one of another host that shares the folder, either."""
POLL_S = 0.5


def free_abandoned_builds(build_s: float = BUILD_S) -> None:
    """Remove the locks that killed processes have left: torch would wait for them without end.

    A lock that is younger than ``build_s`` seconds is waited for.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in [*root.glob(f"*/{LOCK}"), *root.glob(f"*/*/{LOCK}")]:
        _free(lock, build_s)


def _free(lock: Path, build_s: float) -> None:
    while True:
        try:
            status = lock.stat()
        except FileNotFoundError:
            return
        if _is_open(status):
            return
        if time.time() - status.st_mtime >= build_s:
            logger.warning("a process was killed while it compiled %s: its lock is removed", lock.parent.name)
            lock.unlink(missing_ok=True)
            return
        time.sleep(POLL_S)


def _is_open(file_status: os.stat_result) -> bool:
    """Return whether a process of this machine has a file open, as far as this user can see."""
    for process in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):  # it has just been closed
                    if os.path.samestat(descriptor.stat(), file_status):
                        return True
    return False
