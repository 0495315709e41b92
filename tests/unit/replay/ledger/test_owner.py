"""Each run has a ledger of its own: one that belongs to another output folder is refused, wherever it lies."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from replay_cases import RUN_CONFIG, admit, bring, open_store

from rlpipe.common.run_files import LEDGER, OUTPUT_ID
from rlpipe.errors import ConfigError, LedgerError
from rlpipe.replay.ledger.query import ledger_path
from rlpipe.replay.ledger.restore import RunStart, mark_output, open_ledger
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger


def begin(output: Path, path: Path, **settings: Any) -> Ledger:
    """Begin a run as the driver does: mark its output, then open the ledger."""
    output.mkdir(exist_ok=True)
    mark_output(output)
    ledger, _ = open_ledger(path, RunStart(**{"config": RUN_CONFIG, "output": output, **settings}), keep_steps=10)
    return ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the ledger's path of all runs that have this ``ledger.folder`` and name."""
    return ledger_path(tmp_path / "any", "sums", str(tmp_path / "ledgers"))


def begun(output: Path, path: Path) -> Ledger:
    """Return the ledger of a run that has trained a step."""
    ledger = begin(output, path)
    store = open_store(path.parent)
    admit(store, 0, 1)
    for group_id in range(2):
        bring(store, group_id, [1.0, 0.0])
    store.batches(0)
    store.ledger.close()
    return ledger


def refused(output: Path, path: Path, owner: Path, **settings: Any) -> None:
    before = path.read_bytes()
    message = (
        f"the ledger {path} belongs to the run in {owner}, not to output={output}: choose another name or ledger.folder"
    )
    with pytest.raises(ConfigError, match=message):
        begin(output, path, **settings)
    assert path.read_bytes() == before


def test_a_second_run_does_not_take_over_the_first_ones_groups(tmp_path: Path, path: Path) -> None:
    begun(tmp_path / "one", path).close()
    refused(tmp_path / "two", path, tmp_path / "one")
    assert begin(tmp_path / "one", path).counts() == {GroupState.ASSIGNED: 2}
    assert begin(tmp_path / "two", path.with_name("other.sqlite")).counts() == {}


def test_a_second_run_is_refused_even_if_the_first_ones_output_is_gone(tmp_path: Path, path: Path) -> None:
    begun(tmp_path / "one", path).close()
    shutil.rmtree(tmp_path / "one")
    refused(tmp_path / "two", path, tmp_path / "one")
    refused(tmp_path / "one", path, tmp_path / "one")


def test_a_moved_run_keeps_its_ledger(tmp_path: Path, path: Path) -> None:
    begun(tmp_path / "one", path).close()
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for output in (tmp_path / "moved", tmp_path / "link", tmp_path / "moved"):
        assert begin(output, path).counts() == {GroupState.ASSIGNED: 2}
    refused(tmp_path / "one", path, tmp_path / "moved")


def test_a_copied_run_shares_no_ledger_with_its_original(tmp_path: Path, path: Path) -> None:
    begun(tmp_path / "one", path).close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    refused(tmp_path / "copy", path, tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    assert begin(tmp_path / "copy", path).counts() == {GroupState.ASSIGNED: 2}


def test_a_branch_of_another_run_gets_a_copy_of_its_ledger(tmp_path: Path, path: Path) -> None:
    ledger, checkpoint = begun(tmp_path / "one", path), tmp_path / "one" / "checkpoint"
    checkpoint.mkdir()
    ledger.back_up(checkpoint / LEDGER)
    ledger.checkpointed(1)
    ledger.close()
    resumed = {"step": 1, "checkpoint": checkpoint, "run_id": ledger_run_id(path)}
    refused(tmp_path / "two", path, tmp_path / "one", **resumed)
    refused(tmp_path / "two", path, tmp_path / "one")
    own = path.with_name("own.sqlite")
    assert begin(tmp_path / "two", own, **resumed).counts() == {GroupState.TRAINED: 2}
    refused(tmp_path / "one", own, tmp_path / "two", **resumed)


def ledger_run_id(path: Path) -> str:
    run_id: str = Ledger(path, read_only=True).get("run_id")
    return run_id


def test_a_ledger_in_the_output_is_moved_and_copied_with_it(tmp_path: Path) -> None:
    begun(tmp_path / "one", tmp_path / "one" / LEDGER).close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    (tmp_path / "copy" / OUTPUT_ID).unlink()
    for name in ("one", "copy"):
        assert begin(tmp_path / name, tmp_path / name / LEDGER).counts() == {GroupState.ASSIGNED: 2}


def test_a_ledger_without_owner_belongs_to_the_first_run_that_opens_it(tmp_path: Path, path: Path) -> None:
    ledger = begun(tmp_path / "one", path)
    ledger.set(owner=None)
    ledger.close()
    (tmp_path / "one" / OUTPUT_ID).unlink()
    assert begin(tmp_path / "one", path).counts() == {GroupState.ASSIGNED: 2}
    refused(tmp_path / "two", path, tmp_path / "one")


def test_a_process_that_outlives_its_driver_writes_nothing_more(tmp_path: Path, path: Path) -> None:
    old = begun(tmp_path / "one", path)
    old.note("death", "learner", "killed")
    new = begin(tmp_path / "one", path)
    with pytest.raises(LedgerError, match=f"another process has taken over the ledger {path}; this one has to stop"):
        old.discard({0: "too late"})
    new.note("death", "driver", "killed")
    assert [event.subject for event in new.events()] == ["learner", "driver"]
    assert old.counts() == new.counts() == {GroupState.ASSIGNED: 2}


def test_an_output_keeps_its_id(tmp_path: Path) -> None:
    mark_output(tmp_path)
    known = (tmp_path / OUTPUT_ID).read_text()
    mark_output(tmp_path)
    assert (tmp_path / OUTPUT_ID).read_text() == known
