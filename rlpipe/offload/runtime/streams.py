"""Queues of work that run beside the device's computation: copies to the device and copies from it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]


class StreamEvent(Protocol):
    """A point in a queue."""

    def block_device(self) -> None:
        """Make later computation wait until the queue is past this point; in a lane's work, make that lane wait."""

    def block_host(self) -> None:
        """Block the calling thread until the queue is past this point."""


class Lane(Protocol):
    def mark(self) -> StreamEvent:
        """Return an event at the end of all computation that the device was given so far."""

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        """Queue work after the lane's earlier work and after the event ``behind`` (None: ``mark()``)."""

    def block_host(self) -> None:
        """Block the calling thread until all submitted work is done."""


class Done:
    """The event of work that is done."""

    def block_device(self) -> None:
        pass

    def block_host(self) -> None:
        pass


class InlineLane:
    """A lane for the CPU, which runs all work immediately."""

    def mark(self) -> StreamEvent:
        return Done()

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        work()
        return Done()

    def block_host(self) -> None:
        pass


class CudaLane:
    """A lane on a CUDA stream of its own; create it once, since every stream keeps memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> StreamEvent:
        return CudaEvent(torch.cuda.current_stream(self._device), self._device)

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        behind = behind or self.mark()
        with torch.cuda.stream(self._stream):
            behind.block_device()
            work()
            return CudaEvent(self._stream, self._device)

    def block_host(self) -> None:
        self._stream.synchronize()


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def block_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def block_host(self) -> None:
        self._event.synchronize()


@dataclass(kw_only=True, slots=True, frozen=True)
class Queues:
    """The lanes and the worker that run beside the computation."""

    copies_in: Lane
    copies_out: Lane
    worker: Executor
    """Executor of the host's arithmetic, one task after another."""


def make_queues(device: torch.device) -> Queues:
    def make_lane() -> Lane:
        return CudaLane(device) if device.type == "cuda" else InlineLane()

    # One thread, since each operator uses all of torch's threads: what is needed first is ready soonest.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
    return Queues(copies_in=make_lane(), copies_out=make_lane(), worker=worker)
