"""The controller of an RL run: admits prompts, follows versions and steps.

     prompts ──> [admit] ──> rollout actors ──> scoring pools ──> replay actor ──> learner group
     (cursor)       ^         (engines)          (rewards)         (buffer)         (Ray Train)
                    |             ^                                   |                 |
                    |             | every version, digest checked     | reports         |
                    +── version ──+────────── weights actor <─────────+── publish ──────+

Synchronous (``max_staleness=0``) and asynchronous training differ in nothing but the capacity that ``Admission``
gives. After the last step comes one pass that is not trained: engines and learner hold the same version, and the
learner reports how far their log-probs differ.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from rlpipe.actors.weights import Served
from rlpipe.configs.schema import AlgorithmConfig, ClusterConfig, SamplingConfig
from rlpipe.data.prompts import Cursor, PromptSource
from rlpipe.errors import WaitTimeout
from rlpipe.evaluation import Evaluator
from rlpipe.flow import GroupFlow, GroupIds
from rlpipe.placement import root_cause
from rlpipe.prepare import ResumePoint
from rlpipe.replay.admission import Admission
from rlpipe.replay.buffer import Admitted
from rlpipe.replay.steps import StepReport
from rlpipe.reporting import Reporter
from rlpipe.scorer_pool import ScorerPool
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest, Prompt

POLL_S = 10.0
"""Seconds after which a wait for news is asked again; news itself comes at once."""


@dataclass(kw_only=True, frozen=True)
class Parts:
    """The actors of a run."""

    engines: Mapping[str, ActorHandle]
    pools: Sequence[ScorerPool]
    replay: ActorHandle
    weights: ActorHandle


class Controller:
    """Runs the loops of one RL run on one event loop."""

    def __init__(
        self,
        parts: Parts,
        *,
        algorithm: AlgorithmConfig,
        sampling: SamplingConfig,
        cluster: ClusterConfig,
        max_staleness: int,
        evaluate_every: int,
        seed: int,
        prompts: PromptSource,
        evaluator: Evaluator,
        reporter: Reporter,
        start: ResumePoint,
    ) -> None:
        self._parts, self._algorithm, self._sampling, self._cluster = parts, algorithm, sampling, cluster
        self._evaluate_every, self._seed = evaluate_every, seed
        self._prompts, self._evaluator, self._reporter = prompts, evaluator, reporter
        self._first_step, self._num_steps = start.step, algorithm.num_steps
        self._backlog = deque(self._rewind(start))
        self._next_group_id = start.next_group_id
        self._admission = Admission(
            groups_per_step=algorithm.groups_per_step,
            max_staleness=max_staleness,
            num_steps=algorithm.num_steps,
            first_step=start.step,
        )
        self._flow = GroupFlow(parts.engines, parts.pools, timeout_s=cluster.step_timeout_s, deliver=self._deliver)
        self._last_evaluated = start.step - 1
        self._evaluations: list[asyncio.Task[None]] = []
        self._last_report = time.monotonic()

    async def run(self, learner: asyncio.Future[None]) -> None:
        """Runs until the last step is reported, all is evaluated, and ``learner``, the learner group, has ended."""
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(self._flow.run()), tasks.create_task(self._watch_progress())]
            reports = tasks.create_task(follow_reports(self._parts.replay, self._report))
            versions = tasks.create_task(self._follow_versions(tasks))
            await learner
            await asyncio.gather(reports, versions)
            await asyncio.gather(*self._evaluations)
            for task in endless:
                task.cancel()

    # Admission ----------------------------------------------------------------------------------------------------

    async def _start_groups(self) -> None:
        """Fills the capacity with the next prompts."""
        version, capacity = self._admission.version, self._admission.capacity
        if not capacity:
            return
        admitted: list[Admitted] = []
        requests: list[GroupRequest] = []
        for group_id in range(self._next_group_id, self._next_group_id + capacity):
            cursor, prompt = self._backlog.popleft() if self._backlog else self._next_prompt()
            admitted.append(Admitted(group_id=group_id, version=version, epoch=cursor.epoch, position=cursor.position))
            requests.append(self._request(group_id, prompt, version))
        self._next_group_id += capacity
        self._admission.admit(capacity)
        place = self._prompts.cursor
        resume = {"epoch": place.epoch, "position": place.position, "next_group_id": self._next_group_id}
        # Waited for, because an actor may run calls in another order than they were made in.
        await self._parts.replay.admit.remote(admitted, resume)
        self._flow.dispatch(requests)

    def _next_prompt(self) -> tuple[Cursor, Prompt]:
        cursor = self._prompts.cursor
        return cursor, self._prompts.next()

    def _rewind(self, start: ResumePoint) -> Iterable[tuple[Cursor, Prompt]]:
        """The prompts that were pending when the run stopped; leaves the source at its place behind them."""
        backlog = []
        for cursor in start.pending:
            self._prompts.seek(cursor)
            backlog.append(self._next_prompt())
        self._prompts.seek(start.cursor)
        return backlog

    def _request(self, group_id: int, prompt: Prompt, version: int) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt=prompt,
            group_size=self._algorithm.group_size,
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            seed=_group_seed(self._seed, group_id),
            min_version=version,
        )

    # Scored groups ------------------------------------------------------------------------------------------------

    async def _deliver(self, groups: ObjectRef, group_ids: GroupIds, scores: Sequence[Sequence[GroupScores]]) -> None:
        """Hands evaluated groups to their evaluation, the others to the replay actor."""
        evaluated = {group_id for group_id in group_ids.values() if self._evaluator.owns(group_id)}
        if evaluated:
            await add_evaluated(self._evaluator, groups, evaluated, scores)
        training = [index for index, group_id in group_ids.items() if group_id not in evaluated]
        if not training:
            return
        failed: dict[int, str] = await self._parts.replay.add.remote(groups, training, *scores)
        for group_id, reason in failed.items():
            self._reporter.discarded(group_id, reason)
        self._admission.discard(len(failed))
        await self._start_groups()

    # Versions and steps -------------------------------------------------------------------------------------------

    async def _follow_versions(self, tasks: asyncio.TaskGroup) -> None:
        """Opens the next step as soon as every engine serves its version, and evaluates where it is due."""
        version = self._first_step - 1
        while version < self._num_steps:
            served = await self._wait_served(version)
            version = served.version
            self._reporter.served(served.sync_s)
            self._admission.publish(version)
            if self._evaluation_due(version):
                self._last_evaluated = version
                self._evaluations.append(tasks.create_task(self._evaluate(version)))
            await self._start_groups()
        self._admission.extend(1)
        await self._start_groups()

    async def _wait_served(self, after: int) -> Served:
        while True:
            try:
                served = await self._parts.weights.wait_served.remote(after, POLL_S)
            except RayTaskError as error:
                raise root_cause(error, "the weights actor failed") from None
            if served is not None:
                return served

    def _evaluation_due(self, version: int) -> bool:
        if not self._evaluator.prompts:
            return False
        every = self._evaluate_every
        passed = every > 0 and version // every > self._last_evaluated // every
        return passed or version in (self._first_step, self._num_steps)

    async def _evaluate(self, version: int) -> None:
        requests, metrics = self._evaluator.start(version)
        self._flow.dispatch(requests)
        self._reporter.evaluated(version, await metrics)

    def _report(self, report: StepReport) -> None:
        self._last_report = time.monotonic()
        if report.step < self._num_steps:
            report.metrics |= {f"rows/skipped/{kind}": float(n) for kind, n in self._prompts.skip_counts.items()}
            self._reporter.trained(report)
        else:
            self._reporter.compared(report)

    async def _watch_progress(self) -> None:
        """Stops a run in which no step ends any more, and says what every part was doing."""
        limit = self._cluster.step_timeout_s
        while time.monotonic() - self._last_report < limit:
            await asyncio.sleep(min(POLL_S, limit))
        raise WaitTimeout(
            f"no step has ended for cluster.step_timeout_s={limit:g} seconds; replay: "
            f"{await self._parts.replay.describe.remote()}; outstanding tokens: {self._flow.outstanding}"
        )


async def follow_reports(batches: ActorHandle, report: Callable[[StepReport], None]) -> None:
    """Hands on the reports of all steps, until the last one."""
    ended = False
    while not ended:
        for entry in await batches.wait_completed.remote(POLL_S):
            report(entry)
            ended = ended or entry.last


async def add_evaluated(
    evaluator: Evaluator, groups: ObjectRef, group_ids: set[int], scores: Sequence[Sequence[GroupScores]]
) -> None:
    """Fetches those of the groups that belong to an evaluation, and adds them with their scores."""
    by_group: dict[int, list[GroupScores]] = {group_id: [] for group_id in group_ids}
    for entry in (entry for pool in scores for entry in pool if entry.group_id in group_ids):
        by_group[entry.group_id].append(entry)
    for group in await groups:
        if group.group_id in group_ids:
            evaluator.add(group, by_group[group.group_id])


def _group_seed(seed: int, group_id: int) -> int:
    """A seed for the group, the same in every run; below 2^31."""
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1)[0]) >> 1
