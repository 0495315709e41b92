"""Residency of chunks on the device: those in use, those needed next, and the last ones while there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rlpipe.offload.runtime.chunk import ChunkMemory
from rlpipe.offload.runtime.streams import Done, Lane, StreamEvent


class OutOfSlots(RuntimeError):
    """Error of a model whose chunks in use at one time need more slots than there are."""


class Residency:
    """Slots on the device, and the chunks that occupy them.

    A step uses the chunks in order and then in reverse. The victim is always the chunk whose next use is farthest away,
    and a prefetched chunk replaces only one whose next use is farther than its own. So the last chunks of the forward
    pass stay for the backward pass, and its last ones for the next forward pass.
    """

    def __init__(
        self,
        memories: Sequence[ChunkMemory],
        *,
        num_slots: int,
        slots_of: Sequence[int],
        lane: Lane,
        await_update: Callable[[int], None] | None = None,
        is_updated: Callable[[int], bool] | None = None,
    ) -> None:
        """Create ``num_slots`` slots for chunks that each take ``slots_of`` slots.

        ``await_update`` returns once a chunk's bytes on the host are up to date; chunks are prefetched only if they are
        (``is_updated``), except for those that are used next.
        """
        self._memories, self._slots_of, self._lane = memories, slots_of, lane
        self._await_update, self._is_updated = await_update, is_updated
        self.num_slots = num_slots
        self._free = num_slots
        self._events: dict[int, StreamEvent] = {}
        self._pins: Counter[int] = Counter()
        self._position, self._is_backward = 0, False
        self._mark: StreamEvent | None = None
        """Event after which the device no longer uses unpinned chunks; None: after all work submitted so far."""
        self.is_closed = False

    @property
    def resident(self) -> list[int]:
        """Chunks that have slots."""
        return sorted(self._events)

    @property
    def num_pinned(self) -> int:
        return sum(self._pins.values())

    def ensure(self, index: int) -> None:
        """Load a chunk, unless it is resident, for the computation from here on; raise ``OutOfSlots`` without room."""
        self._check_open()
        self._mark = None
        if self._memories[index].is_persistent:
            return
        if index not in self._events:
            self._make_room(index)
            self._load(index)
        self._events[index].block_device()
        self._events[index] = Done()

    def enter(self, indices: Iterable[int], *, is_backward: bool) -> None:
        """Load chunks and pin them until ``leave``; prefetch those that come next."""
        needed = sorted(indices)
        if not needed:
            return
        self._position, self._is_backward = (needed[0] if is_backward else needed[-1]), is_backward
        self._pins.update(needed)
        for index in needed:
            self.ensure(index)
        self.fetch_ahead()
        self._mark = self._lane.mark()

    def leave(self, indices: Iterable[int]) -> None:
        self._mark = None
        self._pins.subtract(indices)
        self._pins += Counter()

    def leave_all(self) -> None:
        """Unpin all chunks after a pass, however it ended."""
        self._mark = None
        self._pins.clear()

    def turn(self) -> None:
        """Set the position to the first chunk, as the next one to be used."""
        self._position, self._is_backward = 0, False

    def drop(self, indices: Iterable[int]) -> None:
        """Free the slots of chunks whose bytes on the host change."""
        for index in indices:
            if index in self._events:
                assert not self._pins[index], "a chunk is updated while it is in use"
                self._release(index)

    def close(self) -> None:
        self.leave_all()
        self.drop(self.resident)
        self._lane.block_host()  # the host's memory, which copies may still read, is freed next
        self.is_closed = True

    def fetch_ahead(self) -> None:
        """Prefetch chunks in the order of their use, up to the first that would have to wait."""
        for index in self._upcoming():
            if self._is_updated is not None and not self._is_updated(index):
                return
            if not self._fetch(index):
                return

    def fetch_next(self, indices: Iterable[int]) -> None:
        """Prefetch the chunks that are used right after those entered last, waiting for their updates.

        The copies overlap with the computation on the entered chunks, which must be submitted already. Call it before
        ``leave``.
        """
        for index in sorted(indices):
            if not self._fetch(index, self._mark):
                return

    def _fetch(self, index: int, behind: StreamEvent | None = None) -> bool:
        """Load a chunk without evicting any that is used sooner; return whether it is resident then."""
        if index in self._events or self._memories[index].is_persistent:
            return True
        while self._free < self._slots_of[index]:
            victim = self._victim()
            if victim is None or self._distance(victim) <= self._distance(index):
                return False
            self._release(victim)
        self._load(index, behind)
        return True

    def _upcoming(self) -> Iterable[int]:
        step = -1 if self._is_backward else 1
        end = -1 if self._is_backward else len(self._memories)
        return range(self._position + step, end, step)

    def _distance(self, index: int) -> int:
        """Return the number of steps until a chunk is used: in this direction, or after the turn at its end."""
        ahead = self._position - index if self._is_backward else index - self._position
        if ahead >= 0:
            return ahead
        last = len(self._memories) - 1
        return self._position + index + 1 if self._is_backward else 2 * last - self._position - index + 1

    def _victim(self) -> int | None:
        return max((index for index in self._events if not self._pins[index]), key=self._distance, default=None)

    def _make_room(self, index: int) -> None:
        while self._free < self._slots_of[index]:
            victim = self._victim()
            if victim is None:
                raise OutOfSlots(
                    f"chunk {index} needs {self._slots_of[index]} slots, but all {self.num_slots} are in use by chunks "
                    f"{', '.join(map(str, self.resident)) or 'none'}: give num_slots a higher number"
                )
            self._release(victim)

    def _load(self, index: int, behind: StreamEvent | None = None) -> None:
        if self._await_update is not None:
            self._await_update(index)
        self._events[index] = self._memories[index].load(self._lane, behind)
        self._free -= self._slots_of[index]

    def _release(self, index: int) -> None:
        # The chunk may still be copied to the device; freed memory must not be written to.
        self._events.pop(index).block_device()
        self._memories[index].release()
        self._free += self._slots_of[index]

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the offloaded model is closed")
