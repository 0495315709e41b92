"""Tests that the accounts of correct runs add up, and that every check notices the errors that it is for."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from ledger_cases import NUM_ROWS, Run, config_tree
from replay_cases import group

from rlpipe.common.run_files import LEDGER
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError
from rlpipe.replay.buffer import GroupTicket
from rlpipe.replay.ledger.audit import CHECKS, MAX_KEPT, Audit, audit
from rlpipe.replay.ledger.query import reading
from rlpipe.replay.ledger.run_ledger import COMPARED, Ledger, StepGroups

CLAIMS = [check.claim for check in CHECKS]


def audited(folder: Path) -> Audit:
    with reading(folder / LEDGER) as ledger:
        return audit(ledger)


def change(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(folder / LEDGER)
    for statement in statements:
        assert connection.execute(statement).rowcount != 0, f"{statement} changes nothing"
    connection.commit()
    connection.close()


def problems(folder: Path) -> dict[str, list[str]]:
    return {finding.claim: finding.contradictions for finding in audited(folder).problems}


def test_a_finished_run_adds_up(tmp_path: Path) -> None:
    Run(tmp_path).train_all()
    sums = audited(tmp_path)
    assert sums.problems == []
    assert [finding.claim for finding in sums.findings] == CLAIMS
    assert (sums.finished, sums.num_steps, sums.checkpoint_step, sums.repeated_steps) == (True, 6, 6, {})
    assert sums.prompts == {"TRAINED": 10, "DISCARDED": 6, "skipped": 3}
    assert sums.rerolled == {"TRAINED": 2}
    assert sums.discarded == {"no reward variance (attempt 1)": 3, COMPARED: 2, "the engine refused it": 1}
    assert sums.skipped == {"too_long": 3}
    assert (sums.replayed, sums.events) == (1, {})
    assert sum(sums.prompts.values()) == 2 * NUM_ROWS + 5, "every place of the epochs is one of these"


def test_a_run_that_continues_adds_up_at_every_moment(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=9)
    assert problems(tmp_path) == {}, "nothing is admitted"
    for step in range(9):
        run.fill(step)
        assert problems(tmp_path) == {}, f"step {step} is assigned"
        run.train(step)
        if step % 3 == 1:
            run.crash()
        if step % 4 == 3:
            run.ledger.back_up(tmp_path / "copy.sqlite")
            with reading(tmp_path / "copy.sqlite") as copy:
                assert audit(copy).problems == []
            run.store.checkpointed(step + 1)
        assert problems(tmp_path) == {}, f"step {step} is trained"
    sums = audited(tmp_path)
    assert not sums.finished
    assert sums.prompts["ADMITTED"] == 1
    assert sums.prompts["ASSIGNED"] >= 1
    assert sums.events == {"death": 3}


def test_steps_that_are_trained_again_count_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(4):
        run.train(step, seed=0.0)
    run.store.checkpointed(2)
    run.crash()
    run.ledger.begin_again(2, num_steps=6)
    assert problems(tmp_path) == {}
    assert audited(tmp_path).num_steps == 2
    run.train_all(first=2)
    sums = audited(tmp_path)
    assert (sums.problems, sums.num_steps, sums.repeated_steps) == ([], 6, {2: 2, 3: 2})


def test_a_longer_run_adds_up(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train_all()
    run.ledger.close()
    longer = Run(tmp_path, num_steps=8)
    longer.ledger.begin_again(6, num_steps=8)
    assert problems(tmp_path) == {}
    longer.train_all(first=6)
    sums = audited(tmp_path)
    assert (sums.problems, sums.num_steps, sums.discarded[COMPARED]) == ([], 8, 4)


def test_steps_before_a_change_of_options_are_checked_with_the_old_ones(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train_all()
    changed = config_tree()
    changed["algorithm"]["groups_per_step"] = 3
    changed["replay"] = {"max_staleness": 0, "refill_attempts": 0, "reuse_groups": 0}
    run.ledger.change_config(changed)
    assert problems(tmp_path) == {}
    changed["data"] = {"path": "others.jsonl"}
    run.ledger.change_config(changed)
    run.ledger.admit([GroupTicket(group_id=90, version=6, epoch=2, position=5, prompt_id=1)], Cursor(2, 6))
    assert list(problems(tmp_path)) == [CLAIMS[-1]], "in other data, prompt 1 is another prompt"


def test_a_prompt_whose_group_failed_is_put_back_with_the_same_number(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train_all()
    columns = "epoch, position, prompt_id, attempt, reroll, version, admitted_at"
    with run.ledger._transaction():
        run.ledger._connection.execute(
            f"INSERT INTO groups (group_id, state, reason, {columns}) SELECT 90, 'DISCARDED', 'it raised', {columns} "
            "FROM groups WHERE group_id = 4"
        )
    assert problems(tmp_path) == {}


def test_a_mix_of_sources_repeats_prompts_and_has_no_epochs(tmp_path: Path) -> None:
    config = config_tree()
    ledger = Ledger(tmp_path / LEDGER)
    ledger.set(run_id="mix", num_rows=None, config={**config, "data": {"source": "mix", "sources": {"a": {}}}})
    groups = [GroupTicket(group_id=i, version=0, epoch=0, position=i, prompt_id=i % 2) for i in range(5)]
    ledger.admit(groups, Cursor(0, 5))
    assert problems(tmp_path) == {}
    ledger.set(config=config)
    assert list(problems(tmp_path)) == [CLAIMS[3]], "of one source, no prompt comes twice in an epoch"
    ledger.close()


ONE = "(SELECT min(group_id) FROM groups WHERE state = 'TRAINED')"
BROKEN = [
    (0, ["DELETE FROM groups WHERE epoch = 0 AND position = 5"], "epoch 0, position 5"),
    (0, ["DELETE FROM skipped WHERE epoch = 1"], "epoch 1, position 3"),
    (0, ["DELETE FROM groups WHERE epoch = 0 AND position > 4"], "epoch 0, position 5-6"),
    (0, ["DELETE FROM groups WHERE epoch = 2", "DELETE FROM skipped WHERE epoch = 2"], "epoch 2, position 0-4"),
    (0, ["UPDATE meta SET value = '[2, 6]' WHERE key = 'place'"], "epoch 2, position 5"),
    (0, ["UPDATE meta SET value = '8' WHERE key = 'num_rows'"], "epoch 0, position 7"),
    (1, ["UPDATE groups SET position = 0 WHERE group_id = 1"], "epoch 0, position 0: group 0, group 1"),
    (1, ["INSERT INTO skipped VALUES (0, 1, 1, 'x')"], "epoch 0, position 1: group 1, a skipped row"),
    (2, ["UPDATE meta SET value = '[2, 4]' WHERE key = 'place'"], "group 17 at epoch 2, position 4"),
    (2, ["UPDATE meta SET value = '[1, 7]' WHERE key = 'place'"], "a skipped row at epoch 2, position 3"),
    (2, ["UPDATE meta SET value = '6' WHERE key = 'num_rows'"], "group 6 at epoch 0, position 6"),
    (3, ["UPDATE groups SET prompt_id = 0 WHERE group_id = 3"], "prompt 0 in epoch 0, positions 0 and 4"),
    (4, ["UPDATE groups SET reroll = 2 WHERE group_id = 4"], "epoch 0, position 2: groups 2, 4"),
    (4, ["UPDATE groups SET prompt_id = 9 WHERE group_id = 4"], "epoch 0, position 2: groups 2, 4"),
    (5, ["UPDATE groups SET state = 'LOST' WHERE group_id = 0"], "group 0 is LOST and in step 0"),
    (5, ["UPDATE groups SET state = NULL WHERE group_id = 1"], "group 1 is in none"),
    (5, ["UPDATE groups SET state = 'SCORED' WHERE group_id = 0"], "group 0 is SCORED and in step 0"),
    (6, ["UPDATE groups SET state = 'ASSIGNED' WHERE group_id = 0"], "group 0 in step 0"),
    (6, ["UPDATE groups SET state = 'ASSIGNED', step = NULL WHERE group_id = 0"], "group 0 in no step"),
    (7, ["UPDATE groups SET trained_at = NULL WHERE group_id = 0"], "group 0 in step 0, without a time"),
    (7, ["UPDATE groups SET step = NULL WHERE group_id = 0"], "group 0 in no step"),
    (7, ["UPDATE meta SET value = '5' WHERE key = 'checkpoint_step'"], "group 13 in step 5"),
    (8, ["UPDATE groups SET reason = NULL WHERE group_id = 1"], "group 1, DISCARDED, without a reason"),
    (8, ["UPDATE groups SET step = 2 WHERE group_id = 10"], "group 10, DISCARDED, in step 2: the engine refused it"),
    (8, ["UPDATE groups SET reason = 'tired' WHERE group_id = 0"], "group 0, TRAINED, in step 0: tired"),
    (9, ["UPDATE groups SET state = 'ASSIGNED' WHERE step = 1", "DELETE FROM payloads"], "group 3, ASSIGNED"),
    (9, ["DELETE FROM payloads", "UPDATE replays SET step = 6"], "group 6, again in step 6"),
    (10, ["UPDATE groups SET step = 1 WHERE group_id = 5"], "step 1: 3 of 2"),
    (10, ["UPDATE groups SET state = 'DISCARDED', step = NULL, reason = 'x' WHERE group_id = 0"], "step 0: 1 of 2"),
    (10, ["INSERT INTO steps VALUES (7, '{}', 1.0, 1, 0)"], "step 7: 0 of 2"),
    (10, ["UPDATE meta SET value = '8' WHERE key = 'checkpoint_step'"], "step 7: 0 of 2"),
    (11, ["UPDATE groups SET version = 0 WHERE group_id = 7"], "group 7 of version 0 in step 3, at most 1 later"),
    (11, ["UPDATE groups SET version = 4 WHERE group_id = 7"], "group 7 of version 4 in step 3, at most 1 later"),
    (
        12,
        ["UPDATE groups SET oldest_version = 1 WHERE group_id = 7"],
        "group 7 of version 2: a token of version 1, step 3",
    ),
    (
        12,
        ["UPDATE groups SET oldest_version = 5 WHERE group_id = 7"],
        "group 7 of version 2: a token of version 5, step 3",
    ),
    (13, ["UPDATE replays SET step = 2 WHERE group_id = 6"], "group 6, TRAINED in step 2, again in step 2"),
    (13, ["INSERT INTO replays VALUES (1, 4)"], "group 1, DISCARDED, again in step 4"),
    (13, ["INSERT INTO replays VALUES (99, 4)"], "group 99, unknown, again in step 4"),
    (13, ["INSERT INTO replays VALUES (0, 5)"], "step 5: 1 groups again, at most 0"),
    (
        13,
        ["UPDATE meta SET value = replace(value, 'reuse_groups\": 2', 'reuse_groups\": 0')"],
        "step 3: 1 groups again",
    ),
    (14, ["UPDATE groups SET attempt = 2 WHERE group_id = 2"], "group 2: attempt 2 of 1"),
    (14, ["UPDATE groups SET attempt = 1 WHERE group_id = 0"], "attempt 1: 4 groups, of which 3 replace another"),
    (15, ["UPDATE groups SET state = 'ADMITTED', reason = NULL WHERE group_id = 10"], "group 10 is ADMITTED"),
    (15, ["UPDATE groups SET state = 'ASSIGNED', reason = NULL WHERE group_id = 17"], "group 17 is ASSIGNED"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("run"))
    run.train_all()
    run.ledger.close()
    return run.ledger.path


@pytest.mark.parametrize(("check", "statements", "contradiction"), BROKEN)
def test_every_check_notices(
    finished: Path, tmp_path: Path, check: int, statements: list[str], contradiction: str
) -> None:
    shutil.copyfile(finished, tmp_path / LEDGER)
    change(tmp_path, *statements)
    assert any(text.startswith(contradiction) for text in problems(tmp_path)[CLAIMS[check]])


def test_no_check_is_left_out() -> None:
    assert {check for check, _, _ in BROKEN} == set(range(len(CHECKS)))


def test_another_combination_of_rewards_decides_itself_which_groups_have_variance(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train_all()
    change(tmp_path, "INSERT INTO replays VALUES (0, 5)")
    config = config_tree()
    config["algorithm"]["combine"] = "normalize_then_sum"
    run.ledger.set(config=config)
    assert problems(tmp_path) == {}


@pytest.mark.slow
def test_a_lost_group_is_found_among_many(tmp_path: Path) -> None:
    num_groups, num_rows = 200_000, 7_000
    ledger = Ledger(tmp_path / LEDGER)
    place = divmod(num_groups - 1, num_rows)
    ledger.set(config=config_tree(), num_rows=num_rows, place=[place[0], place[1] + 1], checkpoint_step=num_groups // 2)
    ledger.close()
    numbers = f"WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n + 1 < {num_groups})"
    columns = "group_id, epoch, position, prompt_id, attempt, reroll, version, state, step, oldest_version, trained_at"
    change(
        tmp_path,
        f"{numbers} INSERT INTO groups ({columns}) SELECT n, n / {num_rows}, n % {num_rows}, n * 37 % {num_rows}, 0, 0,"
        " n / 2, 'TRAINED', n / 2, n / 2, 1.0 FROM n",
    )
    assert problems(tmp_path) == {}
    change(
        tmp_path, "DELETE FROM groups WHERE group_id = 123456", "UPDATE groups SET version = -9 WHERE group_id < 2000"
    )
    findings = {finding.claim: finding for finding in audited(tmp_path).problems}
    assert findings[CLAIMS[0]].contradictions == ["epoch 17, position 4456"]
    assert findings[CLAIMS[10]].contradictions == ["step 61728: 1 of 2"]
    assert (findings[CLAIMS[11]].num_contradictions, len(findings[CLAIMS[11]].contradictions)) == (2000, MAX_KEPT)


def test_a_ledger_of_no_run_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / LEDGER).assign(0, StepGroups(fresh=[group(0, [1.0])]))
    with pytest.raises(DataError, match=r"ledger.sqlite has no config yet: its run has not started"):
        audited(tmp_path)


def test_an_audit_ends_whatever_numbers_the_ledger_names(tmp_path: Path) -> None:
    Run(tmp_path).train_all()
    huge = 10**15
    change(
        tmp_path,
        f"UPDATE meta SET value = '[{huge}, 0]' WHERE key = 'place'",
        f"UPDATE meta SET value = '{huge}' WHERE key = 'checkpoint_step'",
    )
    assert {CLAIMS[0], CLAIMS[10]} <= problems(tmp_path).keys()
    change(tmp_path, "UPDATE meta SET value = '\"x\"' WHERE key = 'place'")
    with pytest.raises(DataError, match="place is of the type str, not list"):
        audited(tmp_path)
