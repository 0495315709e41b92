"""Clean-up of what a reward leaves in its process: timers, signal handlers, the working directory, children."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from rlpipe.scoring.processes import descendants, end_processes, list_processes

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
TIMER_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
SIGNALS = (
    *TIMER_SIGNALS,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGXCPU,
)
"""Signals whose handlers programs replace."""


class Leftovers:
    """Snapshot of the process's state before a reward is called, which ``undo`` restores."""

    def __init__(self) -> None:
        self._on_main_thread = threading.current_thread() is threading.main_thread()
        self._folder = working_directory()
        self._timers = {timer: signal.getitimer(timer) for timer in TIMERS}
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._started = clock_ticks()

    def undo(self) -> None:
        """Restore the snapshot; a reward's alarm that rings meanwhile has no effect, whatever its handler raises."""
        while True:
            try:
                self._undo()
                return
            except BaseException:  # noqa: BLE001 - the handler is user code; timers are off by now, so it ends
                continue

    def _undo(self) -> None:
        for timer in TIMERS:
            signal.setitimer(timer, 0)
        if self._on_main_thread:
            for number, handler in self._handlers.items():
                # Handlers that Python did not install are None, and can't be set from here.
                if handler is not None and signal.getsignal(number) is not handler:
                    if number in TIMER_SIGNALS:  # ignoring a signal discards pending ones, of any thread
                        signal.signal(number, signal.SIG_IGN)
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for timer, (left, interval) in self._timers.items():
            if left > 0:  # set before the reward was called, and still running
                signal.setitimer(timer, left, interval)
        if self._folder is not None:
            with suppress(OSError):
                os.chdir(self._folder)

    def end_children(self) -> None:
        """End the processes that were started since the snapshot, and their descendants."""
        ended: set[int] = set()

        def find_new() -> set[int]:
            processes = list_processes()
            new = {pid for pid in descendants([os.getpid()], processes) if processes[pid].started >= self._started}
            ended.update(new)
            return new

        end_processes(find_new)
        for pid in ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def working_directory() -> str | None:
    """Return the working directory, or None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def clock_ticks() -> int:
    """Return the clock ticks since the machine's boot, the unit of process starts in /proc; 0 outside Linux."""
    if sys.platform != "linux":
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
