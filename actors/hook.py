"""Calls of a user's function on scored groups, in a separate process that can neither slow nor break the run."""

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
"""Limit on calls that wait for the hook or run in it; groups beyond it are skipped and counted."""
MAX_SHOWN = 3
"""Number of failures whose reason is shown."""


class HookActor:
    """Process that calls the user's function."""

    def __init__(self, path: str, folder: str) -> None:
        enter_folder(folder)
        self._function = import_object(path, what="hook", error=ConfigError)

    def call(self, groups: Sequence[RolloutGroup]) -> None:
        self._function(groups)


class HookFeed:
    """The replay actor's calls of the hook, for one event loop; ``notice`` gets messages on the first failures."""

    def __init__(self, hook: ActorHandle, notice: Callable[[str], None], *, max_waiting: int = MAX_WAITING) -> None:
        self._hook, self._notice, self._max_waiting = hook, notice, max_waiting
        self._num_shown = 0
        self._calls: set[asyncio.Task[None]] = set()
        self.num_left_out = 0
        """Groups skipped because too many calls were waiting."""
        self.num_failed = 0
        """Groups on which the hook raised an error or died."""

    def offer(self, groups: Sequence[RolloutGroup]) -> None:
        """Call the hook on ``groups`` without waiting for it; skip and count them if too many calls are waiting."""
        if not groups:
            return
        if len(self._calls) >= self._max_waiting:
            self.num_left_out += len(groups)
            return
        call = asyncio.ensure_future(self._call(groups))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the hook has finished all its calls, or the time is up."""
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
