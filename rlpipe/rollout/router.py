"""Sends each group to the engine with the least outstanding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from rlpipe.types import GroupRequest


class Router:
    """Knows which engine works on which group, and how many tokens each engine may still have to draw.

    Of engines with equally many tokens the first one of ``engines`` is taken. A request costs O(log engines).
    """

    def __init__(self, engines: Sequence[str]) -> None:
        self._engines = list(engines)
        self._tokens = [0] * len(self._engines)
        self._assigned: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int]] = []
        """Tokens and place of every engine; entries whose tokens are no longer the engine's are passed over."""
        self._rebuild()

    def assign(self, requests: Sequence[GroupRequest]) -> dict[str, list[GroupRequest]]:
        """Spreads the requests; engines that get none are left out."""
        shares: dict[str, list[GroupRequest]] = {}
        for request in requests:
            place, cost = self._least_busy(), request.outstanding_tokens
            self._tokens[place] += cost
            heapreplace(self._heap, (self._tokens[place], place))
            self._assigned[request.group_id] = (place, cost)
            shares.setdefault(self._engines[place], []).append(request)
        return shares

    def finish(self, group_id: int) -> None:
        """Takes a finished group off its engine; an unknown id is ignored."""
        if group_id not in self._assigned:
            return
        place, cost = self._assigned.pop(group_id)
        self._tokens[place] -= cost
        heappush(self._heap, (self._tokens[place], place))
        if len(self._heap) > 8 * len(self._engines):
            self._rebuild()

    @property
    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return dict(zip(self._engines, self._tokens, strict=True))

    def groups_of(self, engine: str) -> list[int]:
        """Ids of the groups that an engine works on."""
        return [group_id for group_id, (place, _) in self._assigned.items() if self._engines[place] == engine]

    def _least_busy(self) -> int:
        """The engine at the top of the heap, once entries that are out of date are gone from there."""
        while self._heap[0][0] != self._tokens[self._heap[0][1]]:
            heappop(self._heap)
        return self._heap[0][1]

    def _rebuild(self) -> None:
        self._heap = [(tokens, place) for place, tokens in enumerate(self._tokens)]
        heapify(self._heap)
