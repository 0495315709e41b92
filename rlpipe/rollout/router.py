"""A router that sends each group to the engine with the fewest outstanding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from rlpipe.types import GroupRequest


class Router:
    """The assignment of groups to engines, and the tokens that each engine may still have to draw."""

    def __init__(self, engines: Sequence[str] = ()) -> None:
        self._outstanding = dict.fromkeys(engines, 0)
        self._assigned: dict[int, tuple[str, GroupRequest]] = {}

    def add(self, engine: str) -> None:
        """Add an idle engine; one that is already known keeps its groups."""
        self._outstanding.setdefault(engine, 0)

    def remove(self, engine: str) -> list[GroupRequest]:
        """Remove an engine, and return the requests that it was working on."""
        self._outstanding.pop(engine, None)
        lost = [request for name, request in self._assigned.values() if name == engine]
        for request in lost:
            del self._assigned[request.group_id]
        return lost

    def assign(
        self, requests: Sequence[GroupRequest], among: Sequence[str] | None = None
    ) -> dict[str, list[GroupRequest]]:
        """Spread the requests over all engines, or those in ``among``; engines that get none are left out.

        Among engines with equally many outstanding tokens, the first is chosen.
        """
        shares: dict[str, list[GroupRequest]] = {}
        engines = self._outstanding if among is None else among
        least_first = [(self._outstanding[engine], place, engine) for place, engine in enumerate(engines)]
        heapify(least_first)
        for request in requests:
            tokens, place, engine = least_first[0]
            heapreplace(least_first, (tokens + request.outstanding_tokens, place, engine))
            self._outstanding[engine] += request.outstanding_tokens
            self._assigned[request.group_id] = (engine, request)
            shares.setdefault(engine, []).append(request)
        return shares

    def finish(self, group_id: int) -> GroupRequest | None:
        """Release a finished group from its engine; return its request, or None if no engine works on it."""
        if group_id not in self._assigned:
            return None
        engine, request = self._assigned.pop(group_id)
        self._outstanding[engine] -= request.outstanding_tokens
        return request

    @property
    def num_groups(self) -> int:
        """Number of groups that engines are working on."""
        return len(self._assigned)

    @property
    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return dict(self._outstanding)

    def groups_of(self, engine: str) -> list[int]:
        """Return the ids of the groups that an engine works on."""
        return [group_id for group_id, (name, _) in self._assigned.items() if name == engine]
