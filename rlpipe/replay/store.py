"""The replay store, which decides which groups are kept and which a step trains, and records it in the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import ReplayConfig
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.replay.assemble import assemble_step, has_signal
from rlpipe.replay.buffer import GroupTicket, ReplayBuffer
from rlpipe.replay.ledger.run_ledger import NO_VARIANCE, GroupState, Ledger, StepGroups
from rlpipe.replay.replay_cache import ReplayCache
from rlpipe.replay.step_queue import StepReport
from rlpipe.scoring.scorer import GroupScores, apply_scores
from rlpipe.types import RolloutGroup, ServedRecord, TrainBatch


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Groups that a call discarded or queued for a reroll."""

    discarded: dict[int, str] = field(default_factory=dict)
    """Reasons for discarding groups, by group id; each discarded group leaves its slot to another."""
    attempts: list[int] = field(default_factory=list)
    """Next attempt numbers, one for each discarded group without reward variance."""
    zero_reward: list[GroupTicket] = field(default_factory=list)
    """Groups whose rewards were all zero; their prompts may be rerolled."""

    def add_discarded(self, group: GroupTicket, reason: str) -> None:
        self.discarded[group.group_id] = reason
        if reason.startswith(NO_VARIANCE):
            self.attempts.append(group.attempt + 1)
        elif group.reroll:  # the prompt whose rewards were all zero is still to be rerolled
            self.zero_reward.append(replace(group, reroll=group.reroll - 1))

    @property
    def failures(self) -> dict[int, str]:
        """Reasons of the discarded groups that could not be sampled or scored, by group id."""
        return {group_id: reason for group_id, reason in self.discarded.items() if not reason.startswith(NO_VARIANCE)}


MIN_FAILURES = 8
"""Groups in a row whose failure stops a run whose steps have fewer."""


class FailuresInARow:
    """Count of the groups that failed since the last one with scores, for a run in which none succeeds any more."""

    def __init__(self, groups_per_step: int) -> None:
        self._limit, self._count = max(groups_per_step, MIN_FAILURES), 0
        self._unsampled = set[int]()
        """Groups that could not be sampled, until they have passed the scorers, which have nothing to score."""

    def sampled(self, outcome: Outcome) -> str | None:
        """Add groups that could not be sampled; return the problem once a step's worth in a row has failed."""
        self._unsampled |= outcome.failures.keys()
        return self._add(outcome.failures)

    def scored(self, outcome: Outcome, group_ids: Sequence[int]) -> str | None:
        """Add those of the groups that could not be scored; return the problem as ``sampled`` does."""
        sampled = {*group_ids} - self._unsampled
        self._unsampled -= {*group_ids}
        if sampled - outcome.failures.keys():
            self._count = 0
        return self._add({group_id: reason for group_id, reason in outcome.failures.items() if group_id in sampled})

    def _add(self, failures: Mapping[int, str]) -> str | None:
        self._count += len(failures)
        if not failures or self._count < self._limit:
            return None
        return f"{self._count} groups in a row failed, the last one with: {[*failures.values()][-1]}"


@dataclass(kw_only=True, slots=True)
class ResumeState:
    """State of the ledger from which a driver starts."""

    cursor: Cursor
    next_group_id: int
    num_slots_taken: int
    """Number of groups that are in the driver's first step or a later one, or can still join one."""
    unfinished: list[tuple[GroupTicket, GroupState]]
    attempts: list[int]
    """Attempt numbers that are still to be made for groups without reward variance."""
    zero_reward: list[GroupTicket]
    last_event: int
    messages: list[str]


