"""Tests that the ledger keeps every state, returns groups unchanged, and explains what is wrong with its file."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_cases import admit, admitted, bring, group, open_store, score

from rlpipe.common.run_files import LEDGER
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.errors import LedgerError
from rlpipe.replay.ledger.query import damage
from rlpipe.replay.ledger.run_ledger import COMPARED, GroupState, Ledger, StepGroups
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import PlacedImage, RolloutGroup, RolloutStatus


def states(ledger: Ledger) -> dict[int, str]:
    return dict(ledger.rows("SELECT group_id, state FROM groups"))


def same(one: RolloutGroup, other: RolloutGroup) -> bool:
    arrays = ("token_ids", "loss_mask", "logprobs", "policy_versions")
    plain = ("group_id", "sample_index", "prompt_id", "rewards", "reward", "status", "finish_reason")
    return all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for a, b in zip(one, other, strict=True)
        for name in arrays
    ) and all(getattr(a, name) == getattr(b, name) for a, b in zip(one, other, strict=True) for name in plain)


def test_a_group_is_given_back_as_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    original = group(3, [0.5, None, 1.0], lengths=[1, 4, 2], version=7)
    original.rollouts[1].status, original.rollouts[1].finish_reason = RolloutStatus.TRUNCATED, "length"
    original.logged, original.engine, original.generate_s, original.score_s = {"words": 2.5}, "rollout-1", 0.25, 0.5
    ledger.admit([admitted(3)], Cursor())
    ledger.generated([original])
    ledger.scored([original])
    (restored,) = Ledger(tmp_path / LEDGER).load([3])
    assert same(original, restored)
    assert (restored.logged, restored.engine, restored.score_s) == ({"words": 2.5}, "rollout-1", 0.5)
    assert restored.prompt.prompt == original.prompt.prompt
    assert restored.prompt.token_ids.tolist() == original.prompt.token_ids.tolist()


def test_chat_prompts_come_back_as_messages(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    original = group(0, [1.0])
    object.__setattr__(original.prompt, "prompt", [{"role": "user", "content": "2+2 = »?«"}])
    ledger.admit([admitted(0)], Cursor())
    ledger.generated([original])
    (restored,) = ledger.load([0])
    assert restored.prompt.is_chat
    assert restored.prompt.prompt == [{"role": "user", "content": "2+2 = »?«"}]


def test_images_come_back_with_their_places(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    images = tuple(
        PlacedImage(start=place, num_tokens=place + 1, content=content)
        for place, content in enumerate([b"\x89PNG", b"", b"\xff\x00"])
    )
    original = group(0, [1.0, 0.0])
    object.__setattr__(original.prompt, "images", images)
    ledger.admit([admitted(0)], Cursor())
    ledger.generated([original])
    (restored,) = ledger.load([0])
    assert [restored.prompt.images, *(rollout.images for rollout in restored)] == [images] * 3


def test_a_group_goes_through_its_states(tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / LEDGER), group(0, [1.0, 0.0])
    ledger.admit([admitted(0)], Cursor(0, 1))
    assert states(ledger) == {0: "ADMITTED"}
    ledger.generated([one])
    assert states(ledger) == {0: "GENERATED"}
    ledger.scored([one])
    assert states(ledger) == {0: "SCORED"}
    assert ledger.rows("SELECT reward, reward_std, best_reward FROM groups") == [(0.5, 0.5, 1.0)]
    ledger.assign(0, StepGroups(fresh=[one]))
    assert states(ledger) == {0: "ASSIGNED"}
    ledger.complete(StepReport(step=0, metrics={"loss": 1.0}))
    assert states(ledger) == {0: "ASSIGNED"}, "only a checkpoint makes it sure"
    ledger.checkpointed(1)
    assert states(ledger) == {0: "TRAINED"}
    assert (ledger.checkpoint_step, ledger.last_step, ledger.cursor) == (1, 0, Cursor(0, 1))


def test_calls_can_be_repeated(tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / LEDGER), group(0, [1.0, 0.0])
    for _ in range(2):
        ledger.admit([admitted(0)], Cursor(0, 1))
    for _ in range(2):
        ledger.generated([one])
    for _ in range(2):
        ledger.scored([one])
    ledger.generated([group(0, [0.0, 0.0])])
    assert states(ledger) == {0: "SCORED"}, "a late repetition takes nothing back"
    assert ledger.rows("SELECT reward FROM groups") == [(0.5,)]
    for _ in range(2):
        ledger.assign(0, StepGroups(fresh=[one]))
    for _ in range(2):
        ledger.assign(1, StepGroups(fresh=[], replayed=[one]))
    assert ledger.rows("SELECT group_id, step FROM replays") == [(0, 1)]
    ledger.discard({0: "too late"})
    assert states(ledger) == {0: "ASSIGNED"}, "what a step has taken is not discarded"


def test_a_step_gives_back_what_it_took(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1, 2, 3)
    assert store.ledger.groups_of(0) is None
    for group_id in (2, 0, 1, 3):
        bring(store, group_id, [1.0, 0.0])
    store.batches(0)
    again = Ledger(tmp_path / LEDGER).groups_of(0)
    assert again is not None
    assert [g.group_id for g in again.fresh] == [0, 1]
    assert [r.advantages is not None for r in again.fresh[0]] == [True, True]


def test_tokens_of_steps_long_before_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path, groups_per_step=1, max_staleness=0, keep_steps=1)
    for step in range(3):
        admit(store, step, version=step)
        bring(store, step, [1.0, 0.0], version=step)
        store.batches(step)
    store.checkpointed(3)
    assert [g.group_id for g in store.ledger.load([0, 1, 2])] == [2]
    assert store.ledger.rows("SELECT group_id FROM tokens") == [(2,)], "dropped tokens still take room"
    assert states(store.ledger) == {0: "TRAINED", 1: "TRAINED", 2: "TRAINED"}
    with pytest.raises(LedgerError, match=r"step 0 must be trained again.*ledger.keep_steps, now 1"):
        store.ledger.groups_of(0)


def test_released_groups_leave_no_tokens(tmp_path: Path) -> None:
    store = open_store(tmp_path, groups_per_step=1, max_staleness=0)
    for step in range(2):
        admit(store, step, version=step)
        bring(store, step, [1.0, 0.0], version=step)
    store.batches(0)
    store.ledger.release(1, "another config")
    assert states(store.ledger) == {0: "ASSIGNED", 1: "DISCARDED"}
    assert store.ledger.rows("SELECT group_id FROM tokens") == [(0,)]


def test_what_is_only_compared_counts_as_discarded_and_can_be_asked_for_again(tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / LEDGER), group(0, [1.0, 0.0])
    ledger.admit([admitted(0)], Cursor())
    ledger.generated([one])
    ledger.scored([one])
    ledger.assign(5, StepGroups(fresh=[one]))
    ledger.complete(StepReport(step=5, metrics={}, last=True))
    assert ledger.rows("SELECT state, reason FROM groups") == [("DISCARDED", COMPARED)]
    assert ledger.num_slots_taken(5) == 1
    assert ledger.groups_of(5) is not None
    ledger.begin_again(5, num_steps=5)
    assert (ledger.groups_of(5) is not None, ledger.last_step) == (True, -1)
    ledger.begin_again(5, num_steps=8)
    assert (ledger.groups_of(5), ledger.num_slots_taken(5)) == (None, 0), "a longer run trains step 5 on others"
    assert not ledger.failures()


def test_what_was_only_compared_takes_no_slot_of_a_shorter_run(tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / LEDGER), group(0, [1.0, 0.0])
    ledger.admit([admitted(0)], Cursor())
    ledger.generated([one])
    ledger.scored([one])
    ledger.assign(5, StepGroups(fresh=[one]))
    ledger.complete(StepReport(step=5, metrics={}, last=True))
    ledger.begin_again(2, num_steps=4)  # the checkpoints after the second step could not be written
    assert ledger.num_slots_taken(2) == 0


def test_reports_and_events_are_followed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    for step in range(3):
        ledger.complete(StepReport(step=step, metrics={"loss": float(step)}, last=step == 2))
    assert [(r.step, r.metrics["loss"], r.last) for r in ledger.reports(0)] == [(1, 1.0, False), (2, 2.0, True)]
    ledger.complete(StepReport(step=1, metrics={"loss": 9.0}))
    assert ledger.rows("SELECT times FROM steps ORDER BY step") == [(1,), (2,), (1,)]
    ledger.note("death", "learner", "killed")
    ledger.note("death", "replay", "killed too")
    assert [(e.number, e.subject) for e in ledger.events(1)] == [(2, "replay")]


def test_a_late_repetition_does_not_move_the_source_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    for group_id, place in ((0, Cursor(0, 1)), (1, Cursor(1, 0)), (0, Cursor(0, 1))):
        ledger.admit([admitted(group_id)], place)
    assert ledger.cursor == Cursor(1, 0)


def test_a_report_that_comes_twice_is_one_training(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    times = "SELECT times FROM steps"
    for _ in range(2):
        ledger.complete(StepReport(step=0, metrics={"loss": 1.0, "time/train": 0.25}))
    assert ledger.rows(times) == [(1,)]
    ledger.complete(StepReport(step=0, metrics={"loss": 1.0, "time/train": 0.26}))
    assert ledger.rows(times) == [(2,)]
    ledger.begin_again(0, num_steps=5)
    ledger.complete(StepReport(step=0, metrics={"loss": 1.0, "time/train": 0.26}))
    assert ledger.rows(times) == [(3,)]


def test_groups_that_stood_in_for_others_in_the_comparison_may_do_so_in_a_longer_run(tmp_path: Path) -> None:
    ledger, one = Ledger(tmp_path / LEDGER), group(1, [1.0, 0.0])
    ledger.admit([admitted(0), admitted(1)], Cursor())
    ledger.assign(0, StepGroups(fresh=[group(0, [1.0, 0.0])]))
    ledger.assign(1, StepGroups(fresh=[one], replayed=[group(0, [1.0, 0.0])]))
    ledger.complete(StepReport(step=1, metrics={}, last=True))
    ledger.begin_again(1, num_steps=1)
    assert ledger.rows("SELECT * FROM replays") == [(0, 1)]
    ledger.begin_again(1, num_steps=2)
    assert ledger.rows("SELECT * FROM replays") == []


def test_skipped_rows_are_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    passed = SkipRecord(at=Cursor(0, 1), prompt_id=17, reason="too_long: 90 tokens")
    for _ in range(2):
        ledger.admit([admitted(0)], Cursor(0, 3), [passed])
    assert ledger.rows("SELECT * FROM skipped") == [(0, 1, 17, "too_long: 90 tokens")]


def test_a_copy_is_whole_while_the_ledger_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1, 2, 3)
    bring(store, 0, [1.0, 0.0])
    store.ledger.back_up(tmp_path / "copy.sqlite")
    bring(store, 1, [1.0, 0.0])
    copy = Ledger(tmp_path / "copy.sqlite", read_only=True)
    assert copy.counts() == {GroupState.SCORED: 1, GroupState.ADMITTED: 3}
    assert damage(tmp_path / "copy.sqlite") is None
    assert not list(tmp_path.glob("copy.sqlite-*")), "a copy is one file"


def test_a_killed_writer_leaves_whole_transactions(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from replay_cases import admit, bring, open_store
store = open_store(Path(sys.argv[1]), groups_per_step=1, max_staleness=0, num_steps=10**6)
for step in range(10**6):
    admit(store, step, version=step)
    bring(store, step, [1.0, 0.0], version=step)
    store.batches(step)
    print(step, flush=True)
"""
    path = os.pathsep.join([str(Path(__file__).parents[3] / "helpers"), *sys.path])
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert writer.stdout is not None
    for _ in range(40):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in writer.stdout.read().split())])
    writer.wait()
    assert damage(tmp_path / LEDGER) is None
    ledger = Ledger(tmp_path / LEDGER)
    steps = [row[0] for row in ledger.rows("SELECT step FROM groups WHERE state = 'ASSIGNED' ORDER BY step")]
    assert steps[: last + 1] == list(range(last + 1)), "what was answered is in the ledger"
    assert sum(ledger.counts().values()) - len(steps) <= 1


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_bytes(b"no database at all" * 500)
    with pytest.raises(LedgerError, match=rf"the ledger {tmp_path / LEDGER} is damaged \(file is not a database\)"):
        Ledger(tmp_path / LEDGER)
    assert damage(tmp_path / LEDGER) == "file is not a database"


