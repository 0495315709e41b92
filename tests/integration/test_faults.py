"""Full disks, damaged files and strange ledgers: a run reports them, overwrites nothing, and goes on if it can."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from run_cases import SIX_STEPS, read_adapter, run_options, trained_steps

from rlpipe import cli
from rlpipe.common.atomic_io import RESERVE
from rlpipe.common.run_files import LEDGER
from rlpipe.learner.checkpoint_files import RECORD, list_checkpoints
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger
from rlpipe.tracking.jsonl import read_rows

pytestmark = pytest.mark.ray
Options = Callable[..., list[str]]


@pytest.fixture
def options(local_ray: None, tiny_policy: Path, prompts_file: Path) -> Options:
    """Return a function that makes the options of a run of six steps in a folder."""
    return lambda output, *more: run_options(tiny_policy, prompts_file, output, *SIX_STEPS, *more)


@pytest.fixture
def finished(undisturbed_run: Path, tmp_path: Path) -> Path:
    """Return a copy of a run of six steps, with checkpoints after 2, 4 and 6."""
    return shutil.copytree(undisturbed_run, tmp_path / "run")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system of a known size can't be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def leave_room(folder: Path, num_bytes: int) -> None:
    """Fill the disk mounted at ``folder``, but no other, until ``num_bytes`` are free."""
    with suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while folder.is_mount() and (free := shutil.disk_usage(folder).free) > num_bytes:
            file.write(bytes(min(free - num_bytes, 2**20)))


def once(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls ``action`` as soon as the condition holds."""

    def watch() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not condition():
            time.sleep(0.01)
        if condition():
            action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def cut(path: Path) -> None:
    """Cut off the second half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def hashes(folder: Path) -> dict[str, str]:
    """Return the hashes of all files except SQLite's index of its log, which readers create anew."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def checkpoint_names(output: Path) -> list[str]:
    return [path.name for path in list_checkpoints(output / "checkpoints")]


def assert_accounts(output: Path, num_steps: int) -> None:
    """Check that each of the four groups of every step is trained, and that nothing is left open."""
    ledger = Ledger(output / LEDGER, read_only=True)
    trained = ledger.rows("SELECT step, count(*) FROM groups WHERE state = 'TRAINED' GROUP BY step")
    assert trained == [(step, 4) for step in range(num_steps)]
    assert ledger.counts().keys() == {GroupState.TRAINED, GroupState.DISCARDED}
    places = ledger.rows("SELECT count(*), count(DISTINCT epoch * 1000000 + position) FROM groups")
    assert places[0][0] == places[0][1], "no prompt was taken twice"
    assert [row["step"] for row in trained_steps(output)] == list(range(1, num_steps + 1))


