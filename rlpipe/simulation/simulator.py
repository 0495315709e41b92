"""Simulation of a setup in virtual time: the real admission, router and replay buffer, between simulated actors.

The calls and their order are those of ``rlpipe.run.controller`` and the actors; messages take no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.random import SeedSequence

from rlpipe.replay.buffer import Admission, GroupTicket, ReplayBuffer
from rlpipe.rollout.routing import Router
from rlpipe.simulation.setup import Draws, Setup
from rlpipe.simulation.simulated_actors import (
    Clock,
    EngineLevels,
    Level,
    ScoringBatch,
    SimulatedEngine,
    SimulatedGroup,
    SimulatedPool,
    SimulatedWeights,
)
from rlpipe.types import GroupRequest, Prompt

PROMPT = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(0, np.int32), prompt="", task={})

TRAIN = "train"
WEIGHTS, SLOT, GENERATE, SCORE = WAITS = ("weights", "slot", "generate", "score")
"""Causes of the learner's waits: a version to be served, a slot on an engine, sampling, or scoring."""


@dataclass(kw_only=True, frozen=True)
class Mark:
    """State of a simulation at the end of a step; the levels are integrals since the start."""

    at_s: float
    running: float = 0.0
    busy_engines: float = 0.0
    busy_scorers: Mapping[str, float] = field(default_factory=dict)
    buffered: float = 0.0
    learner: Mapping[str, float] = field(default_factory=dict)
    """Seconds in which the learner trained, and in which it waited, by cause."""
    staleness: int = 0
    """Sum over the trained groups."""


@dataclass(kw_only=True, frozen=True)
class History:
    """Course of a simulation: a mark at the start and one at the end of every step."""

    setup: Setup
    marks: list[Mark]
    ended_s: float
    max_staleness: int
    max_buffered: int

    @property
    def num_steps(self) -> int:
        return len(self.marks) - 1


def simulate(setup: Setup, *, seed: int, limit_s: float, max_steps: int | None = None) -> History:
    """Simulate until the setup's last step, ``limit_s`` seconds of virtual time, or ``max_steps``, if earlier."""
    return Simulation(setup, seed).run(limit_s, min(setup.num_steps, max_steps or setup.num_steps))


