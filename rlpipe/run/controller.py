"""The controller of an RL run: admits prompts, follows versions and steps, and stops a run that no longer progresses.

     prompts ──> [admit] ──> rollout actors ──> scoring pools ──> replay actor ──> learner group
     (cursor)       ^         (engines)          (rewards)         (ledger)         (Ray Train)
                    |             ^                                   |                 |
                    |             | every version, digest checked     | reports         |
                    +── version ──+────────── weights actor <─────────+── publish ──────+

A group passes through these files, in this order:

1. ``run/controller.py`` admits it: a prompt, a version, a request (``_start_groups``).
2. ``run/engine_pool.py`` sends the request to the engine with the least work, and again if that engine dies.
3. ``rollout/engine_thread.py`` runs the engine and collects finished groups; ``rollout/vllm/vllm_engine.py`` or
   ``rollout/hf_engine.py`` samples their tokens with the log-probs.
4. ``run/scoring_pools.py`` sends finished groups to scoring processes, while the replay actor records their tokens in
   the ledger (``_generated``).
5. ``scoring/scorer.py`` calls the rewards in one of them.
6. ``replay/store.py`` records the rewards, and buffers the group until a step takes it.
7. ``replay/assemble.py`` computes the advantages of the step's groups, and packs one batch for each learner rank.
8. ``learner/step.py`` trains the step on one rank's batch.

The Ray actors around 3, 5, 6 and 8 are in ``actors/``; ``actors/learner.py`` also publishes the new weights.

Synchronous (``max_staleness=0``) and asynchronous training differ only in the capacity that ``Admission`` grants.
After the last step, the groups of one more step are generated but not trained: engines and learner then hold the same
version, and the learner reports how far their log-probs differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle

from rlpipe.actors.remote import await_remote
from rlpipe.actors.weights import NotLoaded, ServedVersion
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import PromptSource
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.errors import EngineFailed, EnvironmentFailed, RewardFailed, RunError
from rlpipe.replay.buffer import Admission, GroupTicket, Rerolls
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.replay.step_queue import StepReport
from rlpipe.replay.store import FailuresInARow, Outcome, ResumeState
from rlpipe.run.cluster import shares_gpus
from rlpipe.run.engine_pool import EnginePool
from rlpipe.run.evaluation import Evaluator
from rlpipe.run.monitor import POLL_S, RunMonitor, watch_hosts
from rlpipe.run.reporting import Reporter
from rlpipe.run.scoring_pools import GroupIds, ScoringDispatch
from rlpipe.run.workers import Workers
from rlpipe.scoring.scorer import GroupScores
from rlpipe.tracking.part_states import PartState
from rlpipe.tracking.phases import PHASES
from rlpipe.types import GroupRequest, Prompt, RolloutGroup

ROW_CHANGED = "its data row has changed since the group was sampled"


class Controller:
    """Loops of one RL run, on one event loop.

    ``resume_state`` is the state of the ledger, and ``first_step`` the number of steps that are already trained.
    ``num_steps_logged`` is lower if the previous driver was killed before it logged the last of them.
    """

    def __init__(
        self,
        workers: Workers,
        config: Config,
        *,
        replay: ActorHandle,
        weights: ActorHandle,
        prompts: PromptSource,
        evaluator: Evaluator,
        reporter: Reporter,
        resume_state: ResumeState,
        first_step: int,
        num_steps_logged: int | None = None,
    ) -> None:
        self._workers, self._config, self._replay, self._weights = workers, config, replay, weights
        self._algorithm, self._cluster = config.algorithm, config.cluster
        self._sampling, self._seed, self._output = config.rollout.sampling, config.seed, Path(config.output)
        self._evaluate_every, self._last_evaluated = config.data.held_out.every_steps, first_step - 1
        self._prompts, self._evaluator, self._reporter = prompts, evaluator, reporter
        self._first_step, self._num_steps = first_step, config.algorithm.num_steps
        self._resume_state, self._next_group_id = resume_state, resume_state.next_group_id
        self._attempts, self._failures = deque(resume_state.attempts), FailuresInARow(self._algorithm.groups_per_step)
        self._admission = make_admission(config, resume_state, first_step)
        self._rerolls = make_rerolls(config, resume_state)
        self._scoring = ScoringDispatch(
            workers.pools,
            generated=self._generated,
            stored=self._stored,
            scored=self._scored,
            num_generating=lambda: self._pool.num_groups,
            groups_per_step=self._algorithm.groups_per_step,
            streaming=config.replay.streaming,
        )
        self._pool = EnginePool(
            workers.engines,
            cluster=config.cluster,
            start=workers.start_engine,
            load_newest=self._load_newest,
            collected=self._scoring.collected,
            notice=self._notice,
            give_up=self.stop,
            episodes=workers.episodes,
        )
        self._evaluations: list[asyncio.Task[None]] = []
        self._admitting: dict[int, asyncio.Future[None]] = {}
        """Ledger entries that are still being written, by group id."""
        self._stop_reason: RunError | None = None
        self._stopped, self._last_version = asyncio.Event(), asyncio.Event()
        self._admits = False
        """True once all engines and scoring pools have started."""
        self._monitor = RunMonitor(
            "replay",
            replay,
            config.cluster,
            report=self._report,
            show_message=reporter.message,
            first_step=first_step if num_steps_logged is None else num_steps_logged,
            last_event=resume_state.last_event,
        )
        self._ask = self._monitor.ask

    async def run(self, start_learner: Callable[[], Awaitable[None]]) -> None:
        """Run until the last step is reported, all evaluations are done, and the learner group has ended.

        The learner group starts at the same time as engines and scorers. If it may share GPUs with engines, it starts
        after them, because they measure how much memory is free. A run that stops early raises the reason after the
        learner has written a checkpoint.
        """
        for pool in self._workers.pools:  # they were started before there was a controller to tell
            pool.notice = self._notice
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(self._monitor.follow())]
            endless.append(tasks.create_task(watch_hosts(self._reporter.message, self._config)))
            endless.append(tasks.create_task(self._monitor.record_parts(self._output, self._parts)))
            starting = tasks.create_task(self._workers.start(self._cluster.start_timeout_s))
            if shares_gpus(self._config):
                await self._until_started(starting)
            learner = asyncio.ensure_future(start_learner())
            await self._until_started(starting, learner)
            self._admits = True
            self._reporter.admitting()
            watching = [self._monitor.watch(self._pool.describe), self._watch_engines()]
            loops = [self._pool.run(), self._follow_versions(tasks), *watching]
            endless += [tasks.create_task(loop) for loop in loops]
            endless += await self._resume_unfinished(tasks)
            endless.append(tasks.create_task(self._release_learner()))
            await learner
            last = [tasks.create_task(self._until_finished()), tasks.create_task(self._stopped.wait())]
            await asyncio.wait(last, return_when=asyncio.FIRST_COMPLETED)
            for task in [*endless, *last, *self._evaluations]:
                task.cancel()
        if self._stop_reason is not None:
            raise self._stop_reason

    async def _until_finished(self) -> None:
        """Wait until every step is reported and every evaluation is done."""
        await self._monitor.ended.wait()
        await self._last_version.wait()
        await asyncio.gather(*self._evaluations)

    async def _release_learner(self) -> None:
        """Report to the replay actor that nothing is left to score; repeat it, since Ray may restart the actor."""
        await self._until_finished()
        while True:
            await self._ask(self._replay.end_features.remote(), "end feature scoring")
            await asyncio.sleep(POLL_S)

    async def stop(self, reason: RunError) -> None:
        """Stop after the learner's current step, with a checkpoint; ``run`` then raises ``reason``."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._stopped.set()
            when = "after this step, with a checkpoint" if self._admits else "before the first step"
            self._reporter.message(f"stopping {when}: {reason}")
            await self._monitor.stop_learner()

    async def _until_started(self, starting: asyncio.Task[None], *others: asyncio.Future[None]) -> None:
        """Wait for ``starting``; raise as soon as the run is stopped or fails: there is nothing to checkpoint yet."""
        stopped = asyncio.create_task(self._stopped.wait())
        awaited: list[asyncio.Future[Any]] = [starting, stopped, *others]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._stop_reason is not None:
            raise self._stop_reason
        for other in others:
            if other.done():
                await other
        await starting

    # Admission ----------------------------------------------------------------------------------------------------

    async def _resume_unfinished(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Continue with the groups that belonged to no step when the last driver died.

        Groups that are already generated are scored, by the tasks that it returns; the others are generated.
        """
        requests: list[GroupRequest] = []
        generated: dict[int, Prompt] = {}
        for group, state in self._resume_state.unfinished:
            if state is GroupState.SCORED:
                continue
            prompt = self._prompt_at(group)
            if state is GroupState.ADMITTED:
                requests.append(self._request(group.group_id, prompt, group.version))
            else:
                generated[group.group_id] = prompt
        self._prompts.seek(self._resume_state.cursor)
        self._pool.dispatch(requests)
        if not generated:
            return []
        groups = await self._discard_changed(await self._unscored(generated), generated)
        for stored in groups:
            add_columns(stored, generated[stored.group_id])
        return [tasks.create_task(self._scoring.score_stored(groups))]

    async def _unscored(self, group_ids: Iterable[int]) -> list[RolloutGroup]:
        call: Any = self._replay.unscored.remote(list(group_ids))
        groups: list[RolloutGroup] = await self._ask(call, "return the groups without scores")
        return groups

    async def _discard_changed(
        self, groups: Sequence[RolloutGroup], prompts: Mapping[int, Prompt]
    ) -> list[RolloutGroup]:
        """Discard groups whose row of the data is another one now, and return the others; prompts are by group id."""
        changed = {
            group.group_id: ROW_CHANGED for group in groups if not was_sampled_from(group, prompts[group.group_id])
        }
        if changed:
            call: Any = self._replay.discard.remote(changed)
            await self._replace_discarded(await self._ask(call, f"discard {len(changed)} groups"))
        return [group for group in groups if group.group_id not in changed]

    async def _start_groups(self) -> None:
        """Admit groups up to the capacity: first the rerolls that are due, then new prompts."""
        version, capacity = self._admission.version, self._admission.capacity
        if not capacity or self._stop_reason is not None:
            return
        cursor = self._prompts.cursor
        rerolled = self._rerolls.take(version, capacity)
        chosen = [(self._prompt_at(earlier), _cursor(earlier), earlier.reroll + 1) for earlier in rerolled]
        self._prompts.seek(cursor)
        skipped: list[SkipRecord] = []
        while len(chosen) < capacity:
            chosen.append((self._prompts.next(), self._prompts.last, 0))
            skipped += self._prompts.skip_records
        cursor = self._prompts.cursor
        admitted = [
            GroupTicket(
                group_id=group_id,
                version=version,
                epoch=cursor.epoch,
                position=cursor.position,
                prompt_id=prompt.prompt_id,
                attempt=self._attempts.popleft() if self._attempts else 0,
                reroll=reroll,
            )
            for group_id, (prompt, cursor, reroll) in enumerate(chosen, self._next_group_id)
        ]
        requests = [
            self._request(group.group_id, prompt, version) for group, (prompt, *_) in zip(admitted, chosen, strict=True)
        ]
        self._next_group_id += capacity
        self._admission.admit(capacity)
        call: Any = self._replay.admit.remote(admitted, cursor, skipped)
        entry = asyncio.ensure_future(self._ask(call, f"record {capacity} new groups"))
        self._admitting |= dict.fromkeys((group.group_id for group in admitted), entry)
        self._pool.dispatch(requests)
        await entry
        for group in admitted:
            del self._admitting[group.group_id]

    def _prompt_at(self, group: GroupTicket) -> Prompt:
        self._prompts.seek(_cursor(group))
        return self._prompts.next()

    def _request(self, group_id: int, prompt: Prompt, version: int) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt=prompt,
            group_size=self._algorithm.group_size,
            max_tokens=prompt.limit(self._sampling.max_tokens),
            temperature=self._sampling.temperature,
            seed=_group_seed(self._seed, group_id),
            min_version=version,
            with_greedy=self._algorithm.samples_greedy,
        )

    # Groups -------------------------------------------------------------------------------------------------------

    async def _generated(self, groups: ObjectRef, group_ids: GroupIds) -> None:
        training = [index for index, group_id in group_ids.items() if not self._evaluator.owns(group_id)]
        # The ledger entry must come first: actors may reorder calls, and an engine may finish before the entry exists.
        await asyncio.gather(*{self._admitting[i] for i in group_ids.values() if i in self._admitting})
        if len(training) < len(group_ids):
            await self._evaluator.fetch(groups, group_ids, self._cluster.call_timeout_s)
        if training:
            call: Any = self._replay.generated.remote(groups, training)
            outcome = await self._ask(call, f"store {len(training)} generated groups")
            if (problem := self._failures.sampled(outcome)) is not None:
                failed = EnvironmentFailed if self._config.environment.is_used else EngineFailed
                await self.stop(failed(problem))
            await self._replace_discarded(outcome)

    async def _stored(self, requests: Sequence[GroupRequest]) -> list[RolloutGroup]:
        """Return those of the groups that are stored without scores; the machine that sampled them may be lost."""
        prompts = {
            request.group_id: request.prompt for request in requests if not self._evaluator.owns(request.group_id)
        }
        groups = await self._unscored(prompts) if prompts else []
        for group in groups:
            add_columns(group, prompts[group.group_id])
        return [*groups, *await self._evaluator.kept(requests)]

    async def _scored(self, groups: ObjectRef, group_ids: GroupIds, scores: Sequence[Sequence[GroupScores]]) -> None:
        """Pass evaluation groups to their evaluation, and the scores of the other groups to the replay actor."""
        evaluated = {group_id for group_id in group_ids.values() if self._evaluator.owns(group_id)}
        if evaluated:
            self._evaluator.scored(evaluated, scores)
            self._monitor.evaluated()
        training = [group_id for group_id in group_ids.values() if group_id not in evaluated]
        if training:
            call: Any = self._replay.scored.remote(training, *scores)
            outcome = await self._ask(call, f"store the scores of {len(training)} groups")
            if (problem := self._failures.scored(outcome, training)) is not None:
                await self.stop(RewardFailed(problem))
            await self._replace_discarded(outcome)

    async def _replace_discarded(self, outcome: Outcome) -> None:
        """Replace discarded groups by new ones, and queue prompts whose rewards were all zero for a reroll."""
        for group_id, reason in outcome.discarded.items():
            self._reporter.discarded(group_id, reason)
        self._attempts.extend(outcome.attempts)
        for group in outcome.zero_reward:
            self._rerolls.add(group)
        self._admission.discard(len(outcome.discarded))
        await self._start_groups()

    # Versions and steps -------------------------------------------------------------------------------------------

    async def _follow_versions(self, tasks: asyncio.TaskGroup) -> None:
        """Open further steps whenever the engines serve a new version, and start the evaluations that are due."""
        number, version = 0, self._first_step - 1
        while True:
            served: ServedVersion | None = await await_remote(
                self._weights.wait_served.remote(number, POLL_S),
                "the weights actor to report the version that is served",
                within=POLL_S + self._cluster.call_timeout_s,
                option="cluster.call_timeout_s",
            )
            if served is None:
                continue
            number = served.number
            self._take_served(served)
            if served.version <= version:  # the learner has restarted from a checkpoint
                continue
            version = served.version
            self._reporter.served(served.sync_s)
            self._admission.publish(version)
            if version == self._num_steps:
                self._admission.extend(1)
            if self._evaluation_due(version):
                self._last_evaluated = version
                self._evaluations.append(tasks.create_task(self._evaluate(version)))
            await self._start_groups()
            if version == self._num_steps:
                self._last_version.set()

    def _take_served(self, served: ServedVersion) -> None:
        self._pool.published(served.version)
        for name, failure in served.lost.items():
            self._pool.failed(name, failure)
        for name in served.engines:
            self._pool.loaded(name, served.version)
        self._pool.fail_all_but(served.version)

    async def _load_newest(self, name: str) -> int | NotLoaded:
        call: Any = self._weights.load_newest.remote(name)
        limit, options = self._cluster.start_timeout_s + 2 * self._config.weights.timeout_s, "cluster.start_timeout_s"
        if self._config.weights.transport == "nccl":  # the learner sends again after its step
            limit += self._config.weights.every_steps * self._cluster.step_timeout_s
            options += ", cluster.step_timeout_s"
        version: int | NotLoaded = await await_remote(
            call, f"engine {name} to load the newest weights", within=limit, option=f"{options} and weights.timeout_s"
        )
        return version

    def _evaluation_due(self, version: int) -> bool:
        if not self._evaluator.prompts:
            return False
        every = self._evaluate_every
        is_due = every > 0 and version // every > self._last_evaluated // every
        return is_due or version in (self._first_step, self._num_steps)

    async def _evaluate(self, version: int) -> None:
        requests, result = self._evaluator.start(version)
        if version == self._first_step:
            PHASES.begin("evaluating the initial policy")
        self._pool.dispatch(requests)
        evaluated = await result
        self._reporter.evaluated(version, evaluated.metrics, evaluated.groups)

    def _report(self, report: StepReport) -> None:
        if report.step < self._num_steps:
            report.metrics |= self._prompts.metrics
            self._reporter.trained(report)
        else:
            self._reporter.compared(report)

    def _parts(self) -> list[PartState]:
        return [*self._pool.parts(), *self._scoring.parts()]

    # Watching -----------------------------------------------------------------------------------------------------

    async def _watch_engines(self) -> None:
        limit = self._cluster.max_outage_s
        while True:
            await asyncio.sleep(min(POLL_S, limit / 4))
            if self._pool.outage_s > limit:
                engines = self._pool.describe()
                await self.stop(
                    EngineFailed(f"no engine has served for cluster.max_outage_s={limit:g} seconds: {engines}")
                )

    def _notice(self, subject: str, message: str, kind: str = "engine") -> None:
        """Record an event in the ledger; the run monitor reads it there and shows it in the terminal."""
        self._replay.note.remote(kind, subject, message)


def _cursor(group: GroupTicket) -> Cursor:
    return Cursor(epoch=group.epoch, position=group.position)


def was_sampled_from(group: RolloutGroup, prompt: Prompt) -> bool:
    """Return whether a group was sampled from ``prompt``; an environment writes its own, from the same row."""
    if any(rollout.episode is not None for rollout in group):
        return group.prompt.prompt_id == prompt.prompt_id
    return np.array_equal(group.prompt.token_ids, prompt.token_ids)


def add_columns(group: RolloutGroup, prompt: Prompt) -> None:
    """Add the row's columns to a group that may come from the ledger, which does not record them."""
    if any(rollout.episode is not None for rollout in group):  # its prompt comes from the environment
        prompt = replace(prompt, prompt=group.prompt.prompt)
    group.prompt = prompt
    group.rollouts = [replace(rollout, task=prompt.task) for rollout in group]


def _group_seed(seed: int, group_id: int) -> int:
    """Return the seed of a group, below 2^31; it depends only on the run's seed and the group id."""
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1)[0]) >> 1


def make_admission(config: Config, resume_state: ResumeState, first_step: int) -> Admission:
    """Return an ``Admission`` with the config's staleness bound that counts the groups admitted already."""
    return Admission(
        groups_per_step=config.algorithm.groups_per_step,
        max_staleness=config.replay.max_staleness,
        num_steps=config.algorithm.num_steps,
        first_step=first_step,
        num_waiting=resume_state.num_slots_taken,
    )


def make_rerolls(config: Config, resume_state: ResumeState) -> Rerolls:
    """Return the queue of prompts to reroll, filled with those in the ledger."""
    rerolls = Rerolls(
        first_version=round((config.replay.reroll_after or 0) * config.algorithm.num_steps),
        per_step=config.replay.rerolls_per_step,
    )
    for group in resume_state.zero_reward:
        rerolls.add(group)
    return rerolls
