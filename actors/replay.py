"""Actor that keeps the replay buffer and the run's ledger."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlpipe.actors.step_server import StepServer
from rlpipe.common.imports import enter_folder, import_object
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config, LedgerConfig, ReplayConfig
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.errors import ConfigError, LedgerError, LedgerLost, RunError
from rlpipe.replay.buffer import GroupTicket
from rlpipe.replay.ledger.restore import RunStart, open_ledger
from rlpipe.replay.ledger.run_ledger import Ledger, LedgerEvent
from rlpipe.replay.step_queue import FeatureQueue, StepReport
from rlpipe.replay.store import Outcome, ReplayStore, ResumeState
from rlpipe.scoring.scorer import GroupScores
from rlpipe.scoring.validation import describe_exception
from rlpipe.types import RolloutGroup, ServedRecord, TrainBatch

MAX_WAITING = 16
"""Limit on calls that wait for the hook or run in it; groups beyond it are skipped and counted."""
MAX_SHOWN = 3
"""Number of failures whose reason is shown."""


class HookActor:
    """Process that calls the user's function."""

    def __init__(self, path: str, folder: str) -> None:
        enter_folder(folder)
        self._function = import_object(path, what="hook", error=ConfigError)

    def call(self, groups: Sequence[RolloutGroup]) -> None:
        result = self._function(groups)
        if inspect.iscoroutine(result):
            asyncio.run(result)


class HookFeed:
    """The replay actor's calls of the hook, for one event loop; ``show_message`` gets messages on first failures."""

    def __init__(
        self, hook: ActorHandle, show_message: Callable[[str], None], *, max_waiting: int = MAX_WAITING
    ) -> None:
        self._hook, self._show_message, self._max_waiting = hook, show_message, max_waiting
        self._num_shown = 0
        self._calls: set[asyncio.Task[None]] = set()
        self.num_left_out = 0
        """Groups skipped because too many calls were waiting."""
        self.num_failed = 0
        """Groups on which the hook raised an error or died."""

    def offer(self, groups: Sequence[RolloutGroup]) -> None:
        """Call the hook on ``groups`` without waiting for it; skip and count them if too many calls are waiting."""
        if not groups:
            return
        if len(self._calls) >= self._max_waiting:
            self.num_left_out += len(groups)
            return
        call = asyncio.ensure_future(self._call(groups))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the hook has finished all its calls, or the time is up."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)

    def metrics(self) -> dict[str, float]:
        return {"hook/left_out": float(self.num_left_out), "hook/failed": float(self.num_failed)}

    async def _call(self, groups: Sequence[RolloutGroup]) -> None:
        call: Any = self._hook.call.remote(groups)
        try:
            await call
        except RayError as error:
            self.num_failed += len(groups)
            self._num_shown += 1
            if self._num_shown <= MAX_SHOWN:
                cause = describe_exception(getattr(error, "cause", error))
                self._show_message(f"scoring.on_rollouts_scored failed on {len(groups)} groups: {cause}")


@dataclass(kw_only=True, frozen=True)
class ReplaySetup:
    """Settings of the replay actor for a run; ``path`` is the ledger's."""

    path: Path
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    replay: ReplayConfig
    ledger: LedgerConfig
    rewards: Mapping[str, RewardConfig]
    seed: int
    num_samples: int
    hook: str | None = None
    """Name of the actor that runs the user's hook on scored groups; Ray warns of its handle if actors restart."""

    @classmethod
    def of(cls, config: Config, path: Path, rewards: Mapping[str, RewardConfig]) -> ReplaySetup:
        return cls(
            path=path,
            algorithm=config.algorithm,
            learner=config.learner,
            replay=config.replay,
            ledger=config.ledger,
            rewards=dict(rewards),
            seed=config.seed,
            num_samples=config.tracking.log_completions,
        )


