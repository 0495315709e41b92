"""A base class for state that coroutines of one event loop wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Noticeboard:
    """Base of the boards on which ranks and the controller wait for changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``condition`` holds, and return True, or False after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def notify(self) -> None:
        """Have all waiting coroutines check their conditions again."""
        async with self._changed:
            self._changed.notify_all()
