"""Whatever is damaged in a ledger, every command that reads it ends with a result or with one line and exit code 2."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from ledger_cases import REPLAY, Run, config_tree
from ledger_damage import DAMAGES
from replay_cases import open_store

from rlpipe import cli
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import AccountsDiffer, RlpipeError
from rlpipe.replay.ledger.database import NAME
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
UNMEASURED = ("set --train", "increase --minutes")
"""Fixes that ``simulate`` asks for where a ledger is sound, but lacks steps or has strange times."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an interrupted run that has no checkpoint, and one with a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("runs")
    for name, num_checkpointed in (("begun", 0), ("resumable", 2)):
        run = Run(folder / name)
        run.ledger.set(config=CONFIG)
        for step in range(4):
            run.train(step, **{"time/train": 2.0, "time/sync": 0.5})
            if step + 1 == num_checkpointed:
                (folder / name / "checkpoint").mkdir()
                run.ledger.back_up(folder / name / "checkpoint" / NAME)
                run.store.checkpointed(step + 1)
        run.admit(2, 4)
        run.ledger.note("death", "learner", "killed")
        run.ledger.close()
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
    why_unusable(folder / NAME, start)
    ledger, _ = open_ledger(folder / NAME, start, keep_steps=2)
    ledger.close()
    store = open_store(folder, num_steps=6, keep_steps=2, replay=REPLAY)
    try:
        store.resume_state([], first_step=step)
        store.batches(step)
    finally:
        store.ledger.close()


def check(folder: Path) -> list[int]:
    """Do all that reads a run's ledger, and return the exit codes, that of resuming last."""
    path = folder / NAME
    before = contents(path)
    codes = [exit_code(path, partial(command, folder, words)) for words in COMMANDS]
    codes.append(exit_code(path, partial(simulate, folder, generate="constant:1")))
    codes.append(exit_code(path, partial(simulate, folder, train="constant:1", sync="constant:0")))
    assert contents(path) == before
    return [*codes, exit_code(path, partial(resume, folder))]


def exit_code(path: Path, call: Callable[[], None]) -> int:
    try:
        call()
    except AccountsDiffer:
        return 3
    except RlpipeError as caught:
        error = caught
    else:
        return 0
    check_line(cli.describe_error(error), path)
    assert error.exit_code == 2, error
    return 2


def check_line(text: str, path: Path) -> None:
    """Check that a message is short, and names the ledger and what to do."""
    assert len(text) < 700, text
    if not any(fix in text for fix in UNMEASURED):
        assert str(path.parent) in text, text
        assert any(fix in text for fix in FIXES), text


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("seed", range(250))
def test_a_damaged_ledger_is_refused_or_read(runs: Path, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    shutil.copytree(runs / ("begun", "resumable")[seed % 2], tmp_path / "run")
    DAMAGES[seed // 2 % len(DAMAGES)](tmp_path / "run" / NAME, random)
    check(tmp_path / "run")


def test_a_sound_ledger_passes_all(runs: Path, tmp_path: Path) -> None:
    for name in ("begun", "resumable"):
        shutil.copytree(runs / name, tmp_path / name)
        assert check(tmp_path / name) == [0] * 9
