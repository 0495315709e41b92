"""Tests of the viewer's index of groups, its selections, and what it does with a ledger that changes."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from viewer_cases import ViewerRun, finished_run

from rlpipe.errors import DataError, InputError
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.viewer.group_index import GroupIndex, prompt_key
from rlpipe.viewer.group_query import GroupQuery, count_groups, find_choices, find_page
from rlpipe.viewer.run_folders import distinct_names, find_runs
from rlpipe.viewer.viewed_run import ViewedRun, ViewedRuns

pytestmark = pytest.mark.usefixtures("empty_cache")


def viewed(folder: Path) -> ViewedRun:
    run = ViewedRun(folder, folder.name)
    run.refresh()
    return run


def ids(run: ViewedRun, **query: object) -> list[int]:
    assert run.index is not None
    return find_page(run.index, GroupQuery(**query), 100).group_ids  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> ViewedRun:
    finished_run(tmp_path / "run", reward_of={0: 5.0, 1: -2.0})
    return viewed(tmp_path / "run")


def test_groups_are_selected_by_every_property(run: ViewedRun) -> None:
    assert ids(run, bounds=(("step", 1, 2),)) == [10, 9, 8, 6, 5, 4]
    assert ids(run, bounds=(("reward", 2.0, None),)) == [0]
    assert ids(run, bounds=(("reward", None, -0.5),)) == [1]
    assert ids(run, bounds=(("reward:right", 2.5, None),)) == [0]
    assert ids(run, bounds=(("reward:short", -0.3, -0.2),), state="TRAINED")[:2] == [22, 21]
    assert ids(run, bounds=(("version", 5, None),)) == [23, 22, 21, 20]
    assert ids(run, bounds=(("staleness", 1, None),)) == []
    assert ids(run, state="DISCARDED") == [23, 19, 15, 11, 7, 3]
    assert ids(run, reason="no reward variance", bounds=(("step", None, 3),)) == []
    assert ids(run, status="truncated") == [21, 17, 13, 9, 5, 1]
    lengths = [len(f"It is {2 * n} ☃, says group {n}.".encode()) for n in (0, 1)]
    assert ids(run, bounds=(("length", 0, min(lengths)),)) == []
    assert set(ids(run, text="What is 3 +")) == set()  # discarded groups keep no record
    assert ids(run, text="what is 2 +") == [14, 2]
    assert ids(run, text="2") == [14, 2]
    assert ids(run, text="%") == ids(run, text='" OR "') == ids(run, text="What is _ +") == []


def test_pages_go_through_all_groups_once_in_any_order(run: ViewedRun) -> None:
    assert run.index is not None
    for sort in ("id", "reward", "length", "version", "reward:short", "staleness", "state", "status", "reason"):
        for descending in (True, False):
            found: list[int] = []
            after = None
            while True:
                page = find_page(run.index, GroupQuery(sort=sort, descending=descending, after=after), 5)
                found += page.group_ids
                after = page.after
                if after is None:
                    break
            assert sorted(found) == list(range(24)), (sort, descending)
    assert count_groups(run.index, GroupQuery()) == 24
    assert count_groups(run.index, GroupQuery(text="what is 2 +")) == 2
    assert ids(run, sort="reward")[0] == 0
    assert ids(run, sort="state")[:6] == [23, 19, 15, 11, 7, 3]  # discarded
    by_reward = ids(run, sort="reward", descending=False)
    assert by_reward[0] == 1
    assert ids(run, sort="reward:short", descending=False)[-6:] == [3, 7, 11, 15, 19, 23]  # without a value


def test_groups_are_sorted_by_the_reason_of_discard(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run")
    for reason in ("", ", again", ""):
        going.planted = reason
        going.train(1)
    run = viewed(tmp_path / "run")
    assert ids(run, sort="reason")[:3] == [7, 11, 3]
    assert ids(run, sort="reason", descending=False)[:3] == [3, 11, 7]
    assert ids(run, sort="reason", descending=False)[3:] == [0, 1, 2, 4, 5, 6, 8, 9, 10], "those without a reason"


def test_choices_are_what_the_run_has(run: ViewedRun) -> None:
    assert run.index is not None
    choices = find_choices(run.index)
    assert choices["functions"] == ["right", "short"]
    assert choices["states"] == ["TRAINED", "DISCARDED"]
    assert choices["reasons"] == ["no reward variance"]
    with pytest.raises(InputError, match=r"no property 'nonsense'.*reward:NAME"):
        ids(run, sort="nonsense")
    with pytest.raises(InputError, match="no status 'odd'"):
        ids(run, status="odd")


def test_the_index_follows_a_run_that_continues(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run").train(1)
    run = viewed(tmp_path / "run")
    assert ids(run) == [3, 2, 1, 0]
    assert ids(run, state="ASSIGNED") == [2, 1, 0]
    revision = run.revision
    run.refresh()
    assert run.revision == revision  # nothing has changed
    going.train(1)
    going.ledger.checkpointed(1)
    run.refresh()
    assert run.revision > revision
    assert ids(run, state="TRAINED") == [2, 1, 0]
    assert ids(run, state="ASSIGNED") == [6, 5, 4]
    assert ids(run, text="What is 4") == [4]
    assert run.index is not None
    assert (run.index.num_indexed, run.index.num_groups) == (8, 8)


def test_groups_after_one_that_takes_long_are_read_once_and_a_few_at_a_time(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run")
    late, *others = going.admit()
    going.ledger.generated(others)
    index, counts = GroupIndex(tmp_path / "index.sqlite", tmp_path / "run"), []

    class Watched(Ledger):
        def rows(self, query: str, *values: Any) -> list[Any]:
            found = super().rows(query, *values)
            counts.extend([len(found)] if "record FROM payloads" in query else [])
            return found

    with closing(Watched(tmp_path / "run" / "ledger.sqlite", read_only=True)) as ledger:
        index.update(ledger, (1, 1))
        assert counts == [3]
        going.admitted = []
        going.ledger.scored(others)
        index.update(ledger, (1, 1))
        index.update(ledger, (1, 1))
        assert counts == [3, 3], "those with rewards do not change any more"
        going.step = 1
        going.train(5)
        index.update(ledger, (1, 1))
        assert (max(counts), sum(counts)) == (8, 3 + 3 + 15), "discarded groups have no records"
        going.ledger.generated([late])
        going.ledger.scored([late])
        index.update(ledger, (1, 1))
        assert index.num_indexed == index.num_groups == 24
    with closing(index.connect()) as connection:
        (num_unread,) = connection.execute("SELECT count(*) FROM entries WHERE prompt IS NULL").fetchone()
    assert num_unread == 5, "those that were discarded"


def test_groups_that_a_resumed_run_releases_are_read_again(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run").train(2)
    run = viewed(tmp_path / "run")
    assert ids(run, state="ASSIGNED", bounds=(("step", 0, 0),)) == [2, 1, 0]
    going.ledger.set(incarnation=1)
    going.ledger.release(0, "the run begins again")
    run.refresh()
    assert ids(run, reason="the run begins again") == [6, 5, 4, 2, 1, 0]


def test_a_ledger_that_a_copy_replaces_is_indexed_anew(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=3)
    run = viewed(tmp_path / "run")
    assert len(ids(run)) == 12
    finished_run(tmp_path / "other", num_steps=1)
    (tmp_path / "other" / "ledger.sqlite").replace(tmp_path / "run" / "ledger.sqlite")
    run.refresh()
    assert len(ids(run)) == 4


def test_a_run_in_the_place_of_a_removed_one_is_indexed_anew(tmp_path: Path) -> None:
    """Check a file that got the number of the removed one, as file systems give it again."""
    finished_run(tmp_path / "first", num_steps=1, reward_of={0: 5.0})
    finished_run(tmp_path / "second", num_steps=1, planted=", again")  # in reasons and in the names of functions
    first, second = viewed(tmp_path / "first"), viewed(tmp_path / "second")
    assert first.index is not None
    for run, large, added in ((first, [0], ""), (second, [], ", again"), (first, [0], "")):
        with run.ledger() as ledger:
            first.index.update(ledger, (1, 2, ledger.get("run_id")))
        assert (
            ids(first, bounds=(("reward", 2, None),))
            == ids(first, bounds=((f"reward:right{added}", 2, None),))
            == large
        )
        choices = find_choices(first.index)
        assert (choices["functions"], choices["reasons"]) == (
            [f"right{added}", "short"],
            [f"no reward variance{added}"],
        )
        assert [*first.index.means([1])[1]["functions"]] == [f"right{added}", "short"]


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=1)
    run = viewed(tmp_path / "run")
    assert run.index is not None
    path = run.index.path
    for file in path.parent.iterdir():
        file.write_bytes(b"not a database" * 100)
    assert len(ids(viewed(tmp_path / "run"))) == 4


def test_two_viewers_share_one_index(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run").train(1)
    first, second = viewed(tmp_path / "run"), viewed(tmp_path / "run")
    going.train(1)
    second.refresh()
    first.refresh()
    assert ids(first) == ids(second) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_dropped_groups_are_found_by_their_logged_texts(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run").train(1)
    going.ledger.checkpointed(1)
    going.ledger.drop_tokens()
    rows = [
        {"step": 1, "group_id": 1, "sample_index": place, "prompt": "a logged prompt", "completion": "x",
         "rewards": {"right": place}, "reward": place, "status": "completed", "finish_reason": "stop", "advantage": 0.0}
        for place in (0, 1)
    ]  # fmt: skip
    (tmp_path / "run" / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = viewed(tmp_path / "run")
    assert ids(run, text="logged") == [1]
    assert ids(run, bounds=(("reward:right", 0.5, 0.5),)) == [1]


def test_a_group_at_the_edge_of_two_batches_has_all_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpipe.viewer.group_index.BATCH", 3)
    going = ViewerRun(tmp_path / "run").train(1)
    going.ledger.checkpointed(1)
    going.ledger.drop_tokens()
    rows = [
        {"step": 1, "group_id": group_id, "sample_index": place, "prompt": f"prompt {group_id}", "completion": "x",
         "rewards": {"right": place}, "reward": place, "status": "completed", "finish_reason": "stop", "advantage": 0.0}
        for group_id in (0, 1, 2) for place in (0, 1)
    ]  # fmt: skip
    (tmp_path / "run" / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ids(viewed(tmp_path / "run"), bounds=(("reward:right", 0.5, 0.5),)) == [2, 1, 0]


def test_reading_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=2)
    folder = tmp_path / "run"
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    os.chmod(folder, 0o555)
    try:
        run = viewed(folder)
        run.groups(GroupQuery(), 10)
        run.group(1)
        run.events()
        run.parts()
    finally:
        os.chmod(folder, 0o755)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_killed_run_is_read_with_its_log(tmp_path: Path) -> None:
    """Check that groups which are only in the write-ahead log are seen, and that the log stays as it is."""
    going = ViewerRun(tmp_path / "run").train(2)
    log = tmp_path / "run" / "ledger.sqlite-wal"
    copied = tmp_path / "dead"
    copied.mkdir()
    for file in (tmp_path / "run").iterdir():
        if file.is_file():
            (copied / file.name).write_bytes(file.read_bytes())
    going.ledger.close()
    assert not log.exists()
    size = (copied / "ledger.sqlite-wal").stat().st_size
    assert size > 0
    assert len(ids(viewed(copied))) == 8
    assert (copied / "ledger.sqlite-wal").stat().st_size == size


def test_a_reader_never_blocks_the_run(tmp_path: Path) -> None:
    going = ViewerRun(tmp_path / "run").train(1)
    run = ViewedRun(tmp_path / "run", "run")
    run.refresh()
    with run.ledger() as ledger:
        assert ledger.next_group_id() == 4
        going.train(1)  # would raise if the database were locked
        going.ledger.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        assert ledger.next_group_id() == 8


def test_links_to_runs_are_listed_once_and_links_to_other_folders_are_not_followed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for folder in (runs / "one", tmp_path / "elsewhere" / "two"):
        ViewerRun(folder).end()
    for link, target in {"latest": runs / "one", "linked": tmp_path / "elsewhere" / "two", "round": runs}.items():
        (runs / link).symlink_to(target)
    assert find_runs([runs]) == [runs / "one", runs / "linked"]
    viewed = ViewedRuns([runs / "latest", runs])
    viewed.look()
    assert [run.path for run in viewed] == [runs / "latest", runs / "linked"]


def test_runs_are_found_and_named(tmp_path: Path) -> None:
    for name in ("a/one", "b/one", "c/deep/two"):
        ViewerRun(tmp_path / "runs" / name).end()
    found = find_runs([tmp_path / "runs"])
    assert [path.name for path in found] == ["one", "one", "two"]
    assert distinct_names(found) == ["a/one", "b/one", "deep/two"]
    assert find_runs([found[0], tmp_path / "runs"]) == found
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no run"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_runs_that_begin_later_come_after_those_that_are_known(tmp_path: Path) -> None:
    ViewerRun(tmp_path / "runs" / "a" / "two").end()
    runs = ViewedRuns([tmp_path / "runs"])
    (first,) = runs
    assert first.name == "two"
    ViewerRun(tmp_path / "runs" / "b" / "two").end()
    ViewerRun(tmp_path / "runs" / "a" / "one").end()
    runs.look()
    assert runs[0] is first
    assert [run.name for run in runs] == ["a/two", "a/one", "b/two"]
    ViewerRun(tmp_path / "others" / "three").end()
    both = ViewedRuns([tmp_path / "runs", tmp_path / "others"])
    (tmp_path / "runs").rename(tmp_path / "gone")
    ViewerRun(tmp_path / "others" / "four").end()
    both.look()
    assert [run.name for run in both] == ["a/one", "a/two", "b/two", "others/three", "others/four"]


def test_prompts_have_the_same_key_in_every_run() -> None:
    assert prompt_key("What?") == prompt_key("What?") != prompt_key("what?")


def test_a_stopped_update_continues_later(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", num_steps=2)
    index = GroupIndex(tmp_path / "index.sqlite", tmp_path / "run")
    with closing(Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True)) as ledger:
        index.update(ledger, (1, 1), lambda: True)
        assert index.num_indexed == 0
        index.update(ledger, (1, 1))
    assert index.num_indexed == index.num_groups == 8