class Simulation:
    """Run in virtual time, from the publication of version 0."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._setup = setup
        self._clock = Clock()
        self._admission = Admission(
            groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness, num_steps=setup.num_steps
        )
        self._buffer = ReplayBuffer(groups_per_step=setup.groups_per_step, max_staleness=setup.max_staleness)
        generate, train, sync, *score = SeedSequence(seed).spawn(3 + len(setup.pools))
        times = setup.times
        self._work = Draws(times.generate, generate)
        self._train = Draws(times.train, train)
        self._engine_levels = EngineLevels(running=Level(self._clock), busy=Level(self._clock))
        self._engines = {f"rollout-{index}": self._engine() for index in range(setup.num_engines)}
        self._router = Router(list(self._engines))
        self._busy_scorers = {name: Level(self._clock) for name in setup.pools}
        self._pools = [
            SimulatedPool(
                self._clock, Draws(times.score[name], stream), self._busy_scorers[name], size=size, scored=self._scored
            )
            for (name, size), stream in zip(setup.pools.items(), score, strict=True)
        ]
        self._weights = SimulatedWeights(
            self._clock, Draws(times.sync, sync), list(self._engines.values()), holds=setup.holds, served=self._served
        )
        self._next_group_id = 0
        self._requested_step: int | None = None
        self._unpublished: int | None = None
        self._requested_at = 0.0
        self._buffered = Level(self._clock)
        self._learner = dict.fromkeys((TRAIN, *WAITS), 0.0)
        self._staleness = self._max_staleness = 0
        self._marks = [Mark(at_s=0.0)]
        self._last_step = setup.num_steps

    def run(self, limit_s: float, num_steps: int) -> History:
        self._last_step = num_steps - 1
        self._publish(0)
        self._clock.run(limit_s)
        is_complete = len(self._marks) > num_steps
        return History(
            setup=self._setup,
            marks=self._marks,
            ended_s=self._clock.now if is_complete else limit_s,
            max_staleness=self._max_staleness,
            max_buffered=self._buffered.highest,
        )

    def _engine(self) -> SimulatedEngine:
        return SimulatedEngine(
            self._clock,
            self._engine_levels,
            groups_at_once=self._setup.groups_per_engine,
            slowdown=self._setup.slowdown,
            finished=self._generated,
        )

    # Controller ---------------------------------------------------------------------------------------------------

    def _start_groups(self) -> None:
        """Admit as many groups as there is capacity for, and submit them to the engines."""
        capacity, version, now = self._admission.capacity, self._admission.version, self._clock.now
        if not capacity:
            return
        ids = range(self._next_group_id, self._next_group_id + capacity)
        self._next_group_id += capacity
        self._admission.admit(capacity)
        self._buffer.admit([GroupTicket(group_id=i, version=version, epoch=0, position=i, prompt_id=i) for i in ids])
        for name, requests in self._router.assign([self._request(i, version) for i in ids]).items():
            self._engines[name].submit(
                [
                    SimulatedGroup(
                        group_id=request.group_id,
                        prompt=PROMPT,
                        rollouts=[],
                        work_s=self._work[request.group_id],
                        admitted_at=now,
                    )
                    for request in requests
                ]
            )

    def _request(self, group_id: int, version: int) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt=PROMPT,
            group_size=self._setup.group_size,
            max_tokens=self._setup.max_tokens,
            temperature=1.0,
            seed=0,
            min_version=version,
        )

    def _generated(self, groups: list[SimulatedGroup]) -> None:
        for group in groups:
            self._router.finish(group.group_id)
        batch = ScoringBatch(groups)
        for pool in self._pools:
            pool.score(batch)

    def _scored(self, batch: ScoringBatch) -> None:
        for group in batch.groups:
            self._buffer.add(group)
        self._buffered.change(len(batch.groups))
        self._fill(batch.groups[-1])
        self._start_groups()

    # Learner ------------------------------------------------------------------------------------------------------

    def _request_step(self, step: int) -> None:
        self._requested_step, self._requested_at = step, self._clock.now
        self._fill(None)

    def _fill(self, newest: SimulatedGroup | None) -> None:
        """Train the wanted step if the buffer can fill it; ``newest`` is the group just added to the buffer."""
        step = self._requested_step
        if step is None or (groups := self._buffer.take(step)) is None:
            return
        self._requested_step = None
        if newest is not None:
            self._count_wait(newest)
        self._buffered.change(-len(groups))
        staleness = [step - group.version for group in cast(list[SimulatedGroup], groups)]
        self._staleness += sum(staleness)
        self._max_staleness = max(self._max_staleness, *staleness)
        self._clock.call_at(self._clock.now + self._train[step], self._end_step, step)

    def _count_wait(self, group: SimulatedGroup) -> None:
        """Split the learner's wait among the stages that the group that ended the wait went through meanwhile."""
        start = self._requested_at
        ends = (group.admitted_at, group.started_at, group.generated_at, self._clock.now)
        for phase, end in zip(WAITS, ends, strict=True):
            self._learner[phase] += max(end - start, 0.0)
            start = max(start, end)

    def _end_step(self, step: int) -> None:
        self._learner[TRAIN] += self._train[step]
        self._marks.append(
            Mark(
                at_s=self._clock.now,
                running=self._engine_levels.running.integral,
                busy_engines=self._engine_levels.busy.integral,
                busy_scorers={name: level.integral for name, level in self._busy_scorers.items()},
                buffered=self._buffered.integral,
                learner=dict(self._learner),
                staleness=self._staleness,
            )
        )
        if step == self._last_step:
            self._clock.stop()
        elif (step + 1) % self._setup.publish_every:
            self._request_step(step + 1)
        else:
            self._publish(step + 1)

    def _publish(self, version: int) -> None:
        """Publish a version once the engines serve the one before, and go on to the next step."""
        if self._weights.is_loading:
            self._unpublished, self._requested_at = version, self._clock.now
        else:
            self._weights.publish(version)
            self._request_step(version)

    # Weights ------------------------------------------------------------------------------------------------------

    def _served(self, version: int) -> None:
        self._admission.publish(version)
        self._start_groups()
        if self._unpublished is not None:
            self._learner[WEIGHTS] += self._clock.now - self._requested_at
            unpublished, self._unpublished = self._unpublished, None
            self._publish(unpublished)