def assert_same_policy(output: Path, other: Path) -> None:
    mine, theirs = read_adapter(output / "policy"), read_adapter(other / "policy")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def refusal(options: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that is refused, and return its one line on standard error."""
    capsys.readouterr()
    assert cli.main(["train", *options]) == code
    error = capsys.readouterr().err
    (line,) = (line for line in error.splitlines() if line.startswith("rlpipe: error: "))
    assert "Traceback" not in error
    return line


@pytest.mark.slow
def test_a_full_disk(options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "disk", "size=96m") as disk:
        output, filler = disk / "run", disk / "filler"
        first = output / "checkpoints" / "step_000002"

        # No room for a second checkpoint: the run goes on, and reports every attempt.
        filling = once(lambda: (first / RECORD).exists(), lambda: leave_room(disk, RESERVE // 2))
        assert cli.main(["train", *options(output)]) == 0
        filling.join()
        printed = capsys.readouterr().out
        for step in (4, 6):
            assert f"the checkpoint after step {step} can't be written, the last complete one is kept" in printed
        assert "[Errno 28] the disk has " in printed
        events = Ledger(output / LEDGER, read_only=True).events()
        assert [event.message in printed for event in events if event.kind == "checkpoint"] == [True, True]
        assert checkpoint_names(output) == ["step_000002"]
        assert not list((output / "checkpoints").glob(".*")), "nothing half written is left"

        # No room for the ledger: the run ends with a one-line error, and nothing is lost.
        def seventh() -> bool:
            return any(row["step"] == 7 for row in read_rows(output / "metrics.jsonl"))

        filler.unlink()
        filling = once(seventh, lambda: leave_room(disk, 0))
        further = options(output, "algorithm.num_steps=100")
        error = refusal(further, capsys, code=1)
        filling.join()
        assert f"the ledger {output / LEDGER} can't be used: database or disk is full" in error

        # No room at all: nothing is started or changed.
        before = hashes(output)
        assert f"output={output} can't be written ([Errno 28] No space left" in refusal(further, capsys)
        assert hashes(output) == before

        filler.unlink()
        assert cli.main(["train", *options(output, "algorithm.num_steps=10")]) == 0
        assert f"resuming from {output}/checkpoints/step_000006, after step 6" in capsys.readouterr().out
        assert_accounts(output, 10)


@pytest.mark.slow
def test_damaged_checkpoints_are_set_aside_for_the_one_before(
    options: Options, finished: Path, undisturbed_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = finished / "checkpoints"
    largest = max((checkpoints / "step_000006").iterdir(), key=lambda path: path.stat().st_size)
    size = largest.stat().st_size
    cut(largest)
    cut(checkpoints / "step_000004" / RECORD)
    assert cli.main(["train", *options(finished)]) == 0
    printed = capsys.readouterr().out
    assert f"({largest.name} has {size // 2} of {size} bytes); it is now {checkpoints}/step_000006.damaged" in printed
    assert f"(it has no complete {RECORD}); it is now {checkpoints}/step_000004.damaged" in printed
    assert f"{finished / LEDGER} continues to step 6; it is now {finished}/ledger-1.sqlite, and the one in" in printed
    assert f"resuming from {checkpoints}/step_000002, after step 2" in printed
    assert (checkpoints / "step_000006.damaged" / largest.name).stat().st_size == size // 2
    assert_accounts(finished, 6)
    assert_same_policy(finished, undisturbed_run)


def test_without_a_whole_checkpoint_nothing_is_touched(
    options: Options, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (finished / "checkpoints").iterdir():
        (path / RECORD).unlink()
    before = hashes(finished)
    error = refusal(options(finished), capsys)
    assert (
        f"no checkpoint in {finished}/checkpoints is complete (step_000002: it has no complete {RECORD}; step_" in error
    )
    assert hashes(finished) == before


def test_a_damaged_ledger_is_set_aside_and_changed_options_are_refused(
    options: Options, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ledger(finished / LEDGER).close()  # merges its log into the file
    content = bytearray((finished / LEDGER).read_bytes())
    content[4096 * 2 : 4096 * 3] = b"\xff" * 4096
    (finished / LEDGER).write_bytes(content)
    before = hashes(finished)
    changed = options(finished, "algorithm.num_steps=8", "learner.optimizer.lr=0.5", "seed=3")
    error = refusal(changed, capsys)
    assert "(seed: 0 -> 3; learner.optimizer.lr: 0.01 -> 0.5): set them back, or resume_changes=allow" in error
    assert hashes(finished) == before

    assert cli.main(["train", *changed, "resume_changes=allow"]) == 0
    assert f"{finished / LEDGER} is damaged (" in capsys.readouterr().out
    assert (finished / "ledger-1.sqlite").read_bytes() == bytes(content)
    assert_accounts(finished, 8)


@pytest.mark.slow
def test_the_ledger_of_another_run_is_refused(
    options: Options, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Ledger(finished / LEDGER)
    other.set(run_id="another")
    other.close()
    before = hashes(finished)
    error = refusal(options(finished), capsys)
    assert f"{finished / LEDGER} belongs to another run (another) than {finished}/checkpoints/step_000006" in error
    assert hashes(finished) == before


@pytest.mark.slow
def test_two_runs_with_one_name_do_not_share_a_ledger(
    options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [f"ledger.folder={tmp_path}/ledgers", "name=sums", "algorithm.num_steps=1", "checkpoint.every_steps=0"]
    one, two, path = tmp_path / "one", tmp_path / "two", tmp_path / "ledgers" / "sums" / LEDGER
    assert cli.main(["train", *options(one, *shared)]) == 0
    before = hashes(tmp_path)
    error = refusal(options(two, *shared), capsys)
    assert f"the ledger {path} belongs to the run in {one}, not to output={two}: choose another name or" in error
    assert before.items() <= hashes(tmp_path).items()
    one.rename(tmp_path / "moved")
    assert cli.main(["train", *options(tmp_path / "moved", *shared, "algorithm.num_steps=2")]) == 0


def test_a_folder_that_cannot_be_written_is_refused(
    options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("")
    error = refusal(options(file / "run"), capsys)
    assert f"output={file}/run can't be written ({file} is not a folder): fix that, or choose another output" in error
    error = refusal(options(tmp_path / "run", f"ledger.folder={file}/ledgers"), capsys)
    assert f"can't be written: {file} is not a folder; choose another ledger.folder or output" in error


def test_a_read_only_disk_is_refused(options: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        assert f"({disk} can't be written to)" in refusal(options(disk / "run"), capsys)


@pytest.mark.slow
def test_an_older_checkpoint_begins_a_branch(
    options: Options, finished: Path, undisturbed_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = finished / "checkpoints"
    assert cli.main(["train", *options(finished, f"resume={checkpoints}/step_000002")]) == 0
    printed = capsys.readouterr().out
    for step in (4, 6):
        assert f"a newer one is now {checkpoints}/step_{step:06}.left" in printed
    assert checkpoint_names(finished) == ["step_000002", "step_000004", "step_000006"]
    assert_accounts(finished, 6)
    assert_same_policy(finished, undisturbed_run)
    assert Ledger(finished / "ledger-1.sqlite", read_only=True).checkpoint_step == 6

    assert cli.main(["train", *options(finished, "algorithm.num_steps=7")]) == 0
    printed = capsys.readouterr().out
    assert f"resuming from {checkpoints}/step_000006, after step 6" in printed
    assert ".left" not in printed, "the branch is the run"
    assert_accounts(finished, 7)


def test_the_same_command_on_a_run_that_has_ended_changes_nothing(
    options: Options, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hashes(finished)
    assert cli.main(["train", *options(finished)]) == 0
    assert "this run has ended after 6 steps, and nothing is left to do" in capsys.readouterr().out
    assert hashes(finished) == before

    shutil.rmtree(finished / "policy")  # then the policy is written again
    assert cli.main(["train", *options(finished)]) == 0
    assert "has ended" not in capsys.readouterr().out
    assert (finished / "policy").is_dir()
