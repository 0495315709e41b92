"""Choice of the engine for a request, and the state of each engine.

STARTING ──loaded──> HEALTHY <──answered── SUSPECT
       ^  └──started──> STALE ─┘    └──silent──>┘  │
       └───────────── DEAD <──died, or silent longer──┘

A STALE engine runs, but has not loaded the newest version yet. Only HEALTHY engines are given work. Times are in
seconds, of any one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace

from rlpipe.types import GroupRequest


class Router:
    """The assignment of groups to engines, and the tokens that each engine may still have to sample."""

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
        least_first = [(self._outstanding[engine], index, engine) for index, engine in enumerate(engines)]
        heapify(least_first)
        for request in requests:
            tokens, index, engine = least_first[0]
            heapreplace(least_first, (tokens + request.outstanding_tokens, index, engine))
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

    def engine_of(self, group_id: int) -> str | None:
        """Return the engine that works on a group, or None if none does."""
        engine, _ = self._assigned.get(group_id, (None, None))
        return engine

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


class EngineState(StrEnum):
    """States of an engine, by which requests are routed."""

    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"


ANSWERING = frozenset({EngineState.HEALTHY, EngineState.SUSPECT})
"""States in which an engine is expected to answer."""


@dataclass(slots=True)
class _Engine:
    state: EngineState = EngineState.STARTING
    heard_at: float = 0.0
    version: int = -1
    failures_in_row: int = 0
    reason: str = ""


class Fleet:
    """The engines of a run; a restarted engine serves nothing until it has loaded the newest version.

    ``clock`` returns the time, against which an engine's silence is measured.
    """

    def __init__(
        self, names: Iterable[str], *, suspect_after_s: float, dead_after_s: float, clock: Callable[[], float]
    ) -> None:
        self._suspect_after_s, self._dead_after_s, self._clock = suspect_after_s, dead_after_s, clock
        self._engines = {name: _Engine(heard_at=clock()) for name in names}
        self._version = -1
        self._has_served = False
        self._none_since: float | None = None

    @property
    def serving(self) -> list[str]:
        """Names of the engines that may be given work."""
        return [name for name, engine in self._engines.items() if engine.state is EngineState.HEALTHY]

    @property
    def outage_s(self) -> float:
        """Seconds since the last serving engine was lost; 0 while one serves, and before the first one does."""
        return 0.0 if self._none_since is None else self._clock() - self._none_since

    def state(self, name: str) -> EngineState:
        return self._engines[name].state

    def version(self, name: str) -> int:
        """Return the last version that the engine is known to serve."""
        return self._engines[name].version

    def silence_s(self, name: str) -> float:
        """Return the seconds since the engine last answered, or changed its state."""
        return self._clock() - self._engines[name].heard_at

    def last_death(self, name: str) -> str:
        """Return why the engine last died; empty if it never did."""
        return self._engines[name].reason

    def failures_in_row(self, name: str) -> int:
        """Return how often the engine has died since it last finished a group."""
        return self._engines[name].failures_in_row

    def published(self, version: int) -> None:
        """Record a new version; engines that serve older ones continue, but those that start now must load it."""
        self._version = version

    def started(self, name: str) -> None:
        """Record that the engine runs, but serves nothing yet."""
        self._move(name, EngineState.STALE)

    def loaded(self, name: str, version: int) -> None:
        """Record that the engine serves a version; a stale engine becomes healthy if the version is the newest.

        Late reports about dead engines are ignored.
        """
        engine = self._engines[name]
        if engine.state in ANSWERING or (engine.state is EngineState.STALE and version >= self._version):
            self._move(name, EngineState.HEALTHY)
        if engine.state is not EngineState.DEAD:
            engine.version = version

    def answered(self, name: str, *, finished: bool = False) -> None:
        """Record an answer of the engine, and whether it ``finished`` a group."""
        engine = self._engines[name]
        engine.heard_at = self._clock()
        if finished:
            self.finished_group(name)
        if engine.state is EngineState.SUSPECT:
            self._move(name, EngineState.HEALTHY)

    def finished_group(self, name: str) -> None:
        self._engines[name].failures_in_row = 0

    def died(self, name: str, reason: str) -> None:
        engine = self._engines[name]
        if engine.state is not EngineState.DEAD:
            engine.failures_in_row += 1
            engine.reason = reason
            self._move(name, EngineState.DEAD)

    def restarting(self, name: str) -> None:
        """Record that another process replaces the dead engine."""
        assert self._engines[name].state is EngineState.DEAD, "only a dead engine is replaced"
        self._move(name, EngineState.STARTING)

    def check(self) -> list[str]:
        """Mark silent engines as suspect, and those silent for too long as dead; return the latter."""
        now = self._clock()
        lost = []
        for name, engine in self._engines.items():
            silent_s = now - engine.heard_at
            if engine.state in ANSWERING and silent_s >= self._dead_after_s:
                self.died(name, f"it has not answered for {silent_s:.0f} seconds (cluster.dead_after_s)")
                lost.append(name)
            elif engine.state is EngineState.HEALTHY and silent_s >= self._suspect_after_s:
                self._move(name, EngineState.SUSPECT)
        return lost

    def describe(self) -> dict[str, str]:
        """Return a description of every engine's state, for error messages."""
        now = self._clock()
        return {
            name: f"{engine.state}, version {engine.version}, last heard of {now - engine.heard_at:.0f} s ago"
            + (f", last died because {engine.reason}" if engine.reason else "")
            for name, engine in self._engines.items()
        }

    def _move(self, name: str, state: EngineState) -> None:
        engine = self._engines[name]
        engine.state = state
        if state is not EngineState.SUSPECT:
            engine.heard_at = self._clock()
        if self.serving:
            self._has_served, self._none_since = True, None
        elif self._has_served and self._none_since is None:
            self._none_since = self._clock()