class ReplayActor(StepServer):
    """Ray actor around a ``ReplayStore``."""

    def __init__(self, setup: ReplaySetup) -> None:
        super().__init__(setup.learner)
        self._setup = setup
        self._opened: ReplayStore | None = None
        self._features = FeatureQueue(num_ranks=setup.learner.num_ranks)
        self._hook = HookFeed(ray.get_actor(setup.hook), self._report_hook) if setup.hook is not None else None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._reopen()

    async def start(self, start: RunStart) -> ResumeState:
        """Open the ledger that fits ``start``, and return its state, from which the driver continues."""
        ledger, messages = open_ledger(self._setup.path, start, keep_steps=self._setup.ledger.keep_steps)
        self._opened = self._open_store(ledger)
        self._error = None  # one that died before this call left no ledger, and none was lost
        return self._opened.resume_state(messages, first_step=start.step)

    async def admit(self, groups: Sequence[GroupTicket], place: Cursor, skipped: Sequence[SkipRecord]) -> None:
        """Register groups that are about to be generated; ``place`` is the prompt source's place after them."""
        self._store.admit(groups, place, skipped)

    async def generated(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> Outcome:
        """Keep ``groups[indices]``, and discard those that could not be sampled."""
        outcome = self._store.generated([groups[index] for index in indices])
        if outcome.discarded:
            await self._fill()  # a step may have waited for them
        return outcome

    async def scored(self, group_ids: Sequence[int], *pools: Sequence[GroupScores]) -> Outcome:
        """Take every pool's scores of groups that were generated."""
        groups = [] if self._hook is None else self._store.unscored(group_ids)
        outcome = self._store.scored(group_ids, pools)
        if self._hook is not None:
            self._hook.offer([group for group in groups if group.group_id not in outcome.discarded])
        await self._fill()
        return outcome

    async def score_features(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        """Have the learner's ranks score ``groups[indices]`` by their features."""
        sampled = [groups[index] for index in indices if groups[index].failure is None]
        return await self._features.score(sampled) if sampled else []

    async def features_due(self, timeout_s: float) -> int | None:
        """Return the next scoring job for the ranks as soon as there is one, or None after ``timeout_s``."""
        return await self._features.due(timeout_s)

    async def feature_share(self, job: int, rank: int) -> list[RolloutGroup]:
        return self._features.share(job, rank)

    async def features_scored(self, job: int, rank: int, scores: Sequence[GroupScores]) -> None:
        self._features.answer(job, rank, scores)

    async def end_features(self) -> None:
        """Record that no groups are left for the ranks to score."""
        await self._features.end()

    async def features_ended(self) -> None:
        """Wait until no groups are left for the ranks to score."""
        await self._features.ended()

    async def learner_died(self, cause: str) -> None:
        self._features.begin_again()
        await super().learner_died(cause)

    async def drain_hook(self, timeout_s: float) -> None:
        """Wait until the hook has finished all its calls, or the time is up."""
        if self._hook is not None:
            await self._hook.drain(timeout_s)

    async def discard(self, reasons: Mapping[int, str]) -> Outcome:
        """Discard groups that were generated before the driver restarted, and can't be scored any more."""
        outcome = self._store.discard(reasons)
        await self._fill()
        return outcome

    async def unscored(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        """Return those of the groups that were generated before the driver restarted, and still need scores."""
        return self._store.unscored(group_ids)

    async def back_up(self, target: Path) -> str | None:
        await asyncio.to_thread(self._store.ledger.back_up, target)
        return str(self._store.ledger.get("run_id"))

    async def checkpointed(self, step: int, weights: ServedRecord | None) -> None:
        self._store.checkpointed(step, weights)

    async def describe(self) -> dict[str, Any]:
        return {**self._store.describe(), **await super().describe()}

    def _report_hook(self, message: str) -> None:
        self._keep_event("hook", "hook", message)

    def _count_incarnation(self) -> int:
        incarnation: int = (self._store.ledger.get("incarnation") or 0) + 1
        self._store.ledger.set(incarnation=incarnation)
        return incarnation

    def _batches(self, step: int) -> list[TrainBatch] | None:
        batches = self._store.batches(step)
        if self._hook is not None:
            for batch in batches or ():
                batch.metrics = {**batch.metrics, **self._hook.metrics()}
        return batches

    def _keep_report(self, report: StepReport) -> None:
        self._store.ledger.complete(report)

    def _keep_event(self, kind: str, subject: str, message: str) -> None:
        self._store.ledger.note(kind, subject, message)

    def _reports(self, after: int) -> Sequence[StepReport]:
        return self._store.reports(after)

    def _events(self, after: int) -> Sequence[LedgerEvent]:
        return self._store.ledger.events(after)

    def _last_step(self) -> int:
        return self._store.ledger.last_step

    @property
    def _store(self) -> ReplayStore:
        if self._opened is None:
            raise self._error or RunError("the replay actor has not been started")
        return self._opened

    def _reopen(self) -> None:
        """Continue from the dead process's ledger; keep the error, for all callers, if it is lost or damaged."""
        path = self._setup.path
        if not path.exists():
            self._error = LedgerLost(f"the replay actor was restarted on a machine without {path}")
            return
        try:
            ledger = Ledger(path, keep_steps=self._setup.ledger.keep_steps)
            ledger.take_over()
            ledger.note("death", "replay", "the replay actor died; another one has read the ledger")
            self._opened = self._open_store(ledger)
        except LedgerError as error:
            self._error = error

    def _open_store(self, ledger: Ledger) -> ReplayStore:
        setup = self._setup
        return ReplayStore(
            ledger,
            algorithm=setup.algorithm,
            learner=setup.learner,
            replay=setup.replay,
            rewards=setup.rewards,
            seed=setup.seed,
            num_samples=setup.num_samples,
        )
