"""The controller of an RL run: admits prompts, moves groups between actors, follows versions and steps.

     prompts ──> [admit] ──> rollout actors ──> scoring pools ──> replay actor ──> learner group
     (cursor)       ^         (engines)          (rewards)         (buffer)         (Ray Train)
                    |             ^                                   |                 |
                    |             | every version, digest checked     | reports         |
                    +── version ──+────────── weights actor <─────────+── publish ──────+

Groups stay in the object store: the controller passes references on and sees ids and counts alone. Synchronous
(``max_staleness=0``) and asynchronous training differ in nothing but the capacity that ``Admission`` gives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors.rollout import Receipt
from rlpipe.actors.scorer_pool import ScorerPool
from rlpipe.actors.weights import Served
from rlpipe.configs.schema import AlgorithmConfig, ClusterConfig, HeldOutConfig, RewardConfig, SamplingConfig
from rlpipe.data.prompts import Cursor, PromptSource
from rlpipe.errors import EngineFailed, RunError, WaitTimeout
from rlpipe.evaluation import Evaluation
from rlpipe.placement import root_cause
from rlpipe.replay.admission import Admission
from rlpipe.replay.buffer import Admitted
from rlpipe.replay.steps import StepReport
from rlpipe.reporting import Reporter
from rlpipe.rollout.router import Router
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest, Prompt

logger = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds after which a wait for news is asked again; news itself comes at once."""
MAX_GROUPS_PER_COLLECT = 64


@dataclass(kw_only=True, frozen=True)
class Parts:
    """The actors of a run."""

    engines: Mapping[str, ActorHandle]
    pools: Sequence[ScorerPool]
    replay: ActorHandle
    weights: ActorHandle


@dataclass(kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(epoch=0, position=0))
    pending: Sequence[Cursor] = ()
    """Prompts that had been admitted but not trained."""
    next_group_id: int = 0


