"""The weights actor: hands every published version to every engine, and checks what they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlpipe.errors import RlpipeError, WaitTimeout, WeightsMismatch
from rlpipe.types import WeightsManifest


@dataclass(kw_only=True, slots=True, frozen=True)
class Served:
    """A version that every engine serves."""

    version: int
    sync_s: float
    """Seconds from its publication until the last engine answered."""


class WeightsActor:
    """Keeps the newest version in the object store; an engine whose digest differs stops the run."""

    def __init__(self, *, engines: Mapping[str, ActorHandle], timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._newest: tuple[WeightsManifest, list[ObjectRef]] | None = None
        self._served: Served | None = None
        self._error: RlpipeError | None = None
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()

    async def publish(self, manifest: WeightsManifest, buckets: list[ObjectRef]) -> None:
        """Loads the version into every engine; the engines take versions one after the other."""
        async with self._turn:
            started = time.perf_counter()
            self._newest = (manifest, buckets)
            try:
                await asyncio.gather(*(self._load(name, manifest, buckets) for name in self._engines))
            except RlpipeError as error:
                self._error = error
            else:
                self._served = Served(version=manifest.version, sync_s=time.perf_counter() - started)
        async with self._changed:
            self._changed.notify_all()

    async def wait_served(self, after: int, timeout_s: float) -> Served | None:
        """The newest version behind ``after`` that all engines serve; None after ``timeout_s``.

        Raises ``WeightsMismatch`` if an engine answered with another digest, ``WaitTimeout`` if one did not answer.
        """
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._has_news(after)), timeout_s)
        except TimeoutError:
            return None
        if self._error is not None:
            raise self._error
        return self._served

    def _has_news(self, after: int) -> bool:
        return self._error is not None or (self._served is not None and self._served.version > after)

    async def _load(self, name: str, manifest: WeightsManifest, buckets: list[ObjectRef]) -> None:
        call: ObjectRef = self._engines[name].load.remote(manifest, self._timeout_s, *buckets)
        try:
            digest = await asyncio.wait_for(_result(call), self._timeout_s)
        except TimeoutError:
            raise WaitTimeout(
                f"engine {name} has not loaded weights version {manifest.version} ({manifest.num_bytes:,} bytes) "
                f"within weights.timeout_s={self._timeout_s:g} seconds"
            ) from None
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            raise WeightsMismatch(f"engine {name} could not load weights version {manifest.version}: {cause}") from None
        if digest != manifest.digest:
            raise WeightsMismatch(
                f"engine {name} does not serve weights version {manifest.version}: "
                f"its digest is {digest}, the published one {manifest.digest}"
            )


async def _result(call: ObjectRef) -> str:
    return await call
