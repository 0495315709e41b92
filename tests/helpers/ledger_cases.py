"""Runs without engines and learner: the ledger entries that a controller and a learner would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_cases import group, open_store, score

from rlpipe.configs.schema.root_config import ReplayConfig
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.replay.buffer import GroupTicket, Rerolls
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger
from rlpipe.replay.step_queue import StepReport
from rlpipe.replay.store import Outcome, ReplayStore

NUM_ROWS = 7
SKIPPED_POSITION = 3
REPLAY = ReplayConfig(max_staleness=1, refill_attempts=1, reuse_groups=2, reroll_after=0.2)


def config_tree(model: str = "org/policy", num_steps: int = 6) -> dict[str, Any]:
    """Return the part of a resolved config that the checks and the tokenizer need."""
    return {
        "name": "run",
        "seed": 0,
        "model": {"path": model, "tokenizer": None, "revision": None, "trust_remote_code": False},
        "data": {"path": "rows.jsonl"},
        "algorithm": {"kind": "rl", "num_steps": num_steps, "groups_per_step": 2, "combine": "sum_then_normalize"},
        "replay": {"max_staleness": 1, "refill_attempts": 1, "reuse_groups": 2},
        "weights": {"every_steps": 1},
    }


class Run:
    """A run of ``num_steps`` steps of two groups, over rows of which one in seven can't be used.

    One group in eleven fails. Of every seven, all completions of one have reward 1 and all of another reward 0, so that
    these are replaced once, combined with groups of earlier steps, or re-rolled.
    """

    def __init__(self, folder: Path, *, num_steps: int = 6, model: str = "org/policy") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._num_steps = folder, num_steps
        self._rerolls = Rerolls(first_version=round(REPLAY.reroll_after * num_steps), per_step=1)
        self.store = self._open()
        self._attempts = self.ledger.open_attempts()
        for zero_reward in self.ledger.zero_reward(REPLAY.reroll_below):
            self._rerolls.add(zero_reward)
        self.ledger.set(run_id="feed", num_rows=NUM_ROWS, config=config_tree(model, num_steps))

    @property
    def ledger(self) -> Ledger:
        return self.store.ledger

    def _open(self) -> ReplayStore:
        return open_store(self._folder, num_steps=self._num_steps, keep_steps=2, replay=REPLAY)

    def crash(self) -> None:
        """Let the replay actor die, and another one read the ledger."""
        self.ledger.close()
        self.store = self._open()
        self.ledger.note("death", "replay", "the replay actor died; another one has read the ledger")

    def admit(self, count: int, version: int) -> list[GroupTicket]:
        cursor, passed, groups = self.ledger.cursor, [], []
        next_id = self.ledger.next_group_id()
        for earlier in self._rerolls.take(version, count):
            at = Cursor(earlier.epoch, earlier.position)
            groups.append(self._admitted(next_id + len(groups), version, at, earlier.reroll + 1))
        while len(groups) < count:
            if cursor.position == NUM_ROWS:
                cursor = Cursor(cursor.epoch + 1, 0)
            if cursor.position == SKIPPED_POSITION:
                passed.append(SkipRecord(at=cursor, prompt_id=SKIPPED_POSITION, reason="too_long: 90 tokens"))
            else:
                groups.append(self._admitted(next_id + len(groups), version, cursor, 0))
            cursor = Cursor(cursor.epoch, cursor.position + 1)
        self.store.admit(groups, cursor, passed)
        return groups

    def _admitted(self, group_id: int, version: int, at: Cursor, reroll: int) -> GroupTicket:
        return GroupTicket(
            group_id=group_id,
            version=version,
            epoch=at.epoch,
            position=at.position,
            prompt_id=at.position,
            attempt=self._attempts.pop(0) if self._attempts else 0,
            reroll=reroll,
        )

    def bring(self, entry: GroupTicket) -> Outcome:
        """Generate and score a group."""
        made = group(entry.group_id, [1.0, 0.0], version=entry.version, scored=False)
        made.engine, made.generate_s = "rollout-0", 0.25
        if entry.group_id % 11 == 10:
            made.failure = "the engine refused it"
        outcome = self.store.generated([made])
        if made.failure is None:
            rewards = {1: [1.0, 1.0], 2: [0.0, 0.0]}.get(entry.group_id % 7, [1.0, 0.0])
            outcome = score(self.store, entry.group_id, list(rewards))
        self._attempts += outcome.attempts
        for zero_reward in outcome.zero_reward:
            self._rerolls.add(zero_reward)
        return outcome

    def fill(self, step: int) -> None:
        """Complete groups until the step can be taken, and admit one more; do nothing if the step was taken before."""
        if self.ledger.groups_of(step) is not None:
            return
        while self.store.batches(step) is None:
            unfinished = self.ledger.unfinished()
            admitted = [entry for entry, state in unfinished if state is not GroupState.SCORED]
            for entry in admitted or self.admit(1, step):
                self.bring(entry)
        if step < self._num_steps:
            self.admit(1, step)

    def train(self, step: int, **metrics: float) -> None:
        self.fill(step)
        last = step == self._num_steps
        report = StepReport(step=step, metrics={"loss": 0.5, "reward": 0.25, **metrics}, last=last)
        self.ledger.complete(report)

    def train_all(self, *, first: int = 0, checkpoint_every: int = 2) -> None:
        for step in range(first, self._num_steps + 1):
            self.train(step)
            if step < self._num_steps and (step + 1) % checkpoint_every == 0:
                self.store.checkpointed(step + 1)
