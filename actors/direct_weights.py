"""The weights actor of runs whose learner sends weights directly to the engines; it coordinates the two sides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from ray import ObjectRef

from rlpipe.actors.weights import NotLoaded, WeightsActor
from rlpipe.types import WeightsManifest


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

    async def offer(self, manifest: WeightsManifest, life: int) -> int:
        """Have the engines wait for a version, and return how many processes take part, or 0 if it is outdated.

        The learner's process is included in the count.
        """
        async with self._turn:
            if (life, manifest.version) <= (self._life, self.version):
                return 0
            await self._followed.wait()
            assert manifest.transfer is not None, "it says where to meet"
            # A learner that died in between leaves engines that still wait for it, or that have failed.
            left = {
                name: task
                for name, task in self._receiving.items()
                if not task.done() or isinstance(task.result(), NotLoaded)
            }
            engines = sorted(self._enrolled - left.keys())
            num_processes = 1 + len(engines) * self._workers_per_engine
            self._offered, self._offered_at, self._receiving = (life, manifest.version), time.perf_counter(), left
            for place, name in enumerate(engines):
                first_rank = 1 + place * self._workers_per_engine
                own = replace(manifest.transfer, num_processes=num_processes, first_rank=first_rank)
                self._receiving[name] = asyncio.create_task(self._ask(name, replace(manifest, transfer=own), []))
            return num_processes

    async def publish(self, manifest: WeightsManifest, buckets: list[ObjectRef], life: int) -> None:
        """Compare what the engines received with what the learner sent, by digest."""
        async with self._turn:
            if (life, manifest.version) <= (self._life, self.version):
                return
            if self._offered != (life, manifest.version):
                return  # this process replaced the one that the version was offered to; the learner sends it again
            self._life = life
            self._number += 1
            answers = {name: await task for name, task in self._receiving.items()}
            compared = {name: self._compare(name, manifest, answer) for name, answer in answers.items()}
            self._receiving = {}
            self._settle(
                manifest,
                sorted(answers),
                {name: failure for name, failure in compared.items() if failure is not None},
                self._offered_at,
            )
            # An engine that enrolled in between is waiting for the learner to send again.
            self._newest = (manifest, []) if self._enrolled <= answers.keys() else None
        await self._notify()

    async def load_newest(self, name: str) -> int | NotLoaded:
        """Have the learner send again, and return the version that the engine loaded, or why it did not load one."""
        async with self._turn:
            self._enrolled.add(name)
            self._newest, number = None, self._number
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_answered(name, number))
        served = self._served
        assert served is not None, "it has answered"
        return served.lost.get(name, served.version)

    def _has_answered(self, name: str, number: int) -> bool:
        served = self._served
        return served is not None and served.number > number and (name in served.engines or name in served.lost)
