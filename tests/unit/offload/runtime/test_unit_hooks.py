"""The assignment of slots to chunks, and the events that their copies wait for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from offload_cases import LateStream

from rlpipe.offload.runtime.activations import CopyStream, Done, InlineStream, StreamEvent, Work
from rlpipe.offload.runtime.unit_hooks import Residency


class FakeChunk:
    """A chunk whose device memory must not be written to after its release."""

    is_persistent = False

    def __init__(self) -> None:
        self.has_memory = False

    def load(self, stream: CopyStream, after: StreamEvent | None = None) -> StreamEvent:
        self.has_memory = True

        def write() -> None:
            assert self.has_memory

        return stream.submit(write, after)

    def release(self) -> None:
        self.has_memory = False


def make_residency(stream: CopyStream, num_chunks: int, num_slots: int) -> Residency:
    chunks = [FakeChunk() for _ in range(num_chunks)]
    return Residency(chunks, num_slots=num_slots, slots_of=[1] * num_chunks, stream=stream)


@pytest.mark.parametrize(
    "end",
    [lambda residency: residency.drop([1]), lambda residency: residency.ensure(3), Residency.close],
    ids=["dropped", "replaced", "closed"],
)
def test_memory_is_freed_once_what_was_on_its_way_is_there(end: Callable[[Residency], None]) -> None:
    stream = LateStream()
    residency = make_residency(stream, num_chunks=4, num_slots=2)
    residency.enter([0], is_backward=False)
    assert residency.resident == [0, 1]
    end(residency)
    stream.block_host()


class CountingStream(InlineStream):
    num_host_waits = 0

    def block_host(self) -> None:
        self.num_host_waits += 1


def test_no_copy_is_under_way_once_it_is_closed() -> None:
    stream = CountingStream()
    make_residency(stream, num_chunks=2, num_slots=2).close()
    assert stream.num_host_waits == 1


class MarkedStream(InlineStream):
    """A stream that records the event that its last work waits for."""

    after: StreamEvent | None = None

    def __init__(self) -> None:
        self.marks: list[StreamEvent] = []

    def mark(self) -> StreamEvent:
        self.marks.append(Done())
        return self.marks[-1]

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        self.after = after
        return super().submit(work)


def test_what_comes_next_is_copied_alongside_what_was_entered_last() -> None:
    stream = MarkedStream()
    residency = make_residency(stream, num_chunks=6, num_slots=2)
    residency.enter([0], is_backward=False)
    residency.leave([0])
    residency.enter([1], is_backward=False)
    residency.drop([2])
    residency.fetch_next([2])
    assert residency.resident == [1, 2]
    assert stream.after is stream.marks[-1] is not stream.marks[-2]


@pytest.mark.parametrize(
    "use",
    [lambda residency: residency.leave([1]), lambda residency: residency.ensure(0), Residency.leave_all],
    ids=["left", "read", "all left"],
)
def test_memory_that_was_used_since_is_copied_to_after_that_use(use: Callable[[Residency], None]) -> None:
    stream = MarkedStream()
    residency = make_residency(stream, num_chunks=6, num_slots=3)
    residency.enter([0, 1], is_backward=False)
    use(residency)
    residency.drop([2])
    residency.fetch_next([2])
    assert 2 in residency.resident
    assert stream.after is None


def test_what_comes_next_takes_no_slot_of_what_is_used_sooner() -> None:
    residency = make_residency(InlineStream(), num_chunks=6, num_slots=2)
    residency.enter([1, 2], is_backward=False)
    residency.fetch_next([3])
    assert residency.resident == [1, 2]