def test_a_ledger_without_its_tables_yet_is_said_to_be_empty(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / LEDGER).close()
    with pytest.raises(LedgerError, match="is empty: if its run has just begun, look again, or else start"):
        Ledger(tmp_path / LEDGER, read_only=True)


def test_a_ledger_of_another_schema_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / LEDGER).set(schema=99)
    with pytest.raises(LedgerError, match="schema 99"):
        Ledger(tmp_path / LEDGER)


def test_any_text_can_be_stored(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.admit([admitted(0), admitted(1)], Cursor(0, 2), [SkipRecord(Cursor(0, 1), 1, "a lone \udfff")])
    ledger.generated([group(0, [1.0])])
    ledger.discard({0: "it raised \ud800, and »this«"})
    ledger.note("died", "part \ud800", "message \udc80")
    assert ledger.rows("SELECT reason FROM groups WHERE group_id = 0") == [("it raised \\ud800, and »this«",)]
    assert ledger.rows("SELECT reason FROM skipped") == [("a lone \\udfff",)]
    assert [(event.subject, event.message) for event in ledger.events()] == [("part \\ud800", "message \\udc80")]


def test_groups_without_reward_are_found_by_their_place(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    asked: list[str] = []
    ledger._connection.set_trace_callback(asked.append)
    ledger.zero_reward(0.0)
    ledger._connection.set_trace_callback(None)
    plan = [row[3] for row in ledger.rows(f"EXPLAIN QUERY PLAN {asked[-1]}")]
    found = "SEARCH later USING INDEX groups_by_place (epoch=? AND position=? AND reroll>?)"
    assert any(found in line for line in plan), plan
    ledger._connection.execute("DROP INDEX groups_by_place")
    ledger.close()
    again = Ledger(tmp_path / LEDGER)
    assert again.rows("SELECT 1 FROM sqlite_master WHERE name = 'groups_by_place'"), "an old ledger gets the index"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("place", '"x"'),
        ("place", "[0]"),
        ("place", "[-1, 0]"),
        ("place", '["x", 0]'),
        ("place", "[" * 100_000),
        ("place", None),
        ("checkpoint_step", '"x"'),
        ("checkpoint_step", "-1"),
        ("checkpoint_step", "1.5"),
    ],
)
def test_damaged_values_are_named(tmp_path: Path, key: str, value: str | None) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
    with pytest.raises(LedgerError, match=rf"is damaged \({key} .*: use the copy, ledger.sqlite, in one of"):
        getattr(ledger, "cursor" if key == "place" else key)


