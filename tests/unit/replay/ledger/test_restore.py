"""The choice of the ledger that a run resumes with; no ledger is ever overwritten."""

import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from disk_cases import largest_file
from replay_cases import RUN_CONFIG, admit, bring, open_store

from rlpipe.common.run_files import LEDGER
from rlpipe.errors import ConfigError, DataError
from rlpipe.replay.ledger.restore import RunStart, open_ledger, why_unusable
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger


def begin(path: Path, **settings: Any) -> tuple[Ledger, list[str]]:
    return open_ledger(path, RunStart(**{"config": RUN_CONFIG, **settings}), keep_steps=10)


def checkpoint(folder: Path, ledger: Ledger, step: int) -> Path:
    """Checkpoint as the learner does: copy the ledger first, and then record the checkpoint in it."""
    path = folder / f"step_{step}"
    path.mkdir()
    ledger.back_up(path / LEDGER)
    ledger.checkpointed(step)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / LEDGER


def started(path: Path) -> Ledger:
    """Return a ledger after one step, with a group that waits."""
    ledger, messages = begin(path)
    assert not messages
    store = open_store(path.parent)
    admit(store, 0, 1, 2)
    for group_id in range(3):
        bring(store, group_id, [1.0, 0.0])
    store.batches(0)
    store.ledger.close()
    return ledger


def test_a_new_run_gets_a_ledger_of_its_own(path: Path, tmp_path: Path) -> None:
    one, _ = begin(path)
    other, _ = begin(tmp_path / "other" / LEDGER)
    assert one.get("run_id") != other.get("run_id")
    assert one.get("config") == RUN_CONFIG


def test_rows_that_were_added_since_the_run_began_are_noticed(path: Path) -> None:
    begin(path, num_rows=10)
    assert begin(path, num_rows=10)[1] == []
    with pytest.raises(DataError, match=f"has 11 rows for training, and had 10 when the run in {path.parent} began"):
        begin(path, num_rows=11)
    assert begin(path, num_rows=11, changes_allowed=True)[1] == []
    assert begin(path, num_rows=11)[1] == []


def test_a_run_without_checkpoint_continues_with_its_ledger(path: Path) -> None:
    run_id = started(path).get("run_id")
    ledger, messages = begin(path)
    assert (ledger.get("run_id"), messages) == (run_id, [])
    assert ledger.counts() == {GroupState.ASSIGNED: 2, GroupState.SCORED: 1}


def test_steps_of_the_checkpoint_are_trained_even_if_the_ledger_had_not_heard(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    begin(path, step=1, checkpoint=tmp_path, run_id=ledger.get("run_id"))
    assert ledger.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 1}


@pytest.mark.parametrize("known", [2, 5])
def test_an_older_checkpoint_brings_its_copy_back(path: Path, tmp_path: Path, known: int) -> None:
    ledger = started(path)
    old = checkpoint(tmp_path, ledger, 1)
    ledger.checkpointed(known)
    restored, (message,) = begin(path, step=1, checkpoint=old, run_id=ledger.get("run_id"))
    assert f"{path} continues to step {known}; it is now {path.with_name('ledger-1.sqlite')}" in message
    assert restored.checkpoint_step == 1
    assert Ledger(path.with_name("ledger-1.sqlite")).checkpoint_step == known, "nothing is overwritten"


def test_a_missing_ledger_comes_from_the_checkpoint(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.close()
    shutil.rmtree(path.parent)
    restored, (message,) = begin(path, step=1, checkpoint=old, run_id=run_id)
    assert f"the one in {old} replaces it" in message
    assert restored.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 1}
    assert [g.group_id for g in restored.load([2])] == [2]


def train(folder: Path, step: int, *group_ids: int) -> None:
    store = open_store(folder)
    admit(store, *group_ids)
    for group_id in group_ids:
        bring(store, group_id, [1.0, 0.0])
    assert store.batches(step)
    store.ledger.close()


