"""Turns that a process of episodes samples on the run's engines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlpipe.actors.rollout import TURNS
from rlpipe.episodes.session import Deadline
from rlpipe.errors import EngineFailed
from rlpipe.types import GroupRequest, Rollout, RolloutGroup

POLL_S = 10.0
"""Longest wait for turns in one call of an engine, in seconds."""
SILENCE_S = 2.0
"""Seconds beyond that until an engine counts as frozen, or as cut off."""
PAUSE_S = 0.2
"""Seconds until an engine that failed is asked again."""


@dataclass(slots=True)
class _Turn:
    group_id: int
    request: GroupRequest
    deadline: Deadline
    is_stopped: bool = False
    """Whether the deadline is paused: the engine has died, is silent, or serves an older version than is needed."""
    answer: asyncio.Future[Rollout] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TurnClient:
    """A client that samples turns on the engine of their group; for one event loop.

    The turns of one pass of the loop go to an engine in one call, and so do its answers. The driver assigns the groups
    of an engine that dies to another, by ``assign``; their open turns are then sampled there.
    """

    def __init__(self, name: str, engines: Mapping[str, ActorHandle]) -> None:
        # Another name in each process: engines may still hold answers for a dead process of the same actor.
        self._client, self._engines = f"{name}/{uuid4().hex}", engines
        self._assigned: dict[int, str] = {}
        self._turns: dict[int, _Turn] = {}
        self._next_id = 0
        self._unsent: defaultdict[str, list[int]] = defaultdict(list)
        self._dropped: defaultdict[str, list[int]] = defaultdict(list)
        self._versions: dict[str, int] = {}
        """Versions that the engines served when they last answered."""
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._unsure: set[str] = set()
        """Engines with calls that have failed since they answered: they may lack turns, or have answered to nobody."""
        self._again: dict[str, asyncio.TimerHandle] = {}
        self._sends: set[asyncio.Task[None]] = set()

    def assign(self, group_ids: Iterable[int], engine: str) -> None:
        """Sample the groups' turns on this engine from now on, the open ones again."""
        moved = {*group_ids}
        self._assigned |= dict.fromkeys(moved, engine)
        for number, turn in self._turns.items():
            if turn.group_id in moved:
                _resume_turn(turn)
                self._send(engine, number)

    def release(self, group_id: int) -> None:
        """Forget a group that is over."""
        self._assigned.pop(group_id, None)

    async def sample(self, request: GroupRequest, deadline: Deadline) -> Rollout:
        """Return one answer; raise ``EngineFailed`` if the engine can't sample the request.

        If it is cancelled, the engine stops to sample it. The deadline is paused from the death or the silence of an
        engine until the group is assigned to another, or the engine answers again; and until the engine serves a
        version that is new enough, which after a restart of the learner takes as long as training it again.
        """
        number, self._next_id = self._next_id, self._next_id + 1
        turn = self._turns[number] = _Turn(request.group_id, replace(request, group_id=number), deadline)
        engine = self._assigned[request.group_id]
        self._let_pass(engine, turn)
        self._send(engine, number)
        try:
            return await turn.answer
        except asyncio.CancelledError:
            self._drop(number, request.group_id)
            raise
        finally:
            _resume_turn(self._turns.pop(number))

    def _send(self, engine: str, number: int) -> None:
        if not self._unsent[engine]:
            asyncio.get_running_loop().call_soon(self._flush, engine)
        self._unsent[engine].append(number)
        if engine not in self._polls or self._polls[engine].done():
            self._polls[engine] = asyncio.create_task(self._poll(engine))

    def _drop(self, number: int, group_id: int) -> None:
        engine = self._assigned.get(group_id)
        if engine is not None:
            if not self._dropped[engine]:
                asyncio.get_running_loop().call_soon(self._flush_dropped, engine)
            self._dropped[engine].append(number)

    def _flush_dropped(self, engine: str) -> None:
        numbers, self._dropped[engine] = self._dropped[engine], []
        self._begin(self._submit(engine, "cancel", numbers))

    def _flush(self, engine: str) -> None:
        numbers, self._unsent[engine] = self._unsent[engine], []
        requests = [self._turns[number].request for number in dict.fromkeys(numbers) if number in self._turns]
        self._begin(self._submit(engine, "submit_turns", requests))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        sending = asyncio.create_task(coroutine)
        self._sends.add(sending)
        sending.add_done_callback(self._sends.discard)

    async def _submit(self, engine: str, method: str, argument: Any) -> None:
        try:
            await self._call(engine, method, argument)
        except RayError:
            self._failed(engine)

    def _call(self, engine: str, method: str, argument: Any) -> Any:
        call: Any = getattr(self._engines[engine], method).options(concurrency_group=TURNS)
        return call.remote(self._client, argument)

    async def _poll(self, engine: str) -> None:
        """Take an engine's answers for as long as turns are open."""
        while self._turns:
            wait_s = 0.0 if engine in self._unsure else POLL_S
            answer = asyncio.ensure_future(self._call(engine, "poll_turns", wait_s))
            try:
                if not (await asyncio.wait([answer], timeout=POLL_S + SILENCE_S))[0]:
                    self._stop(engine)
                groups: list[RolloutGroup]
                groups, self._versions[engine] = await answer
            except RayError:
                self._failed(engine)
                await asyncio.sleep(PAUSE_S)
                continue
            for turn in self._turns_on(engine):
                self._let_pass(engine, turn)
            for group in groups:
                self._answer(group)
            if engine in self._unsure:
                self._unsure.discard(engine)
                self._send_open(engine)

    def _failed(self, engine: str) -> None:
        """Stop the deadlines of an engine's turns, and send these again once it answers; it knows those that it has.

        They are sent once more when no call that has failed here can still take answers there.
        """
        self._stop(engine)
        self._unsure.add(engine)
        if engine in self._again:
            self._again[engine].cancel()
        loop = asyncio.get_running_loop()
        self._again[engine] = loop.call_later(POLL_S + SILENCE_S, self._send_open, engine)

    def _send_open(self, engine: str) -> None:
        for number, turn in self._turns.items():
            if self._assigned.get(turn.group_id) == engine and not turn.answer.done():
                self._send(engine, number)

    def _stop(self, engine: str) -> None:
        """Stop the deadlines of a dead or silent engine's turns; the driver assigns their groups to another one."""
        for turn in self._turns_on(engine):
            _stop_turn(turn)

    def _let_pass(self, engine: str, turn: _Turn) -> None:
        """Let a turn's time pass, unless it waits for a later version than the engine is known to serve."""
        needed = turn.request.min_version
        if self._versions.get(engine, needed) < needed:
            _stop_turn(turn)
        else:
            _resume_turn(turn)

    def _turns_on(self, engine: str) -> list[_Turn]:
        return [turn for turn in self._turns.values() if self._assigned.get(turn.group_id) == engine]

    def _answer(self, group: RolloutGroup) -> None:
        turn = self._turns.get(group.group_id)
        if turn is None or turn.answer.done():
            return  # its episode is over, or another engine was faster
        if group.failure is not None:
            turn.answer.set_exception(EngineFailed(group.failure))
        else:
            turn.answer.set_result(group.rollouts[0])


def _stop_turn(turn: _Turn) -> None:
    if not turn.is_stopped:
        turn.is_stopped = True
        turn.deadline.stop()


def _resume_turn(turn: _Turn) -> None:
    if turn.is_stopped:
        turn.is_stopped = False
        turn.deadline.go_on()
