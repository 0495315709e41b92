"""Sends each group to the engine with the least outstanding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from rlpipe.types import GroupRequest


class Router:
    """Knows which engine works on which group, and how many tokens each engine may still have to draw."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._outstanding = dict.fromkeys(engines, 0)
        self._assigned: dict[int, tuple[str, int]] = {}

    def assign(self, requests: Sequence[GroupRequest]) -> dict[str, list[GroupRequest]]:
        """Spreads the requests; engines that get none are left out. Of engines with equally many the first is taken."""
        shares: dict[str, list[GroupRequest]] = {}
        least_first = [(tokens, place, engine) for place, (engine, tokens) in enumerate(self._outstanding.items())]
        heapify(least_first)
        for request in requests:
            tokens, place, engine = least_first[0]
            heapreplace(least_first, (tokens + request.outstanding_tokens, place, engine))
            self._outstanding[engine] += request.outstanding_tokens
            self._assigned[request.group_id] = (engine, request.outstanding_tokens)
            shares.setdefault(engine, []).append(request)
        return shares

    def finish(self, group_id: int) -> None:
        """Takes a finished group off its engine; an unknown id is ignored."""
        engine, tokens = self._assigned.pop(group_id, (None, 0))
        if engine is not None:
            self._outstanding[engine] -= tokens

    @property
    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return dict(self._outstanding)

    def groups_of(self, engine: str) -> list[int]:
        """Ids of the groups that an engine works on."""
        return [group_id for group_id, (name, _) in self._assigned.items() if name == engine]
