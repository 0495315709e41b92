"""Random schedules of a whole run, with deaths of every part, on the real admission, router, fleet, store and ledger.

The rules are actions of a driver, engines and a learner. In any order of them, staleness keeps its bound, no group is
lost or counted twice, nothing waits for what can't come, and the run ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_cases import REWARD, group, open_store

from rlpipe.common.run_files import LEDGER
from rlpipe.configs.schema.root_config import ReplayConfig, WeightsConfig
from rlpipe.data.sources.row_source import Cursor
from rlpipe.replay.buffer import Admission, GroupTicket, Rerolls
from rlpipe.replay.ledger.restore import RunStart, open_ledger
from rlpipe.replay.ledger.run_ledger import NO_VARIANCE, GroupState, Ledger
from rlpipe.replay.step_queue import StepReport
from rlpipe.replay.store import Outcome, ReplayStore
from rlpipe.rollout.routing import EngineState, Fleet, Router
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest

NUM_STEPS = 4
CONFIG: dict[str, Any] = {
    "algorithm": {"num_steps": NUM_STEPS, "groups_per_step": 1},
    "learner": {"schedule": {"name": "constant"}},
    "replay": {"max_staleness": 2},
    "weights": {"every_steps": 1},
}
SILENCE_S, DEATH_S = 10.0, 30.0
SELDOM = st.sampled_from([False] * 7 + [True])


class Schedule(RuleBasedStateMachine):
    """A run with the learner's current ``step``, and the step of its last ``checkpoint``."""

    @initialize(
        max_staleness=st.integers(0, 2),
        groups_per_step=st.integers(1, 3),
        num_engines=st.integers(1, 3),
        refill_attempts=st.integers(0, 2),
        reuse_groups=st.integers(0, 2),
        reroll_after=st.sampled_from([0.0, 0.25, None]),
        rerolls_per_step=st.integers(1, 3),
        every_steps=st.integers(1, 3),
    )
    def begin(
        self,
        max_staleness: int,
        groups_per_step: int,
        num_engines: int,
        refill_attempts: int,
        reuse_groups: int,
        reroll_after: float | None,
        rerolls_per_step: int,
        every_steps: int,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.names = [f"rollout-{index}" for index in range(num_engines)]
        self.max_staleness, self.groups_per_step = max_staleness, groups_per_step
        self.replay = ReplayConfig(
            max_staleness=max_staleness,
            refill_attempts=refill_attempts,
            reuse_groups=reuse_groups,
            reroll_after=reroll_after,
            rerolls_per_step=rerolls_per_step,
        )
        self.weights = WeightsConfig(every_steps=min(every_steps, max_staleness + 1))
        self.now = 0.0
        self.step = self.checkpoint = self.published = 0
        self.num_repeated = 0
        self.store: ReplayStore | None = None
        self.start_driver()

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            self.finish()
        finally:
            self.ledger.close()
            self.folder.cleanup()

    # The driver -------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / LEDGER

    @property
    def ledger(self) -> Ledger:
        assert self.store is not None
        return self.store.ledger

    def start_driver(self) -> None:
        """Start a driver at the start of a run, or after everything but the files on disk was lost."""
        start = RunStart(config=CONFIG)
        if self.store is not None and self.checkpoint:
            folder = Path(self.folder.name)
            start = RunStart(config=CONFIG, step=self.checkpoint, checkpoint=folder, run_id=self.ledger.get("run_id"))
        ledger, messages = open_ledger(self.path, start, keep_steps=10)
        assert not messages
        ledger.close()
        self.open_store()
        assert self.store is not None
        resume_state = self.store.resume_state([], first_step=self.checkpoint)
        self.step = self.checkpoint
        self.position, self.next_id = resume_state.cursor.position, resume_state.next_group_id
        self.attempts = list(resume_state.attempts)
        self.rerolls = Rerolls(
            first_version=round((self.replay.reroll_after or 0) * NUM_STEPS), per_step=self.replay.rerolls_per_step
        )
        for earlier in resume_state.zero_reward:
            self.rerolls.add(earlier)
        self.admission = Admission(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            num_steps=NUM_STEPS,
            first_step=self.step,
            num_waiting=resume_state.num_slots_taken,
        )
        self.fleet = Fleet(self.names, suspect_after_s=SILENCE_S, dead_after_s=DEATH_S, clock=lambda: self.now)
        self.router = Router()
        self.waiting: list[GroupRequest] = []
        self.engines: dict[str, list[GroupRequest]] = {name: [] for name in self.names}
        self.versions = dict.fromkeys(self.names, -1)
        for name in self.names:
            self.fleet.started(name)
        self.unscored = [g.group_id for g, state in resume_state.unfinished if state is GroupState.GENERATED]
        self.dispatch([request(g) for g, state in resume_state.unfinished if state is GroupState.ADMITTED])
        self.publish()

    def open_store(self) -> None:
        if self.store is not None:
            self.store.ledger.close()
        self.store = open_store(
            self.path.parent, groups_per_step=self.groups_per_step, num_steps=NUM_STEPS, replay=self.replay
        )

    def dispatch(self, requests: list[GroupRequest]) -> None:
        if not self.fleet.serving:
            self.waiting += requests
            return
        for name, share in self.router.assign(requests, self.fleet.serving).items():
            self.engines[name] += share

    def start_groups(self) -> None:
        capacity = self.admission.capacity
        if not capacity:
            return
        chosen = [(group.position, group.reroll + 1) for group in self.rerolls.take(self.admission.version, capacity)]
        chosen += [(self.position + index, 0) for index in range(capacity - len(chosen))]
        self.position += sum(reroll == 0 for _, reroll in chosen)
        admitted = [
            GroupTicket(
                group_id=self.next_id + index,
                version=self.admission.version,
                epoch=0,
                position=position,
                prompt_id=position,
                attempt=self.attempts.pop(0) if self.attempts else 0,
                reroll=reroll,
            )
            for index, (position, reroll) in enumerate(chosen)
        ]
        self.next_id += capacity
        self.admission.admit(capacity)
        assert self.store is not None
        self.store.admit(admitted, Cursor(0, self.position))
        self.dispatch([request(group) for group in admitted])

    def settle(self, outcome: Outcome) -> None:
        self.attempts += outcome.attempts
        for earlier in outcome.zero_reward:
            self.rerolls.add(earlier)
        self.admission.discard(len(outcome.discarded))
        self.start_groups()

    def publish(self) -> None:
        """Publish the learner's current version, which live engines load."""
        self.published = self.step
        self.fleet.published(self.step)
        for name in self.names:
            if self.fleet.state(name) is not EngineState.DEAD:
                self.load(name)
        self.admission.publish(self.step)
        self.start_groups()

    def load(self, name: str) -> None:
        self.versions[name] = self.published
        self.fleet.loaded(name, self.published)
        if name in self.fleet.serving:
            self.router.add(name)
            waiting, self.waiting = self.waiting, []
            self.dispatch(waiting)

    def hear(self, name: str, *, finished: bool = False) -> None:
        """Let an engine answer, and send the requests that waited because all engines were suspect."""
        self.fleet.answered(name, finished=finished)
        if self.fleet.serving:
            waiting, self.waiting = self.waiting, []
            self.dispatch(waiting)

    def bury(self, name: str) -> None:
        self.engines[name] = []
        self.dispatch(self.router.remove(name))

    # Engines ----------------------------------------------------------------------------------------------------------

    def ready(self) -> list[tuple[str, GroupRequest]]:
        """Return the requests that engines could finish now."""
        return [
            (name, request)
            for name in self.names
            if self.fleet.state(name) in (EngineState.HEALTHY, EngineState.SUSPECT)
            for request in self.engines[name]
            if request.min_version <= self.versions[name]
        ]

    def finish_group(self, name: str, wanted: GroupRequest, failure: str | None = None, *, dies: bool = False) -> None:
        self.engines[name].remove(wanted)
        self.hear(name, finished=True)
        assert self.router.finish(wanted.group_id)
        done = group(wanted.group_id, [0.0, 0.0], version=self.versions[name], scored=False)
        done.failure = failure
        self.tell(lambda store: store.generated([done]), dies=dies)
        if failure is None:
            self.unscored.append(wanted.group_id)

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), fails=SELDOM, dies=SELDOM)
    def an_engine_finishes_a_group(self, data: st.DataObject, fails: bool, dies: bool) -> None:
        name, wanted = data.draw(st.sampled_from(self.ready()))
        self.finish_group(name, wanted, "refused" if fails else None, dies=dies)

    @precondition(lambda self: self.fleet.serving)
    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.fleet.serving))
        self.fleet.died(name, "killed")
        self.bury(name)

    def dead(self) -> list[str]:
        return [name for name in self.names if self.fleet.state(name) is EngineState.DEAD]

    def revive(self, name: str) -> None:
        self.fleet.restarting(name)
        self.fleet.started(name)
        self.load(name)

    @precondition(lambda self: self.dead())
    @rule(data=st.data())
    def an_engine_comes_back(self, data: st.DataObject) -> None:
        self.revive(data.draw(st.sampled_from(self.dead())))

    @rule(seconds=st.sampled_from([1.0, SILENCE_S, DEATH_S]), data=st.data())
    def time_passes(self, seconds: float, data: st.DataObject) -> None:
        self.now += seconds
        for name in self.names:
            if data.draw(st.booleans()):
                self.hear(name)
        for name in self.fleet.check():
            self.bury(name)

    # Scoring ----------------------------------------------------------------------------------------------------------

    def tell(self, call: Callable[[ReplayStore], Outcome], *, dies: bool) -> None:
        """Call the store; if the replay actor dies before it answers, repeat the call on its successor, as Ray does."""
        assert self.store is not None
        outcome = call(self.store)
        if dies:
            self.open_store()
            outcome = call(self.store)
        self.settle(outcome)

    def give_scores(self, group_id: int, rewards: list[float] | None, *, dies: bool = False) -> None:
        self.unscored.remove(group_id)
        scores = GroupScores(group_id=group_id)
        if rewards is None:
            scores.failures = {REWARD: "it raised"}
        else:
            scores.scores = {REWARD: list(rewards)}
        self.tell(lambda store: store.scored([group_id], [[scores]]), dies=dies)

    @precondition(lambda self: self.unscored)
    @rule(
        data=st.data(),
        rewards=st.sampled_from([[1.0, 0.0]] * 4 + [[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 3 + [None]),
        dies=SELDOM,
    )
    def a_group_is_scored(self, data: st.DataObject, rewards: list[float] | None, dies: bool) -> None:
        self.give_scores(data.draw(st.sampled_from(self.unscored)), rewards, dies=dies)

    # The learner ------------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        assert self.store is not None
        if self.step == NUM_STEPS or self.store.batches(self.step) is None:
            return False
        self.num_repeated += self.step <= self.ledger.last_step
        self.ledger.complete(StepReport(step=self.step, metrics={}))
        self.step += 1
        if self.weights.publishes(self.step, NUM_STEPS):
            self.publish()
        return True

    @rule()
    def the_learner_trains(self) -> None:
        self.train()

    @rule()
    def the_next_step_is_made_ready(self) -> None:
        """Prepare the next step while the learner is in a step."""
        assert self.store is not None
        if self.step < NUM_STEPS and self.store.batches(self.step) is not None:
            self.store.batches(self.step + 1)

    @rule()
    def a_checkpoint_is_written(self) -> None:
        assert self.store is not None
        self.store.checkpointed(self.step)
        self.checkpoint = self.step

    @rule()
    def the_learner_dies(self) -> None:
        self.step = self.checkpoint
        self.publish()

    @rule()
    def the_replay_actor_dies(self) -> None:
        self.open_store()

    @rule()
    def the_driver_dies(self) -> None:
        self.start_driver()

    # What always holds ------------------------------------------------------------------------------------------------

    @invariant()
    def the_bound_of_staleness_holds(self) -> None:
        if hasattr(self, "folder"):
            late = self.ledger.rows(
                "SELECT group_id FROM groups WHERE step IS NOT NULL AND NOT (step - oldest_version BETWEEN 0 AND ?)",
                self.max_staleness,
            )
            assert not late

    @invariant()
    def every_unfinished_group_is_somewhere_once(self) -> None:
        if not hasattr(self, "folder"):
            return
        flying = [request.group_id for share in self.engines.values() for request in share]
        flying += [request.group_id for request in self.waiting]
        unfinished = self.ledger.unfinished()
        known = {state: [g.group_id for g, is_in in unfinished if is_in is state] for state in GroupState}
        assert sorted(flying) == known[GroupState.ADMITTED]
        assert sorted(self.unscored) == known[GroupState.GENERATED]
        assert len(unfinished) <= (self.max_staleness + 1) * self.groups_per_step
        again = self.ledger.rows("SELECT max(n) FROM (SELECT count(*) AS n FROM replays GROUP BY group_id)")
        assert again in ([(None,)], [(1,)])
        counts = self.ledger.rows("SELECT step, count(*) FROM groups WHERE step IS NOT NULL GROUP BY step")
        assert all(count == self.groups_per_step for _, count in counts)
        positions = self.ledger.rows(
            "SELECT count(*), count(DISTINCT position), max(position) FROM groups WHERE reroll = 0"
        )
        assert positions in ([(0, 0, None)], [(self.position, self.position, self.position - 1)])
        not_failed = (
            f"(state != 'DISCARDED' OR reason LIKE '{NO_VARIANCE}%')"  # a prompt whose group failed is rerolled
        )
        assert not self.ledger.rows(
            f"SELECT 1 FROM groups WHERE {not_failed} GROUP BY position, reroll HAVING count(*) > 1"
        )

    @invariant()
    def every_prompt_without_reward_waits_to_be_put_back_once(self) -> None:
        if not hasattr(self, "folder"):
            return
        earned_nothing = [] if self.replay.reroll_after is None else self.ledger.zero_reward(0.0)
        waiting = [(group.position, group.reroll) for group in self.rerolls]
        assert sorted(waiting) == sorted((group.position, group.reroll) for group in earned_nothing)

    @invariant()
    def something_can_happen(self) -> None:
        if not hasattr(self, "folder") or self.step == NUM_STEPS:
            return
        comes = self.ready() or self.unscored or self.dead() or not self.fleet.serving
        assert comes or (self.store is not None and self.store.batches(self.step) is not None), "the run hangs"

    def finish(self) -> None:
        """Check that the run ends if nothing else fails."""
        for _ in range(200):
            for name in self.names:
                self.hear(name)
            for name in self.dead():
                self.revive(name)
            for name, wanted in self.ready():
                self.finish_group(name, wanted, "refused" if wanted.group_id % 5 == 4 else None)
            for group_id in list(self.unscored):
                self.give_scores(group_id, [0.0, 0.0] if group_id % 3 == 0 else [1.0, 0.0])
            self.train()
            self.the_bound_of_staleness_holds()
            self.every_prompt_without_reward_waits_to_be_put_back_once()
            if self.step == NUM_STEPS:
                break
        assert self.step == NUM_STEPS
        assert self.store is not None
        self.store.checkpointed(NUM_STEPS)
        counts = self.ledger.counts()
        assert counts[GroupState.TRAINED] == NUM_STEPS * self.groups_per_step
        assert counts[GroupState.TRAINED] + counts.get(GroupState.DISCARDED, 0) == self.next_id
        assert not self.ledger.rows("SELECT 1 FROM groups WHERE state = 'DISCARDED' AND reason IS NULL")


def request(group_: GroupTicket) -> GroupRequest:
    prompt = group(group_.group_id, []).prompt
    return GroupRequest(
        group_id=group_.group_id,
        prompt=prompt,
        group_size=2,
        max_tokens=3,
        temperature=1.0,
        seed=0,
        min_version=group_.version,
    )