def test_a_ledger_that_the_run_left_behind_on_another_host_is_replaced(path: Path, tmp_path: Path) -> None:
    first = started(path)
    run_id, old = first.get("run_id"), checkpoint(tmp_path, first, 1)
    train(path.parent, 1, 3)
    elsewhere = tmp_path / "elsewhere" / LEDGER
    other, _ = begin(elsewhere, step=1, checkpoint=old, run_id=run_id)
    train(elsewhere.parent, 1, 7)
    new = checkpoint(tmp_path, other, 2)
    assert not begin(elsewhere, step=2, checkpoint=new, run_id=run_id)[1]
    restored, (message,) = begin(path, step=2, checkpoint=new, run_id=run_id)
    assert f"{path} was continued elsewhere, from an older checkpoint's copy; it is now" in message
    assert {group.group_id for group in restored.groups_of(1).fresh} == {2, 7}
    assert not begin(path, step=2, checkpoint=new, run_id=run_id)[1], "from here, this host's goes on"


def damage_file(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 3] = b"\xff" * 4096 * 2
    path.write_bytes(content)


def test_a_damaged_ledger_is_set_aside_for_the_copy(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.close()
    damage_file(path)
    broken = path.read_bytes()
    restored, (message,) = begin(path, step=1, checkpoint=old, run_id=run_id)
    assert f"{path} is damaged (" in message
    assert path.with_name("ledger-1.sqlite").read_bytes() == broken
    assert restored.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 1}


def test_a_ledger_that_lost_its_newest_entries_is_set_aside_for_the_copy(path: Path, tmp_path: Path) -> None:
    """Check the state that SQLite leaves if the machine fails before SQLite's log is on disk."""
    ledger, _ = begin(path)
    ledger.close()
    early = path.read_bytes()
    ledger = started(path)
    run_id, new = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.close()
    path.write_bytes(early)
    restored, (message,) = begin(path, step=1, checkpoint=new, run_id=run_id)
    assert f"{path} does not have all of the 1 steps; it is now {path.with_name('ledger-1.sqlite')}" in message
    assert restored.counts() == {GroupState.TRAINED: 2, GroupState.SCORED: 1}
    assert path.with_name("ledger-1.sqlite").read_bytes() == early


