"""Actors that carry published weights from the learner to the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import ray
from ray import ObjectRef
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError

from rlpipe.actors.remote import KILLED, describe_failure, wait_within
from rlpipe.errors import EngineNotStarted, InputError, RlpipeError, WeightsMismatch
from rlpipe.replay.step_queue import Notifier
from rlpipe.types import WeightsManifest


class Cause(Enum):
    """Reason why an engine does not serve a version that it was sent."""

    ENGINE = "it is alive, but could not load the version"
    PROCESS = "its process died, and another may have replaced it, without a model"
    LEARNER = "the learner that published the version died, and its weights are lost; the next one publishes again"


@dataclass(slots=True, frozen=True)
class NotLoaded:
    """An engine's failure to load a version."""

    cause: Cause
    reason: str

    @property
    def process_alive(self) -> bool:
        return self.cause is not Cause.PROCESS


@dataclass(kw_only=True, slots=True, frozen=True)
class ServedVersion:
    """A version that all engines serve, except the ``lost`` ones."""

    number: int
    """Number that grows with each publication; versions may be published again after the learner restarted."""
    version: int
    sync_s: float
    """Seconds from its publication until the last engine answered."""
    engines: tuple[str, ...] = ()
    lost: Mapping[str, NotLoaded] = field(default_factory=dict)


class WeightsActor(Notifier):
    """Actor that keeps the newest version in the object store; an engine whose digest differs stops the run.

    Published versions wait for the first call of ``wait_served``: by then, the engines have started. An engine that
    could not load a version, or that is dead, gets no more versions until ``load_newest`` is called for it.
    """

    def __init__(self, *, engines: Sequence[str], timeout_s: float) -> None:
        super().__init__()
        self._engines = {name: ray.get_actor(name) for name in engines}
        self._timeout_s = timeout_s
        self._enrolled = set(engines)
        self._incarnation = 0
        self._newest: tuple[WeightsManifest, list[ObjectRef]] | None = None
        self._number = time.time_ns()  # differs from the numbers of an actor that this one replaces
        self._served: ServedVersion | None = None
        self._error: RlpipeError | None = None
        self._turn = asyncio.Lock()
        self._followed = asyncio.Event()

    async def publish(self, manifest: WeightsManifest, buckets: list[ObjectRef], incarnation: int) -> None:
        """Load the version into every engine, one version at a time.

        ``incarnation`` grows whenever the learner group restarts: any version of a later incarnation counts as newer.
        """
        async with self._turn:
            if (incarnation, manifest.version) <= (self._incarnation, self.version):
                return
            self._newest, self._incarnation = (manifest, buckets), incarnation
            await self._followed.wait()
            self._number += 1
            started = time.perf_counter()
            engines = sorted(self._enrolled)
            failures = await asyncio.gather(*(self._load(name, manifest, buckets) for name in engines))
            lost = {name: failure for name, failure in zip(engines, failures, strict=True) if failure is not None}
            if any(failure.cause is Cause.LEARNER for failure in lost.values()):
                self._newest = None
                return
            self._set_served(manifest, engines, lost, started)
        await self.notify()

    def _set_served(
        self, manifest: WeightsManifest, engines: Sequence[str], lost: Mapping[str, NotLoaded], started: float
    ) -> None:
        self._enrolled -= lost.keys()
        self._served = ServedVersion(
            number=self._number,
            version=manifest.version,
            sync_s=time.perf_counter() - started,
            engines=tuple(name for name in engines if name in self._enrolled),
            lost=lost,
        )

    async def load_newest(self, name: str) -> int | NotLoaded:
        """Wait for the first version, have an engine load the newest one, and send it all later ones.

        Returns the version that the engine serves now, or why it could not load it.
        """
        while True:
            await self.wait_for(lambda: self._newest is not None)
            async with self._turn:
                if self._newest is None:
                    continue
                manifest, buckets = self._newest
                failure = await self._load(name, manifest, buckets)
                if failure is None:
                    self._enrolled.add(name)
                    self._count_returned_engine(name)
                    return manifest.version
                if failure.cause is not Cause.LEARNER:
                    break
                self._newest = None
        await self.notify()  # the failure may end the run
        return failure

    def _count_returned_engine(self, name: str) -> None:
        """Count an engine that came back among those that serve the version, unless its loss was reported already."""
        served = self._served
        if served is not None and name in served.lost:
            lost = {engine: failure for engine, failure in served.lost.items() if engine != name}
            self._served = replace(served, engines=(*served.engines, name), lost=lost)

    async def newest(self) -> int:
        """Return the newest published version, or -1, which makes the learner publish again, as after a restart."""
        return self.version

    async def wait_served(self, after: int, timeout_s: float) -> ServedVersion | None:
        """Wait for a publication that is not number ``after``, and return it, or None after ``timeout_s``.

        Raises ``WeightsMismatch`` if an engine answered with another digest.
        """
        self._followed.set()
        if not await self.wait_for(lambda: self._has_updates(after), timeout_s):
            return None
        if self._error is not None:
            raise self._error
        return self._served

    @property
    def version(self) -> int:
        return -1 if self._newest is None else self._newest[0].version

    def _has_updates(self, after: int) -> bool:
        return self._error is not None or (self._served is not None and self._served.number != after)

    async def _load(self, name: str, manifest: WeightsManifest, buckets: list[ObjectRef]) -> NotLoaded | None:
        """Load a version into an engine; return why that failed, or None. Wrong digests or tensors end the run."""
        return self._compare(name, manifest, await self._load_and_digest(name, manifest, buckets))

    async def _load_and_digest(self, name: str, manifest: WeightsManifest, buckets: list[ObjectRef]) -> str | NotLoaded:
        """Have an engine load a version; return the digest of what it serves then, or why it failed."""
        call: ObjectRef = self._engines[name].load.remote(manifest, self._timeout_s, *buckets)
        try:
            digest: str = await wait_within(self._timeout_s, call)
            return digest
        except TimeoutError:
            return NotLoaded(
                Cause.ENGINE,
                f"it has not loaded weights version {manifest.version} ({manifest.num_bytes:,} bytes) "
                f"within weights.timeout_s={self._timeout_s:g} seconds",
            )
        except ActorUnavailableError:  # the process may be alive, and still sample its groups
            return NotLoaded(Cause.ENGINE, f"Ray could not reach it to load weights version {manifest.version}")
        except RayActorError:
            return NotLoaded(Cause.PROCESS, KILLED)
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ObjectLostError):
                return NotLoaded(Cause.LEARNER, Cause.LEARNER.value)
            if isinstance(cause, EngineNotStarted):
                return NotLoaded(Cause.PROCESS, KILLED)
            if isinstance(cause, InputError | WeightsMismatch):
                self._error = WeightsMismatch(
                    f"engine {name} could not load weights version {manifest.version}: {cause}"
                )
            reason = f"it could not load weights version {manifest.version}: {describe_failure(error)}"
            return NotLoaded(Cause.ENGINE, reason)

    def _compare(self, name: str, manifest: WeightsManifest, digest: str | NotLoaded) -> NotLoaded | None:
        if isinstance(digest, NotLoaded):
            return digest
        if digest != manifest.digest:
            self._error = WeightsMismatch(
                f"engine {name} does not serve weights version {manifest.version}: "
                f"its digest is {digest}, the published one {manifest.digest}"
            )
            return NotLoaded(Cause.ENGINE, "its digest is wrong")
        return None


