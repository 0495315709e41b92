"""Keeps groups that have something to teach, to stand beside groups of later steps that have not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from rlpipe.replay.assemble import has_signal
from rlpipe.types import RolloutGroup


class KeptGroups:
    """The newest ``limit`` groups with differing rewards; each is handed out once, the newest first."""

    def __init__(self, *, limit: int, combine: str) -> None:
        self._combine = combine
        self._groups: deque[RolloutGroup] = deque(maxlen=limit)

    @property
    def ids(self) -> list[int]:
        return [group.group_id for group in self._groups]

    def keep(self, groups: Iterable[RolloutGroup]) -> None:
        self._groups.extend(group for group in groups if has_signal(group, self._combine))

    def fill_up(self, newest_first: Iterable[RolloutGroup]) -> None:
        """Takes what there is to keep of groups in that order, until it has enough."""
        for group in newest_first:
            if len(self._groups) == self._groups.maxlen:
                return
            if has_signal(group, self._combine):
                self._groups.appendleft(group)

    def stand_in_for(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """One kept group for each of ``groups`` without signal, as far as there are any."""
        wanted = sum(not has_signal(group, self._combine) for group in groups)
        return [self._groups.pop() for _ in range(min(wanted, len(self._groups)))]