class ReplayStore:
    """A run's groups from admission to training; every change is in the ledger before the call returns."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        replay: ReplayConfig,
        rewards: Mapping[str, RewardConfig],
        seed: int,
        num_samples: int = 0,
    ) -> None:
        self.ledger = ledger
        self._algorithm, self._learner, self._replay, self._rewards = algorithm, learner, replay, rewards
        self._seed, self._num_samples = seed, num_samples
        self._buffer = ReplayBuffer(groups_per_step=algorithm.groups_per_step, max_staleness=replay.max_staleness)
        self._weights = {name: reward.weight for name, reward in rewards.items()}
        self._kept = ReplayCache(limit=replay.reuse_groups, policy=algorithm.replay, has_signal=self._has_signal)
        self._generated: dict[int, RolloutGroup] = {}
        self._entries: dict[int, GroupTicket] = {}
        self._samples: dict[int, list[RolloutGroup]] = {}
        self._num_discarded = ledger.counts().get(GroupState.DISCARDED, 0)
        self._num_failed = sum(count for _, count in ledger.failures())
        self._read_back()

    def resume_state(self, messages: list[str], *, first_step: int = 0) -> ResumeState:
        """Return the state from which a driver continues with ``first_step``, and ``messages`` for people."""
        events = self.ledger.events()
        return ResumeState(
            cursor=self.ledger.cursor,
            next_group_id=self.ledger.next_group_id(),
            num_slots_taken=self.ledger.num_slots_taken(first_step),
            unfinished=self.ledger.unfinished(),
            attempts=self.ledger.open_attempts(),
            zero_reward=self._zero_reward(),
            last_event=events[-1].number if events else 0,
            messages=messages,
        )

    # Groups -------------------------------------------------------------------------------------------------------

    def admit(self, groups: Sequence[GroupTicket], cursor: Cursor, skipped: Sequence[SkipRecord] = ()) -> None:
        """Register groups that are about to be generated; ``cursor`` is the prompt source's after them."""
        self.ledger.admit(groups, cursor, skipped)
        self._buffer.admit([group for group in groups if group.group_id not in self._entries])
        self._entries.update((group.group_id, group) for group in groups)

    def generated(self, groups: Sequence[RolloutGroup]) -> Outcome:
        """Keep the tokens of groups until their scores come, and discard groups that could not be sampled."""
        new = [group for group in groups if self._awaits(group.group_id) and group.group_id not in self._generated]
        sampled = [group for group in new if group.failure is None]
        # Only functions of the user's own read columns of groups that may come back from the ledger.
        user_functions = self._algorithm.advantage.path, self._algorithm.replay.path
        self.ledger.generated(sampled, with_columns=any(user_functions))
        self._generated.update((group.group_id, group) for group in sampled)
        outcome = Outcome()
        self._answer_again(outcome, [group.group_id for group in groups], with_tokens=False)
        self._discard(outcome, {group.group_id: group.failure for group in new if group.failure is not None})
        return outcome

    def scored(self, group_ids: Sequence[int], pools: Iterable[Sequence[GroupScores]]) -> Outcome:
        """Combine every pool's scores of generated groups, and discard groups that can't be trained."""
        scores: dict[int, list[GroupScores]] = {}
        for entry in (entry for pool in pools for entry in pool):
            scores.setdefault(entry.group_id, []).append(entry)
        groups = [self._generated.pop(group_id) for group_id in group_ids if group_id in self._generated]
        outcome = Outcome()
        failed: dict[int, str] = {}
        best: dict[int, float] = {}
        for group in groups:
            apply_scores(group, scores.get(group.group_id, []), self._rewards)
            if group.failure is not None:
                failed[group.group_id] = group.failure
                continue
            if self._is_refilled(group):
                attempt = self._entries[group.group_id].attempt + 1
                failed[group.group_id] = f"{NO_VARIANCE} (attempt {attempt})"
                best[group.group_id] = max(_numeric_rewards(group), default=math.nan)
            if self._has_zero_reward(group):
                outcome.zero_reward.append(self._entries[group.group_id])
        kept = [group for group in groups if group.group_id not in failed]
        self.ledger.scored(kept)
        for group in kept:
            self._buffer.add(group)
        self._answer_again(outcome, group_ids, with_tokens=True)
        if repeated := set(group_ids) - {group.group_id for group in groups}:
            outcome.zero_reward += [group for group in self._zero_reward() if group.group_id in repeated]
        self._discard(outcome, failed, best)
        return outcome

    def discard(self, reasons: Mapping[int, str]) -> Outcome:
        """Discard generated groups that can't be scored any more; ``reasons`` are given by group id."""
        outcome = Outcome()
        self._answer_again(outcome, reasons, with_tokens=True)
        self._discard(outcome, {i: reason for i, reason in reasons.items() if self._generated.pop(i, None) is not None})
        return outcome

    def unscored(self, group_ids: Iterable[int]) -> list[RolloutGroup]:
        """Return those of the groups that were generated but not scored yet."""
        return [self._generated[group_id] for group_id in group_ids if group_id in self._generated]

    # Steps --------------------------------------------------------------------------------------------------------

    def batches(self, step: int) -> list[TrainBatch] | None:
        """Return one batch per rank, or None while the step can't be filled; repeated calls give equal batches."""
        assigned = self.ledger.groups_of(step)
        groups = self._take(step) if assigned is None else assigned
        if groups is None:
            return None
        batches = self._assemble(step, groups)
        self._samples[step] = groups.fresh[: self._num_samples]
        if assigned is None:
            self.ledger.assign(step, groups)
            self._kept.keep(groups.fresh)
            for group in groups.fresh:
                del self._entries[group.group_id]
        return batches

    def _take(self, step: int) -> StepGroups | None:
        """Return the groups of a new step in the order in which the ledger will return them, or None."""
        fresh = self._buffer.take(step)
        if fresh is None:
            return None
        replayed: list[RolloutGroup] = []
        if step < self._algorithm.num_steps:  # the groups after the last step are compared with their engine
            replayed = sorted(self._kept.replacements_for(fresh), key=lambda group: group.group_id)
        return StepGroups(fresh=fresh, replayed=replayed)

    def reports(self, after: int) -> list[StepReport]:
        """Return the reports of steps after ``after``, with a few groups of each that is still in memory."""
        reports = self.ledger.reports(after)
        for report in reports:
            report.samples = self._samples.get(report.step, [])
        for step in [step for step in self._samples if step <= after]:
            del self._samples[step]
        return reports

    def checkpointed(self, step: int, weights: ServedRecord | None = None) -> None:
        """Record that the checkpoint after ``step`` steps is complete, and drop tokens that are not needed any more."""
        self.ledger.checkpointed(step, weights)
        self.ledger.drop_tokens(kept=self._kept.ids)

    def describe(self) -> dict[str, int | list[int]]:
        """Return the state in a few numbers, for error messages."""
        pending = self._buffer.pending
        return {
            "scored_groups": self._buffer.num_scored,
            "groups_being_scored": len(self._generated),
            "groups_being_generated": len(pending) - self._buffer.num_scored - len(self._generated),
            "oldest_groups": [group.group_id for group in pending[:4]],
            "discarded_groups": self._num_discarded,
        }

    def _read_back(self) -> None:
        unfinished = self.ledger.unfinished()
        self._entries = {group.group_id: group for group, _ in unfinished}
        self._buffer.admit(list(self._entries.values()))
        by_state = {
            state: [g.group_id for g, group_state in unfinished if group_state is state] for _, state in unfinished
        }
        for group in self.ledger.load(by_state.get(GroupState.SCORED, ())):
            self._buffer.add(group)
        self._generated = {g.group_id: g for g in self.ledger.load(by_state.get(GroupState.GENERATED, ()))}
        if self._replay.reuse_groups:
            self._kept.restore(self.ledger.steps_taken(), self.ledger.load)

    def _answer_again(self, outcome: Outcome, group_ids: Iterable[int], *, with_tokens: bool) -> None:
        """Add to ``outcome`` the groups that a dead process discarded, for calls repeated because its answer was lost.

        ``with_tokens`` selects groups that were discarded after they were generated, else before.
        """
        unknown = [group_id for group_id in group_ids if group_id not in self._entries]
        if not unknown:
            return
        for group, reason in self.ledger.discarded(unknown, with_tokens=with_tokens):
            outcome.add_discarded(group, reason)

    def _awaits(self, group_id: int) -> bool:
        return group_id in self._entries and not self._buffer.holds(group_id)

    def _discard(
        self, outcome: Outcome, reasons: dict[int, str], best_rewards: Mapping[int, float] | None = None
    ) -> None:
        """Discard groups for these reasons, and add them to ``outcome``."""
        if not reasons:
            return
        self.ledger.discard(reasons, best_rewards)
        for group_id, reason in reasons.items():
            self._buffer.discard(group_id)
            outcome.add_discarded(self._entries.pop(group_id), reason)
            self._num_failed += not reason.startswith(NO_VARIANCE)
        self._num_discarded += len(reasons)

    def _is_refilled(self, group: RolloutGroup) -> bool:
        attempt = self._entries[group.group_id].attempt
        return attempt < self._replay.refill_attempts and not self._has_signal(group)

    def _has_signal(self, group: RolloutGroup) -> bool:
        return has_signal(group, self._algorithm, self._weights)

    def _zero_reward(self) -> list[GroupTicket]:
        """Return the ledger's groups whose rewards were all zero and whose prompts have not been rerolled."""
        return [] if self._replay.reroll_after is None else self.ledger.zero_reward(self._replay.reroll_below)

    def _has_zero_reward(self, group: RolloutGroup) -> bool:
        if self._replay.reroll_after is None:
            return False
        rewards = _numeric_rewards(group)
        return bool(rewards) and max(rewards) <= self._replay.reroll_below

    def _assemble(self, step: int, groups: StepGroups) -> list[TrainBatch]:
        batches = assemble_step(
            groups.fresh,
            step=step,
            algorithm=self._algorithm,
            learner=self._learner,
            reward_weights=self._weights,
            seed=self._seed,
            replayed=groups.replayed,
            skip_zero_advantage=self._replay.skip_zero_advantage and step < self._algorithm.num_steps,
        )
        metrics = {
            "groups/failed": float(self._num_failed),
            "groups/discarded": float(self._num_discarded),
            **self._group_metrics(groups.fresh),
        }
        for batch in batches:
            batch.metrics = {**batch.metrics, **metrics}
        return batches

    def _group_metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return how many groups are rerolls, are refills, or were scored while others were generated."""
        attempts, rerolls, generated_at, scored_at = zip(
            *self.ledger.origins(group.group_id for group in groups), strict=True
        )
        return {
            "groups/rerolled": float(sum(reroll > 0 for reroll in rerolls)),
            "groups/refilled": float(sum(attempt > 0 for attempt in attempts)),
            "groups/streamed": float(sum(scored < max(generated_at) for scored in scored_at)),
        }


def _numeric_rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward for rollout in group.sampled if rollout.reward is not None]
