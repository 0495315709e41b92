"""The simulated parts of a run (engines, scorers, learner) and the clock that they run by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from rlpipe.scoring.pools import split_calls
from rlpipe.simulation.setup import Draws
from rlpipe.types import RolloutGroup


class Clock:
    """Clock that makes calls at their times; of calls at the same time, the one requested first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()
        self._stopped = False

    def call_at(self, when: float, call: Callable[[Any], None], argument: Any) -> None:
        heappush(self._calls, (when, next(self._numbers), call, argument))

    def run(self, until: float) -> None:
        """Make the calls that are due up to ``until``, until none is left or ``stop`` is called."""
        calls = self._calls
        while calls and calls[0][0] <= until and not self._stopped:
            self.now, _, call, argument = heappop(calls)
            call(argument)

    def stop(self) -> None:
        self._stopped = True


class Level:
    """Number that changes over time, with its highest value and its integral."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value, self._since, self._integral = 0, 0.0, 0.0
        self.highest = 0

    def change(self, difference: int) -> None:
        now = self._clock.now
        self._integral += self._value * (now - self._since)
        self._since = now
        self._value += difference
        if self._value > self.highest:
            self.highest = self._value

    @property
    def integral(self) -> float:
        """Integral over the time until now."""
        return self._integral + self._value * (self._clock.now - self._since)


@dataclass(kw_only=True, slots=True)
class SimulatedGroup(RolloutGroup):
    """Group without rollouts, and the times of its stages."""

    work_s: float
    """Seconds that the group would take alone on an engine."""
    admitted_at: float
    started_at: float = 0.0
    generated_at: float = 0.0
    version: int = 0
    """Policy version that the engine served when the group started."""


@dataclass(kw_only=True, frozen=True)
class EngineLevels:
    """Levels of all engines together."""

    running: Level
    """Groups that are being sampled."""
    busy: Level
    """Engines that are sampling."""


class SimulatedEngine:
    """Engine that samples up to ``groups_at_once`` groups in the order of arrival, the slower the more there are.

    With n groups, each advances by one second of work in ``1 + (slowdown - 1) * (n - 1) / (groups_at_once - 1)``
    seconds. All advance alike, so one counter of work done serves all of them.
    """

    def __init__(
        self,
        clock: Clock,
        levels: EngineLevels,
        *,
        groups_at_once: int,
        slowdown: float,
        finished: Callable[[list[SimulatedGroup]], None],
    ) -> None:
        self._clock, self._levels, self._finished = clock, levels, finished
        self._version = 0
        self._groups_at_once = groups_at_once
        self._slowdown_per_group = (slowdown - 1) / max(groups_at_once - 1, 1)
        self._waiting: deque[SimulatedGroup] = deque()
        self._running: list[tuple[float, int, SimulatedGroup]] = []
        self._work_s = self._since = 0.0
        self._stretch = 1.0
        self._next_finish: tuple[float, float] | None = None
        self._on_drained: Callable[[], None] | None = None

    def submit(self, groups: Sequence[SimulatedGroup]) -> None:
        self._waiting.extend(groups)
        self._advance()
        self._start_groups()

    def hold(self, drained: Callable[[], None]) -> None:
        """Start no group until ``serve`` is called, and call ``drained`` once none runs."""
        self._on_drained = drained
        if not self._running:
            drained()

    def serve(self, version: int) -> None:
        """Serve a version that has been loaded, and start groups again."""
        self._version, self._on_drained = version, None
        self._advance()
        self._start_groups()

    def _advance(self) -> None:
        now = self._clock.now
        self._work_s += (now - self._since) / self._stretch
        self._since = now

    def _start_groups(self) -> None:
        if self._waiting and self._on_drained is None:
            running, num_before = self._running, len(self._running)
            while self._waiting and len(running) < self._groups_at_once:
                group = self._waiting.popleft()
                group.started_at, group.version = self._clock.now, self._version
                heappush(running, (self._work_s + group.work_s, group.group_id, group))
            self._levels.running.change(len(running) - num_before)
            if not num_before:
                self._levels.busy.change(1)
        self._plan()

    def _plan(self) -> None:
        """Have the clock call when the next group is finished, unless it does so already."""
        if not self._running:
            self._next_finish = None
            return
        self._stretch = 1 + self._slowdown_per_group * (len(self._running) - 1)
        plan = (self._running[0][0], self._stretch)
        if plan != self._next_finish:
            self._next_finish = plan
            self._clock.call_at(self._clock.now + (plan[0] - self._work_s) * self._stretch, self._finish, plan)

    def _finish(self, plan: tuple[float, float]) -> None:
        if plan is not self._next_finish:  # another plan has replaced it
            return
        self._work_s, self._since, self._next_finish = plan[0], self._clock.now, None
        finished_groups: list[SimulatedGroup] = []
        while self._running and self._running[0][0] <= self._work_s:
            finished_groups.append(heappop(self._running)[2])
            finished_groups[-1].generated_at = self._clock.now
        self._levels.running.change(-len(finished_groups))
        if not self._running:
            self._levels.busy.change(-1)
        self._start_groups()
        self._finished(finished_groups)
        if self._on_drained is not None and not self._running:
            self._on_drained()


@dataclass(slots=True)
class ScoringBatch:
    """Groups that finished together; all go on once the last of their calls is answered."""

    groups: list[SimulatedGroup]
    num_open: int = 0


class SimulatedPool:
    """Pool of processes that each take one call at a time, the longest waiting first; a call scores groups in turn."""

    def __init__(
        self, clock: Clock, draws: Draws, busy: Level, *, size: int, scored: Callable[[ScoringBatch], None]
    ) -> None:
        self._clock, self._draws, self._busy, self._size, self._scored = clock, draws, busy, size, scored
        self._num_idle = size
        self._waiting: deque[tuple[ScoringBatch, Sequence[SimulatedGroup]]] = deque()

    def score(self, batch: ScoringBatch) -> None:
        calls = split_calls(batch.groups, self._size)
        batch.num_open += len(calls)
        self._waiting.extend((batch, call) for call in calls)
        self._start_calls()

    def _start_calls(self) -> None:
        while self._waiting and self._num_idle:
            batch, call = self._waiting.popleft()
            self._num_idle -= 1
            self._busy.change(1)
            seconds = sum(self._draws[group.group_id] for group in call)
            self._clock.call_at(self._clock.now + seconds, self._end_call, batch)

    def _end_call(self, batch: ScoringBatch) -> None:
        self._num_idle += 1
        self._busy.change(-1)
        self._start_calls()
        batch.num_open -= 1
        if not batch.num_open:
            self._scored(batch)


class SimulatedWeights:
    """Transfer of one version at a time to the engines; ``served`` is called once all of them have it.

    With ``holds``, each engine starts no new group, and loads once none runs; otherwise all engines go on meanwhile.
    """

    def __init__(
        self,
        clock: Clock,
        draws: Draws,
        engines: Sequence[SimulatedEngine],
        *,
        holds: bool,
        served: Callable[[int], None],
    ) -> None:
        self._clock, self._draws, self._engines, self._holds, self._served = clock, draws, engines, holds, served
        self._num_loading = 0

    @property
    def is_loading(self) -> bool:
        return self._num_loading > 0

    def publish(self, version: int) -> None:
        assert not self.is_loading
        self._num_loading = len(self._engines)
        if self._holds:
            for engine in self._engines:
                engine.hold(partial(self._load, [engine], version))
        else:
            self._load(self._engines, version)

    def _load(self, engines: Sequence[SimulatedEngine], version: int) -> None:
        self._clock.call_at(self._clock.now + self._draws[version], self._loaded, (engines, version))

    def _loaded(self, load: tuple[Sequence[SimulatedEngine], int]) -> None:
        engines, version = load
        for engine in engines:
            engine.serve(version)
        self._num_loading -= len(engines)
        if not self._num_loading:
            self._served(version)
