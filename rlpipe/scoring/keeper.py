"""A process beside a scoring process that outlives it, to end the processes that rewards have started."""

from __future__ import annotations

import os
import secrets
import sys

from rlpipe.scoring.processes import descendants, end_processes, list_processes, marked, run_module

MARK = "RLPIPE_SCORING_PROCESS"
"""Environment variable that tells the processes which one scoring process started."""


def start_keeper() -> None:
    """However this process ends, its children, theirs, and so on then end too, on Linux.

    They are known by their process group, which becomes that of this process alone, and by their environment. One that
    leaves the group and has no environment of ours is missed.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    os.environ[MARK] = secrets.token_hex(8)
    # The pipe that it reads closes with this process; nobody else inherits the other end.
    read_end, write_end = os.pipe()
    run_module("rlpipe.scoring.keeper", [str(os.getpid()), os.environ[MARK]], stdin=read_end)
    os.close(read_end)
    os.set_inheritable(write_end, False)


def find_left(group: int, mark: str) -> set[int]:
    """The processes of the group, those with the mark, and their descendants; without this one."""
    processes = list_processes()
    roots = {pid for pid, process in processes.items() if process.group == group} | marked(mark, processes)
    return (roots | descendants(roots, processes)) - {os.getpid()}


def main() -> None:
    group, token = int(sys.argv[1]), sys.argv[2]
    sys.stdin.buffer.read()
    end_processes(lambda: find_left(group, f"{MARK}={token}"))


if __name__ == "__main__":
    main()
