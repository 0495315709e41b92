"""A cache of groups with reward variance, to be trained again in later steps that have groups without."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rlpipe.replay.assemble import has_signal
from rlpipe.types import RolloutGroup


class KeptGroups:
    """Cache of the newest ``limit`` groups with differing rewards; each is handed out once, the newest first."""

    def __init__(self, *, limit: int, combine: str) -> None:
        self._combine = combine
        self._groups: deque[RolloutGroup] = deque(maxlen=limit)

    @property
    def ids(self) -> list[int]:
        return [group.group_id for group in self._groups]

    def keep(self, groups: Iterable[RolloutGroup]) -> None:
        self._groups.extend(group for group in groups if has_signal(group, self._combine))

    def fill_up(self, newest_first: Iterable[RolloutGroup]) -> None:
        """Add groups with differing rewards as older ones, until the cache is full."""
        for group in newest_first:
            if len(self._groups) == self._groups.maxlen:
                return
            if has_signal(group, self._combine):
                self._groups.appendleft(group)

    def stand_in_for(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return a kept group for each of ``groups`` without reward variance, or fewer if not enough are kept."""
        wanted = sum(not has_signal(group, self._combine) for group in groups)
        return [self._groups.pop() for _ in range(min(wanted, len(self._groups)))]
