"""Whatever is damaged in a ledger, every command that reads it ends with a result or with one line and exit code 2."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from ledger_cases import REPLAY, Run, config_tree
from ledger_damage import DAMAGES, change
from replay_cases import open_store

from rlpipe import cli
from rlpipe.common.run_files import LEDGER
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import AuditFailed, ConfigError, RlpipeError
from rlpipe.replay.ledger.restore import RunStart, open_ledger, why_unusable
from rlpipe.simulation.setup import GivenTimes, read_setup, read_times
from rlpipe.simulation.study import study

CONFIG = {**config_tree("/nowhere/policy"), "learner": {"schedule": {"name": "constant"}}}
COMMANDS = (
    ["inspect"],
    ["inspect", "--groups", "--steps", "--events", "--limit", "0", "--json"],
    ["inspect", "--group", "3"],
    ["inspect", "--group", "9", "--json"],
    ["inspect", "--steps", "--events"],
    ["audit"],
)
FIXES = ("use the copy", "put a backup", "choose another", "another output", "permissions", "specify", "resume from")
NO_DAMAGE = ("set --train", "set --sync", "increase --minutes", "its groups are")
"""Answers where values are sound in themselves, but steps or groups are missing, or times are strange."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an interrupted run that has no checkpoint, and one with a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("runs")
    for name, num_checkpointed in (("begun", 0), ("resumable", 2)):
        run = Run(folder / name)
        run.ledger.set(config=CONFIG)
        for step in range(4):
            run.train(step, **{"time/train": 2.0})
            if step + 1 == num_checkpointed:
                (folder / name / "checkpoint").mkdir()
                run.ledger.back_up(folder / name / "checkpoint" / LEDGER)
                run.store.checkpointed(step + 1)
        run.admit(2, 4)
        run.ledger.note("death", "learner", "killed")
        run.ledger.close()
        (folder / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/sync": 0.5}) + "\n")
    return folder


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def command(folder: Path, words: Sequence[str]) -> None:
    arguments = cli.parse_arguments([*words, str(folder)])
    arguments.command(arguments)


def simulate(folder: Path, **given: str) -> None:
    config = Config()
    times = read_times(config, GivenTimes(run=folder, **given), slowdown=1.0)
    study(read_setup(config, times, groups_per_engine=None, slowdown=1.0), seed=0, minutes=1.0, add=1).to_json()


def resume(folder: Path) -> None:
    """Open the ledger as the driver and the replay actor do."""
    checkpoint = folder / "checkpoint"
    step = 2 if checkpoint.exists() else 0
    start = RunStart(
        config=CONFIG, output=folder, step=step, checkpoint=checkpoint if step else None, run_id="feed", num_rows=7
    )
    why_unusable(folder / LEDGER, start)
    ledger, _ = open_ledger(folder / LEDGER, start, keep_steps=2)
    ledger.close()
    store = open_store(folder, num_steps=6, keep_steps=2, replay=REPLAY)
    try:
        store.resume_state([], first_step=step)
        store.batches(step)
    finally:
        store.ledger.close()


def check(folder: Path) -> list[int]:
    """Do all that reads a run's ledger, and return the exit codes, that of resuming last."""
    path = folder / LEDGER
    before = contents(path)
    codes = [exit_code(path, partial(command, folder, words)) for words in COMMANDS]
    codes.append(exit_code(path, partial(simulate, folder, generate="constant:1")))
    codes.append(exit_code(path, partial(simulate, folder, train="constant:1", sync="constant:0")))
    assert contents(path) == before
    return [*codes, exit_code(path, partial(resume, folder))]


def exit_code(path: Path, call: Callable[[], None]) -> int:
    try:
        call()
    except AuditFailed:
        return 3
    except RlpipeError as caught:
        error = caught
    else:
        return 0
    check_line(cli.user_message(error), path)
    assert error.exit_code == 2, error
    return 2


def check_line(text: str, path: Path) -> None:
    """Check that a message is short, and names the ledger and what to do."""
    assert len(text) < 700, text
    if not any(fix in text for fix in NO_DAMAGE):
        assert str(path.parent) in text, text
        assert any(fix in text for fix in FIXES), text


READ, FINDINGS, REFUSED = [0] * 6, [0] * 5 + [3], [2] * 6
"""Exit codes of the commands in ``COMMANDS``, if all succeed, if the audit finds something, or if all are refused."""


@pytest.mark.parametrize(
    ("statement", "codes", "problem"),
    [
        ("UPDATE groups SET reward = 'x' WHERE group_id = 3", REFUSED, "groups.reward is of the wrong type"),
        ("UPDATE groups SET admitted_at = -1e300", REFUSED, "groups.admitted_at is of the wrong type or out of range"),
        ("UPDATE events SET message = NULL", REFUSED, "events.message is of the wrong type"),
        ("UPDATE meta SET value = '99' WHERE key = 'schema'", REFUSED, "schema 99, not 1"),
        ("UPDATE meta SET value = '{' WHERE key = 'config'", REFUSED, "config can't be read: JSONDecodeError"),
        ("UPDATE meta SET value = '{}' WHERE key = 'config'", [0, 0, 2, 2, 0, 2], "config can't be read: KeyError"),
        ("UPDATE meta SET value = '[]' WHERE key = 'config'", REFUSED, "config is of the type list, not dict"),
        ("UPDATE meta SET value = '[1e9, 0]' WHERE key = 'place'", REFUSED, "place is not an epoch and a position"),
        ("ALTER TABLE steps RENAME COLUMN times TO often", REFUSED, "table steps has the columns step, metrics"),
        ("DROP TABLE events", REFUSED, "table events is missing"),
        ("UPDATE steps SET metrics = '[1]'", [0, 2, 0, 0, 2, 0], "the metrics of step 0 can't be read: AttributeError"),
        ("UPDATE payloads SET record = '[' WHERE group_id = 3", [2, 2, 2, 0, 0, 2], "group 3 can't be read"),
        ("UPDATE tokens SET arrays = x'00' WHERE group_id = 3", [0, 0, 2, 0, 0, 2], "group 3 can't be read: error: "),
        ("UPDATE groups SET state = 'LOST' WHERE group_id = 3", FINDINGS, "group 3 is in no state"),
        ("UPDATE groups SET version = NULL WHERE group_id = 3", FINDINGS, "group 3 is in no state, or lacks"),
        ("DELETE FROM tokens WHERE group_id = 3", FINDINGS, "lacks a number or its tokens"),
        ("UPDATE groups SET epoch = -9, step = 9e15 WHERE group_id = 0", FINDINGS, None),
        ("DROP INDEX groups_by_place", READ, None),
    ],
)
def test_each_kind_of_ledger_damage_is_reported(
    runs: Path, tmp_path: Path, statement: str, codes: list[int], problem: str | None
) -> None:
    folder = tmp_path / "begun"
    shutil.copytree(runs / "begun", folder)
    change(folder / LEDGER, statement)
    assert check(folder)[: len(COMMANDS)] == codes
    if problem is None:
        resume(folder)
    else:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            resume(folder)


def test_damage_to_the_values_is_mended_with_the_copy_of_a_checkpoint(runs: Path, tmp_path: Path) -> None:
    for number, statement in enumerate(["UPDATE groups SET state = 'LOST'", "UPDATE steps SET metrics = '['"]):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(runs / "resumable", folder)
        change(folder / LEDGER, statement)
        broken = (folder / LEDGER).read_bytes()
        resume(folder)
        assert (folder / "ledger-1.sqlite").read_bytes() == broken


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("seed", range(250))
def test_a_damaged_ledger_is_refused_or_read(runs: Path, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    shutil.copytree(runs / ("begun", "resumable")[seed % 2], tmp_path / "run")
    DAMAGES[seed // 2 % len(DAMAGES)](tmp_path / "run" / LEDGER, random)
    check(tmp_path / "run")


def test_a_sound_ledger_passes_all(runs: Path, tmp_path: Path) -> None:
    for name in ("begun", "resumable"):
        shutil.copytree(runs / name, tmp_path / name)
        assert check(tmp_path / name) == [0] * 9