def test_the_log_of_a_ledger_goes_aside_with_it(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.note("later", "than", "the copy")
    log = path.with_name(f"{LEDGER}-wal")
    assert log.stat().st_size > 0
    path.unlink()
    restored, (message,) = begin(path, step=1, checkpoint=old, run_id=run_id)
    assert f"{path} is missing; it is now {path.with_name('ledger-1.sqlite')}, and the one in" in message
    assert restored.events() == [], "a log is of no other file than its own"


def test_a_group_that_cannot_be_read_is_damage(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tokens SET arrays = substr(arrays, 1, 40) WHERE group_id = 2")
    restored, (message,) = begin(path, step=1, checkpoint=old, run_id=run_id)
    assert f"{path} is damaged (group 2 can't be read: " in message
    assert [g.group_id for g in restored.load([2])] == [2]


def test_looking_changes_nothing(path: Path) -> None:
    ledger, _ = begin(path)
    ledger.close()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert why_unusable(path, RunStart(config=RUN_CONFIG)) is None
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_a_ledger_that_cannot_be_put_there_leaves_the_old_one(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.checkpointed(5)
    ledger.close()
    with largest_file(1000), pytest.raises(ConfigError, match=f"the ledger {path} can't be written: .*too large"):
        begin(path, step=1, checkpoint=old, run_id=run_id)
    assert [file.name for file in path.parent.iterdir()] == [LEDGER]
    assert Ledger(path).checkpoint_step == 5


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't be written: \S*/file is not a folder; choose another ledger.folder"):
        begin(tmp_path / "file" / "ledgers" / LEDGER)


@pytest.mark.parametrize(("mode", "problem"), [(0o444, "readonly"), (0, "unable to open")])
def test_a_ledger_that_may_not_be_written_is_refused(mode: int, problem: str) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / LEDGER
        started(path).close()
        path.chmod(mode)
        path.parent.chmod(0o777)
        child = os.fork()
        if not child:  # an exception must not propagate into pytest
            code = 1
            with suppress(BaseException):
                if os.getuid() == 0:
                    os.setuid(65534)
                with pytest.raises(ConfigError, match=f"the ledger {path} can't be used: .*{problem}.*permissions"):
                    begin(path)
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_damaged_ledger_without_checkpoint_is_left_alone(path: Path) -> None:
    started(path).close()
    damage_file(path)
    broken = path.read_bytes()
    with pytest.raises(ConfigError, match=r"is damaged \(.*\), and there is no checkpoint to resume from: put a back"):
        begin(path)
    assert path.read_bytes() == broken


def test_a_damaged_copy_is_refused_and_named(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    run_id, old = ledger.get("run_id"), checkpoint(tmp_path, ledger, 1)
    ledger.close()
    shutil.rmtree(path.parent)
    damage_file(old / LEDGER)
    with pytest.raises(ConfigError, match=rf"is missing, and {old / LEDGER} can't replace it: .*; resume"):
        begin(path, step=1, checkpoint=old, run_id=run_id)
    assert not path.exists()


def test_a_ledger_of_another_run_is_refused(path: Path, tmp_path: Path) -> None:
    ledger = started(path)
    with pytest.raises(ConfigError, match=r"belongs to another run .* than .*\(feed\): move one of them away"):
        begin(path, step=1, checkpoint=tmp_path, run_id="feed")
    assert Ledger(path).counts() == ledger.counts()


def test_a_ledger_that_knows_a_lost_checkpoint_is_refused(path: Path) -> None:
    started(path).checkpointed(1)
    with pytest.raises(ConfigError, match="records a checkpoint after 1 steps, but none is next to it"):
        begin(path)


def test_other_options_are_refused_with_the_list(path: Path) -> None:
    started(path)
    other = {**RUN_CONFIG, "seed": 4}
    with pytest.raises(ConfigError, match=r"with other options \(seed: 0 -> 4\): restore them, set resume_changes=all"):
        begin(path, config=other)
    ledger, _ = begin(path, config=other, changes_allowed=True)
    assert ledger.get("config") == other


def test_the_ledger_knows_which_steps_had_other_options(path: Path) -> None:
    started(path)
    other = {**RUN_CONFIG, "seed": 4}
    begin(path, config=other, changes_allowed=True)
    ledger, _ = begin(path, config=other, num_rows=7)
    assert ledger.get("earlier_configs") == [{"steps": 1, "config": RUN_CONFIG}], "step 0 is trained again as it was"
    assert ledger.get("num_rows") == 7


@pytest.mark.parametrize(
    ("section", "option", "value", "reason"),
    [
        ("replay", "max_staleness", 0, "replay.max_staleness was lowered"),
        ("algorithm", "groups_per_step", 4, "algorithm.groups_per_step was changed"),
        ("algorithm", "num_steps", 50, "algorithm.num_steps was changed"),
        ("weights", "every_steps", 4, "weights.every_steps was changed"),
    ],
)
def test_groups_that_do_not_fit_the_steps_to_come_are_discarded(
    path: Path, section: str, option: str, value: int, reason: str
) -> None:
    started(path)
    other = {**RUN_CONFIG, section: {**RUN_CONFIG[section], option: value}}
    ledger, _ = begin(path, config=other, changes_allowed=True)
    assert ledger.counts() == {GroupState.DISCARDED: 3}
    assert ledger.rows("SELECT DISTINCT reason FROM groups") == [(reason,)]
    assert not ledger.failures(), "they could have been sampled and scored"
    assert (ledger.num_slots_taken(0), ledger.groups_of(0)) == (0, None)
    again, _ = begin(path, config=other)
    assert again.counts() == ledger.counts()


@pytest.mark.parametrize(
    ("every", "steps", "new_every", "new_steps", "is_released"),
    [
        (4, 100, 2, 100, False),
        (4, 100, 3, 100, True),
        (3, 100, 2, 100, True),
        (4, 100, 4, 200, False),
        (4, 50, 4, 100, True),
        (1, 50, 1, 100, False),
    ],
)
def test_groups_are_discarded_if_the_version_they_wait_for_is_not_published_any_more(
    path: Path, every: int, steps: int, new_every: int, new_steps: int, is_released: bool
) -> None:
    def config(every_steps: int, num_steps: int) -> dict[str, Any]:
        algorithm = {**RUN_CONFIG["algorithm"], "num_steps": num_steps}
        return {**RUN_CONFIG, "weights": {**RUN_CONFIG["weights"], "every_steps": every_steps}, "algorithm": algorithm}

    begin(path, config=config(every, steps))
    store = open_store(path.parent)
    admit(store, 0)
    store.ledger.close()
    ledger, _ = begin(path, config=config(new_every, new_steps), changes_allowed=True)
    assert ledger.counts() == {GroupState.DISCARDED if is_released else GroupState.ADMITTED: 1}
