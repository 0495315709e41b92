"""Locks of operators that were being compiled when their process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from rlpipe.learner.strategies import operator_builds
from rlpipe.learner.strategies.operator_builds import free_abandoned_builds

HOLD = """\
import sys, time
from torch.utils.file_baton import FileBaton

FileBaton(sys.argv[1]).try_acquire()
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["op", "py311_cpu/op"])
def lock(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / request.param
    folder.mkdir(parents=True)
    return folder / "lock"


@pytest.mark.covering(0)
def test_the_lock_of_a_living_process_stays_and_that_of_a_killed_one_goes(lock: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    free_abandoned_builds(build_s=0.0)
    assert lock.exists()
    holder.kill()
    holder.wait(20)
    free_abandoned_builds(build_s=0.0)
    assert not lock.exists()
    FileBaton(str(lock)).wait()


@pytest.mark.covering(0)
def test_a_young_lock_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_builds, "POLL_S", 0.01)
    lock.touch()
    threading.Timer(0.2, lock.unlink).start()  # of another host, which has ended its work
    free_abandoned_builds(build_s=60.0)
    assert not lock.exists()
    lock.touch()
    began = time.time()
    free_abandoned_builds(build_s=0.3)
    assert not lock.exists()
    assert time.time() - began > 0.2


def test_folders_without_locks_cost_nothing(lock: Path) -> None:
    (lock.parent / "op.so").touch()
    free_abandoned_builds()
    assert os.listdir(lock.parent) == ["op.so"]