def test_a_broken_page_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_staleness=20)
    admit(store, *range(40))
    for group_id in range(40):
        bring(store, group_id, [1.0, 0.0])
    store.ledger.close()
    path = tmp_path / LEDGER
    assert damage(path) is None
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    path.write_bytes(content)
    assert damage(path) is not None


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    bring(store, 0, [1.0, 0.0])
    pages = store.ledger.rows("PRAGMA page_count")[0][0]
    store.ledger.rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match=rf"the ledger {tmp_path / LEDGER} can't be used: database or disk is full"):
        store.admit([admitted(group_id) for group_id in range(2, 4000)], Cursor())
    assert states(Ledger(tmp_path / LEDGER)) == {0: "SCORED", 1: "ADMITTED"}
    store.ledger.rows(f"PRAGMA max_page_count = {pages * 100}")
    bring(store, 1, [1.0, 0.0])
    assert store.batches(0) is not None, "the run could go on once there is room"


def test_readers_see_the_newest_state_and_can_change_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    reader = Ledger(tmp_path / LEDGER, read_only=True)
    admit(store, 0, 1)
    assert reader.counts() == {GroupState.ADMITTED: 2}
    with pytest.raises(LedgerError, match="readonly"):
        reader.note("death", "x", "y")


def test_the_settings_are_plain_json(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.set(config={"seed": 3}, run_id="a")
    assert (ledger.get("config"), ledger.get("nothing")) == ({"seed": 3}, None)
    with sqlite3.connect(tmp_path / LEDGER) as connection:
        assert json.loads(connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0]) == "a"