class DirectWeightsActor(WeightsActor):
    """Weights actor that holds no weights: a restarted engine gets them with all others when the learner sends next.

    For each version, the learner calls ``offer``, which has the engines wait; sends the weights; and calls
    ``publish`` with the manifest of what the engines should serve now.
    """

    def __init__(self, *, engines: Sequence[str], timeout_s: float, workers_per_engine: int) -> None:
        super().__init__(engines=engines, timeout_s=timeout_s)
        self._workers_per_engine = workers_per_engine
        self._offered: tuple[int, int] | None = None
        self._receiving: dict[str, asyncio.Task[str | NotLoaded]] = {}
        self._offered_at = 0.0

    async def offer(self, manifest: WeightsManifest, incarnation: int) -> int:
        """Have the engines wait for a version, and return how many processes take part, or 0 if it is outdated.

        The learner's process is included in the count.
        """
        async with self._turn:
            if (incarnation, manifest.version) <= (self._incarnation, self.version):
                return 0
            await self._followed.wait()
            assert manifest.transfer is not None, "it says where to meet"
            # A learner that died in between leaves engines that still wait for it, or that have failed.
            still_receiving = {
                name: task
                for name, task in self._receiving.items()
                if not task.done() or isinstance(task.result(), NotLoaded)
            }
            engines = sorted(self._enrolled - still_receiving.keys())
            num_processes = 1 + len(engines) * self._workers_per_engine
            self._offered, self._offered_at, self._receiving = (
                (incarnation, manifest.version),
                time.perf_counter(),
                still_receiving,
            )
            for index, name in enumerate(engines):
                first_rank = 1 + index * self._workers_per_engine
                transfer = replace(manifest.transfer, num_processes=num_processes, first_rank=first_rank)
                self._receiving[name] = asyncio.create_task(
                    self._load_and_digest(name, replace(manifest, transfer=transfer), [])
                )
            return num_processes

    async def publish(self, manifest: WeightsManifest, buckets: list[ObjectRef], incarnation: int) -> None:
        """Compare what the engines received with what the learner sent, by digest."""
        async with self._turn:
            if (incarnation, manifest.version) <= (self._incarnation, self.version):
                return
            if self._offered != (incarnation, manifest.version):
                return  # this process replaced the one that the version was offered to; the learner sends it again
            self._incarnation = incarnation
            self._number += 1
            answers = {name: await task for name, task in self._receiving.items()}
            compared = {name: self._compare(name, manifest, answer) for name, answer in answers.items()}
            self._receiving = {}
            self._set_served(
                manifest,
                sorted(answers),
                {name: failure for name, failure in compared.items() if failure is not None},
                self._offered_at,
            )
            # An engine that enrolled in between is waiting for the learner to send again.
            self._newest = (manifest, []) if self._enrolled <= answers.keys() else None
        await self.notify()

    async def load_newest(self, name: str) -> int | NotLoaded:
        """Have the learner send again, and return the version that the engine loaded, or why it did not load one."""
        async with self._turn:
            if name in self._receiving and self._receiving[name].done():  # of the process that this one replaces
                del self._receiving[name]
            self._enrolled.add(name)
            self._newest, number = None, self._number
        await self.wait_for(lambda: self._has_answered(name, number))
        served = self._served
        assert served is not None, "it has answered"
        return served.lost.get(name, served.version)

    def _has_answered(self, name: str, number: int) -> bool:
        served = self._served
        return served is not None and served.number > number and (name in served.engines or name in served.lost)
