"""What the tests of both weights actors share: a play with an actor whose engines are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlpipe.actors.weights import Served, WeightsActor

Actor = TypeVar("Actor", bound=WeightsActor)


def play(make: Callable[[], Actor], act: Callable[[Actor], Coroutine[Any, Any, Any]]) -> Any:
    """What ``act`` does with an actor that is followed."""

    async def run() -> Any:
        async with asyncio.timeout(5):
            actor = make()
            await actor.wait_served(0, 0.0)
            return await act(actor)

    return asyncio.run(run())


async def served(actor: WeightsActor, after: int = 0) -> Served:
    news = await actor.wait_served(after, 1.0)
    assert news is not None
    return news