class Controller:
    """Runs the loops of one RL run on one event loop."""

    def __init__(
        self,
        parts: Parts,
        *,
        algorithm: AlgorithmConfig,
        sampling: SamplingConfig,
        cluster: ClusterConfig,
        held_out: HeldOutConfig,
        rewards: Mapping[str, RewardConfig],
        max_staleness: int,
        seed: int,
        prompts: PromptSource,
        held_out_prompts: Sequence[Prompt],
        reporter: Reporter,
        start: ResumePoint,
    ) -> None:
        self._parts, self._algorithm, self._sampling, self._cluster = parts, algorithm, sampling, cluster
        self._held_out, self._held_out_prompts = held_out, held_out_prompts
        self._rewards, self._seed, self._reporter = rewards, seed, reporter
        self._first_step, self._num_steps = start.step, algorithm.num_steps
        self._prompts = prompts
        self._backlog = deque(self._rewind(start))
        self._next_group_id = start.next_group_id
        self._admission = Admission(
            groups_per_step=algorithm.groups_per_step,
            max_staleness=max_staleness,
            num_steps=algorithm.num_steps,
            first_step=start.step,
        )
        self._router = Router(list(parts.engines))
        self._evaluations: dict[int, Evaluation] = {}
        self._next_evaluation_id = -1
        self._last_evaluated = start.step - 1
        self._last_report = time.monotonic()

    async def run(self, learner: asyncio.Future[None]) -> None:
        """Runs until the last step is reported and ``learner``, the learner group, has ended."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            collectors = [tasks.create_task(self._collect(name)) for name in self._parts.engines]
            watchdog = tasks.create_task(self._watch_progress())
            reports = tasks.create_task(self._follow_reports())
            versions = tasks.create_task(self._follow_versions())
            await learner
            await reports
            await versions
            for task in [*collectors, watchdog]:
                task.cancel()

    async def evaluate(self, version: int) -> dict[str, float]:
        """Greedy completions of all held-out prompts, scored; ``version`` is the oldest policy that may draw them."""
        ids = range(self._next_evaluation_id, self._next_evaluation_id - len(self._held_out_prompts), -1)
        self._next_evaluation_id -= len(self._held_out_prompts)
        evaluation = Evaluation(ids, rewards=self._rewards, correct_at=self._held_out.correct_at)
        self._evaluations |= dict.fromkeys(ids, evaluation)
        requests = [
            self._request(group_id, prompt, version, group_size=1, temperature=0.0)
            for group_id, prompt in zip(ids, self._held_out_prompts, strict=True)
        ]
        self._dispatch(requests)
        return await evaluation.result

    # Admission ----------------------------------------------------------------------------------------------------

    def _start_groups(self) -> None:
        """Fills the capacity with the next prompts."""
        capacity = self._admission.capacity
        if not capacity:
            return
        version = self._admission.version
        admitted: list[Admitted] = []
        requests: list[GroupRequest] = []
        for _ in range(capacity):
            cursor, prompt = self._next_prompt()
            group_id = self._next_group_id
            self._next_group_id += 1
            admitted.append(
                Admitted(group_id=group_id, version=version, epoch=cursor.epoch, position=cursor.position)
            )
            requests.append(self._request(group_id, prompt, version))
        self._admission.admit(capacity)
        place = self._prompts.cursor
        resume = {"epoch": place.epoch, "position": place.position, "next_group_id": self._next_group_id}
        self._parts.replay.admit.remote(admitted, resume)
        self._dispatch(requests)

    def _next_prompt(self) -> tuple[Cursor, Prompt]:
        if self._backlog:
            return self._backlog.popleft()
        cursor = self._prompts.cursor
        return cursor, self._prompts.next()

    def _rewind(self, start: ResumePoint) -> Iterable[tuple[Cursor, Prompt]]:
        """The prompts that were pending when the run stopped; leaves the source at its place behind them."""
        backlog = []
        for cursor in start.pending:
            self._prompts.seek(cursor)
            backlog.append((cursor, self._prompts.next()))
        self._prompts.seek(start.cursor)
        return backlog

    def _request(
        self,
        group_id: int,
        prompt: Prompt,
        version: int,
        *,
        group_size: int | None = None,
        temperature: float | None = None,
    ) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt=prompt,
            group_size=self._algorithm.group_size if group_size is None else group_size,
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature if temperature is None else temperature,
            seed=_group_seed(self._seed, group_id),
            min_version=version,
        )

    def _dispatch(self, requests: Sequence[GroupRequest]) -> None:
        for name, share in self._router.assign(requests).items():
            self._parts.engines[name].submit.remote(share)

    # Groups -------------------------------------------------------------------------------------------------------

    async def _collect(self, name: str) -> None:
        """Takes finished groups from one engine, for ever, and sends them on."""
        engine = self._parts.engines[name]
        while True:
            receipts_call, groups = engine.collect.options(num_returns=2).remote(POLL_S, MAX_GROUPS_PER_COLLECT)
            try:
                receipts = await asyncio.wait_for(_value(receipts_call), POLL_S + self._cluster.step_timeout_s)
            except TimeoutError:
                raise EngineFailed(
                    f"engine {name} has not answered for {self._cluster.step_timeout_s:g} seconds "
                    f"(cluster.step_timeout_s); it works on groups {self._router.groups_of(name)[:8]}"
                ) from None
            except RayTaskError as error:
                raise root_cause(error, f"engine {name} failed") from None
            except RayActorError as error:
                raise EngineFailed(f"engine {name} died: {error}") from None
            if receipts:
                self._tasks.create_task(self._score(groups, receipts))

    async def _score(self, groups: ObjectRef, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            self._router.finish(receipt.group_id)
        group_ids = {index: receipt.group_id for index, receipt in enumerate(receipts)}
        try:
            scores = await asyncio.gather(*(pool.score(groups, group_ids) for pool in self._parts.pools))
            await self._deliver(groups, group_ids, scores)
        except RayTaskError as error:
            raise root_cause(error, "scoring failed") from None

    async def _deliver(
        self, groups: ObjectRef, group_ids: Mapping[int, int], scores: Sequence[Sequence[GroupScores]]
    ) -> None:
        """Hands evaluated groups to their evaluation, the others to the replay actor."""
        evaluated = {group_id for group_id in group_ids.values() if group_id in self._evaluations}
        if evaluated:
            for group in await groups:
                if group.group_id in evaluated:
                    evaluation = self._evaluations.pop(group.group_id)
                    evaluation.add(group, [s for part in scores for s in part if s.group_id == group.group_id])
        training = [index for index, group_id in group_ids.items() if group_id not in evaluated]
        if not training:
            return
        failed: dict[int, str] = await self._parts.replay.add.remote(groups, training, *scores)
        for group_id, reason in failed.items():
            self._reporter.discarded(group_id, reason)
        self._admission.discard(len(failed))
        self._start_groups()

    # Versions and steps -------------------------------------------------------------------------------------------

    async def _follow_versions(self) -> None:
        """Opens the next step as soon as every engine serves its version, and evaluates where it is due."""
        version = self._first_step - 1
        while version < self._num_steps:
            served = await self._wait_served(version)
            version = served.version
            self._reporter.served(served.sync_s)
            self._admission.publish(version)
            if self._evaluation_due(version):
                self._last_evaluated = version
                self._tasks.create_task(self._report_evaluation(version))
            self._start_groups()
        self._admission.extend(1)
        self._start_groups()

    async def _wait_served(self, after: int) -> Served:
        while True:
            try:
                served = await self._parts.weights.wait_served.remote(after, POLL_S)
            except RayTaskError as error:
                raise root_cause(error, "the weights actor failed") from None
            if served is not None:
                return served

    def _evaluation_due(self, version: int) -> bool:
        if not self._held_out_prompts:
            return False
        every = self._held_out.every_steps
        passed = every and version // every > self._last_evaluated // every
        return bool(passed) or version in (self._first_step, self._num_steps)

    async def _report_evaluation(self, version: int) -> None:
        self._reporter.evaluated(version, await self.evaluate(version))

    async def _follow_reports(self) -> None:
        """Reports every trained step, until that of the agreement pass which follows the last one."""
        step = self._first_step - 1
        while step < self._num_steps:
            reports: list[StepReport] = await self._parts.replay.wait_completed.remote(POLL_S)
            for report in reports:
                step = report.step
                self._last_report = time.monotonic()
                if step < self._num_steps:
                    self._reporter.trained(report)
                else:
                    self._reporter.agreed(report)

    async def _watch_progress(self) -> None:
        """Stops a run in which no step ends any more, and says what every part was doing."""
        limit = self._cluster.step_timeout_s
        while time.monotonic() - self._last_report < limit:
            await asyncio.sleep(min(POLL_S, limit))
        raise WaitTimeout(
            f"no step has ended for cluster.step_timeout_s={limit:g} seconds; replay: "
            f"{await self._parts.replay.describe.remote()}; outstanding tokens: {self._router.outstanding}"
        )


def _group_seed(seed: int, group_id: int) -> int:
    """A seed for the group, the same in every run; below 2^31."""
    return int(np.random.SeedSequence([seed, group_id % 2**63]).generate_state(1)[0]) >> 1


async def _value(call: ObjectRef) -> Any:
    return await call


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a run, out of those that followed it; rlpipe's own come first."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=lambda error: not isinstance(error, RunError))
