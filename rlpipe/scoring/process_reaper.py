"""Keeper process that outlives a scoring process, to end the processes that its rewards have started."""

from __future__ import annotations

import os
import secrets
import sys
import time

from rlpipe.scoring.processes import descendants, end_processes, list_processes, marked, read_process, run_module

MARK = "RLPIPE_SCORING_PROCESS"
"""Environment variable that marks the processes that one scoring process started."""
POLL_S = 0.25


def start_reaper() -> None:
    """Start a keeper that ends all descendants of this process after this process has ended in any way, on Linux.

    It finds them by their process group, which becomes that of this process alone, and by ``MARK`` in their
    environment. A process that leaves the group and drops that variable is missed.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    os.environ[MARK] = secrets.token_hex(8)
    run_module("rlpipe.scoring.process_reaper", [str(os.getpid()), os.environ[MARK]]).wait()


def find_survivors(group: int, mark: str) -> set[int]:
    """Return the ids of the group's processes, of those with the mark, and of their descendants, except this one."""
    processes = list_processes()
    roots = {pid for pid, process in processes.items() if process.group == group} | marked(mark, processes)
    return (roots | descendants(roots, processes)) - {os.getpid()}


def main() -> None:
    group, token = int(sys.argv[1]), sys.argv[2]
    kept = read_process(group)
    # Ray kills a worker's own children first, so the keeper must not be one. A pipe would not report the worker's end,
    # because children that it forks hold the other end open.
    if os.fork() != 0:
        os._exit(0)
    while kept is not None and (now := read_process(group)) is not None and now.started == kept.started:
        time.sleep(POLL_S)
    end_processes(lambda: find_survivors(group, f"{MARK}={token}"))


if __name__ == "__main__":
    main()
