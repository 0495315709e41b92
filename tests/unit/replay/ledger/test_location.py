"""Tests of finding the ledger that a user's argument names."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ledger_cases import Run

from rlpipe.common.run_files import LEDGER
from rlpipe.errors import DataError
from rlpipe.replay.ledger.query import find_ledger, ledger_path, reading


def test_a_run_a_checkpoint_and_a_file_are_found(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(0)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    run.ledger.back_up(checkpoint / LEDGER)
    assert find_ledger(tmp_path / "run") == tmp_path / "run" / LEDGER
    assert find_ledger(checkpoint) == checkpoint / LEDGER
    assert find_ledger(checkpoint / LEDGER) == checkpoint / LEDGER


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return folder


def test_a_ledger_on_another_disk_is_found_by_the_config(tmp_path: Path) -> None:
    run = write_config(tmp_path / "run", f"name: sums\nledger: {{folder: {tmp_path / 'local'}}}\n")
    path = ledger_path(run, "sums", str(tmp_path / "local"))
    assert path == tmp_path / "local" / "sums" / LEDGER
    with pytest.raises(
        DataError, match=rf"{path} \(ledger.folder\) is not on this machine: .*run/checkpoints, which has"
    ):
        find_ledger(run)
    Run(path.parent).ledger.close()
    assert find_ledger(run) == path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("name: a\nalgorithm: {kind: sft}\n", "run is a run with algorithm.kind=sft, which keeps no ledger"),
        ("name: a\n", "run has no ledger.sqlite: specify the output folder"),
        ("name: [\n", "config.yaml can't be read: while parsing"),
        ("algorithm: ppo\n", "config.yaml holds no options"),
        ("ledger:\n", "config.yaml holds no options"),
        ("- a\n", "config.yaml holds no options: it is not the config.yaml of a run"),
    ],
)
def test_a_folder_without_ledger_is_refused(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_ledger(write_config(tmp_path / "run", config))


def test_reading_is_of_one_moment(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0)
    with reading(tmp_path / LEDGER) as ledger:
        before = ledger.counts()
        run.train(1)
        assert ledger.counts() == before
    with reading(tmp_path / LEDGER) as ledger:
        assert ledger.counts() != before


def test_a_finished_run_of_somebody_else_is_read() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = Run(folder)
        run.train(0)
        run.ledger.close()
        folder.chmod(0o555)
        child = os.fork()
        if not child:  # an exception must not propagate into pytest
            code = 1
            with suppress(Exception):
                if os.getuid() == 0:
                    os.setuid(65534)
                with reading(folder / LEDGER) as ledger:
                    code = 0 if ledger.last_step == 0 else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        folder.chmod(0o755)