def test_digests_of_checkpoints_are_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.get("digests") is None
    for step in range(1, 120):
        ledger.checkpointed(step, ("merged", f"full:{step}"))
    ledger.checkpointed(120)
    digests = ledger.get("digests")
    assert list(digests) == [str(step) for step in range(20, 120)]
    assert digests["119"] == ["merged", "full:119"]


def test_differences_of_log_probs_go_with_the_tokens_of_their_group(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    groups = [group(0, [1.0, 0.0]), group(1, [1.0, 0.0])]
    ledger.admit([admitted(0), admitted(1)], Cursor())
    ledger.generated(groups)
    ledger.scored(groups)
    ledger.assign(0, StepGroups(fresh=groups[:1]))
    values = np.array([0.25, np.nan, -1e-5], np.float16)
    report = StepReport(step=0, metrics={}, differences={0: values, 1: values})
    for _ in range(2):
        ledger.complete(report)
        found = ledger.differences(0)
        assert found is not None
        np.testing.assert_array_equal(found, values.astype(np.float32))
    assert ledger.differences(1) is None, "it is of another step, which replays it"
    ledger.checkpointed(1)
    ledger.drop_tokens()
    ledger.complete(report)
    assert ledger.differences(0) is None


def test_a_ledger_of_an_earlier_version_has_no_differences_until_a_run_continues(tmp_path: Path) -> None:
    Ledger(tmp_path / LEDGER).set(run_id="a")
    with sqlite3.connect(tmp_path / LEDGER) as connection:
        connection.execute("DROP TABLE differences")
    assert damage(tmp_path / LEDGER) is None
    assert Ledger(tmp_path / LEDGER, read_only=True).differences(0) is None
    assert Ledger(tmp_path / LEDGER).rows("SELECT count(*) FROM differences") == [(0,)]


OWN_ADVANTAGES = """
import numpy as np


def by_level(rewards, inputs):
    return [np.full(len(own), group.prompt.task["level"]) for own, group in zip(rewards, inputs.groups, strict=True)]
"""


def test_functions_of_ones_own_get_the_rows_columns_after_a_restart_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_ADVANTAGES)
    own = f"{tmp_path / 'own.py'}:by_level"
    store = open_store(tmp_path, advantage=own)
    admit(store, 0, 1)
    for group_id in (0, 1):
        made = group(group_id, [1.0, 0.0], scored=False)
        columns = {"level": 3.0 + group_id, "tags": ["a"], "unstorable": open_store}
        made.prompt = replace(made.prompt, task=columns)
        made.rollouts = [replace(rollout, task=columns) for rollout in made]
        store.generated([made])
    for restarted in (False, True):
        store = open_store(tmp_path, advantage=own) if restarted else store
        for group_id in (0, 1):
            score(store, group_id, [1.0, 0.0])
        batches = store.batches(0)
        assert batches is not None
        (micro,) = batches[0].mini_batches[0].micro_batches
        assert {*micro.advantages[micro.loss_mask].tolist()} == {3.0, 4.0}
    (found, _) = store.ledger.load([0, 1])
    assert found.prompt.task == found.rollouts[0].task == {"level": 3.0, "tags": ["a"]}
