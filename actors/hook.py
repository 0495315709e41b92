"""Gives scored groups to a user's function, in a process beside the run that can neither slow nor break it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlpipe.common.imports import enter_folder, import_object
from rlpipe.errors import ConfigError
from rlpipe.scoring.validation import describe_exception
from rlpipe.types import RolloutGroup

MAX_WAITING = 16
"""Calls that wait for the hook or run in it; what comes beyond them is left out and counted."""
MAX_SHOWN = 3
"""Failures whose reason is shown."""


class HookActor:
    """The process that calls the function."""

    def __init__(self, path: str, folder: str) -> None:
        enter_folder(folder)
        self._function = import_object(path, what="hook", error=ConfigError)

    def call(self, groups: Sequence[RolloutGroup]) -> None:
        self._function(groups)


class HookFeed:
    """What the replay actor hands to the hook; for one event loop. ``notice`` is told of the first failures."""

    def __init__(self, hook: ActorHandle, notice: Callable[[str], None], *, max_waiting: int = MAX_WAITING) -> None:
        self._hook, self._notice, self._max_waiting = hook, notice, max_waiting
        self._num_shown = 0
        self._calls: set[asyncio.Task[None]] = set()
        self.num_left_out = 0
        """Groups for which the hook had no time."""
        self.num_failed = 0
        """Groups over which it raised, or died."""

    def offer(self, groups: Sequence[RolloutGroup]) -> None:
        """Returns at once."""
        if not groups:
            return
        if len(self._calls) >= self._max_waiting:
            self.num_left_out += len(groups)
            return
        call = asyncio.ensure_future(self._call(groups))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def drain(self, timeout_s: float) -> None:
        """Waits until the hook has had all that it was given, or the time is up."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        return {"hook/left_out": float(self.num_left_out), "hook/failed": float(self.num_failed)}

    async def _call(self, groups: Sequence[RolloutGroup]) -> None:
        call: Any = self._hook.call.remote(groups)
        try:
            await call
        except RayError as error:
            self.num_failed += len(groups)
            self._num_shown += 1
            if self._num_shown <= MAX_SHOWN:
                cause = describe_exception(getattr(error, "cause", error))
                self._notice(f"scoring.on_rollouts_scored failed on {len(groups)} groups: {cause}")
