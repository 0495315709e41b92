"""Queues of work on the device that run beside its computation: copies in, copies out."""

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
        """What is computed from here on waits until the queue is past this point; in a lane's work, that lane does."""

    def block_host(self) -> None:
        """The calling thread waits."""


class Lane(Protocol):
    def mark(self) -> StreamEvent:
        """The end of all that the device was given to compute so far."""

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        """Queues work behind what was queued, and behind an event; None: what ``mark`` gives now."""

    def block_host(self) -> None:
        """The calling thread waits until all that was submitted is through."""


class Done:
    """Of work that is over."""

    def block_device(self) -> None:
        pass

    def block_host(self) -> None:
        pass


class InlineLane:
    """Does everything at once: on the CPU."""

    def mark(self) -> StreamEvent:
        return Done()

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        work()
        return Done()

    def block_host(self) -> None:
        pass


class CudaLane:
    """A stream; made once, as every stream keeps memory of its own."""

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
    """All that goes on beside the computation."""

    copies_in: Lane
    copies_out: Lane
    worker: Executor
    """Does the host's arithmetic, one thing after another."""


def make_queues(device: torch.device) -> Queues:
    def make_lane() -> Lane:
        return CudaLane(device) if device.type == "cuda" else InlineLane()

    # One thread, whose operators take all of torch's: what is needed first is ready soonest.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
    return Queues(copies_in=make_lane(), copies_out=make_lane(), worker=worker)
