"""A process beside a scoring process that outlives it, to end the processes that rewards have started."""

from __future__ import annotations

import os
import secrets
import sys
import time

from rlpipe.scoring.processes import descendants, end_processes, list_processes, marked, read_process, run_module

MARK = "RLPIPE_SCORING_PROCESS"
"""Environment variable that tells the processes which one scoring process started."""
POLL_S = 0.25


def start_keeper() -> None:
    """However this process ends, its children, theirs, and so on then end too, on Linux.

    They are known by their process group, which becomes that of this process alone, and by their environment. One that
    leaves the group and has no environment of ours is missed.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    os.environ[MARK] = secrets.token_hex(8)
    run_module("rlpipe.scoring.process_reaper", [str(os.getpid()), os.environ[MARK]]).wait()


def find_left(group: int, mark: str) -> set[int]:
    """The processes of the group, those with the mark, and their descendants; without this one."""
    processes = list_processes()
    roots = {pid for pid, process in processes.items() if process.group == group} | marked(mark, processes)
    return (roots | descendants(roots, processes)) - {os.getpid()}


def main() -> None:
    group, token = int(sys.argv[1]), sys.argv[2]
    kept = read_process(group)
    # Ray kills a worker's own children first, so this is none. No pipe would tell of the worker's end, because children
    # that it forks hold the other end open.
    if os.fork() != 0:
        os._exit(0)
    while kept is not None and (now := read_process(group)) is not None and now.started == kept.started:
        time.sleep(POLL_S)
    end_processes(lambda: find_left(group, f"{MARK}={token}"))


if __name__ == "__main__":
    main()
