"""Which chunks are on the device: those in use, those that come next, and the last ones as long as there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rlpipe.offload.runtime.chunk import ChunkMemory
from rlpipe.offload.runtime.streams import Done, Lane, StreamEvent


class OutOfSlots(RuntimeError):
    """What is in use at one time needs more slots than there are."""


class Residency:
    """Slots on the device, and the chunks that have them.

    A step goes up the chunks and down again: the victim is always the chunk whose next use is farthest away, and a
    chunk is fetched ahead only for one whose next use is farther than its own. The last chunks of the forward pass so
    stay for the backward pass, and its last ones for the next forward pass.
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
        """``slots_of`` says how many slots each takes.

        ``await_update`` returns once a chunk's bytes on the host are those to be used next; a chunk is fetched ahead
        only if it ``is_updated``, or is what comes next.
        """
        self._memories, self._slots_of, self._lane = memories, slots_of, lane
        self._await_update, self._is_updated = await_update, is_updated
        self.num_slots = num_slots
        self._free = num_slots
        self._events: dict[int, StreamEvent] = {}
        self._pins: Counter[int] = Counter()
        self._position, self._is_backward = 0, False
        self._mark: StreamEvent | None = None
        """By when the device is through with all that is not pinned; None: when it is through with all it has."""
        self.is_closed = False

    @property
    def resident(self) -> list[int]:
        """Chunks that have slots."""
        return sorted(self._events)

    @property
    def num_pinned(self) -> int:
        return sum(self._pins.values())

    def ensure(self, index: int) -> None:
        """Has a chunk there for what is computed from here on. Raises ``OutOfSlots``."""
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
        """Has chunks there until they are left; fetches those that come next."""
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
        """After a pass, however it ended."""
        self._mark = None
        self._pins.clear()

    def turn(self) -> None:
        """The next use is the first chunk's."""
        self._position, self._is_backward = 0, False

    def drop(self, indices: Iterable[int]) -> None:
        """Frees the slots of chunks whose bytes on the host change."""
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
        """As far as nothing must be waited for."""
        for index in self._upcoming():
            if self._is_updated is not None and not self._is_updated(index):
                return
            if not self._fetch(index):
                return

    def fetch_next(self, indices: Iterable[int]) -> None:
        """What comes right after what was entered last, which the device has been given; waits for its updates.

        On the device it goes on beside that computation. For use before ``leave``.
        """
        for index in sorted(indices):
            if not self._fetch(index, self._mark):
                return

    def _fetch(self, index: int, behind: StreamEvent | None = None) -> bool:
        """Whether it is there, or under way, without the slots of what is used sooner."""
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
        """Steps until a chunk is used: on the way, or after the turn at its end."""
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
        # Its bytes may still be on their way; memory that is freed must not be written to.
        self._events.pop(index).block_device()
        self._memories[index].release()
        self._free += self._slots_of[index]

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the offloaded model is closed")
