"""Helpers for the tests of both weights actors, with fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import ray

from rlpipe.actors.weights import ServedVersion, WeightsActor

Actor = TypeVar("Actor", bound=WeightsActor)
Engine = TypeVar("Engine")


def place_engines(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Engine]) -> dict[str, Engine]:
    """Make two engines, and let ``ray.get_actor`` find them by name."""
    found = {name: make() for name in ("a", "b")}
    monkeypatch.setattr(ray, "get_actor", found.__getitem__)
    return found


def next_answer(answers: list[str | Exception], otherwise: str) -> str:
    """Return the next answer, or ``otherwise`` if none is left; raise it if it is an exception."""
    answer = answers.pop(0) if answers else otherwise
    if isinstance(answer, Exception):
        raise answer
    return answer


def play(make: Callable[[], Actor], act: Callable[[Actor], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of ``act`` on an actor that has been asked for its served version once."""

    async def run() -> Any:
        async with asyncio.timeout(5):
            actor = make()
            await actor.wait_served(0, 0.0)
            return await act(actor)

    return asyncio.run(run())


async def served(actor: WeightsActor, after: int = 0) -> ServedVersion:
    news = await actor.wait_served(after, 1.0)
    assert news is not None
    return news
