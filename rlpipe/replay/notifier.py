"""Where coroutines wait until something has changed; for one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Noticeboard:
    """What boards that ranks and the controller look at have in common."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until something has changed such that ``condition`` holds; False after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def notify(self) -> None:
        """Lets those who wait look again."""
        async with self._changed:
            self._changed.notify_all()
