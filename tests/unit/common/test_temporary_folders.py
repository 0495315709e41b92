"""Tests of temporary folders: those of living processes stay, those of killed ones go."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.common.temporary_folders import ScratchFolder, remove_abandoned

PREFIX = "rlpipe-own-"
CHILD = f"""
import pathlib, sys
from rlpipe.common.temporary_folders import ScratchFolder
folder = ScratchFolder({PREFIX!r})
(pathlib.Path(folder.path) / "file").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    remove_abandoned.cache_clear()
    yield tmp_path
    remove_abandoned.cache_clear()


def start() -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen([sys.executable, "-c", CHILD], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_what_killed_processes_left_goes_and_the_rest_stays(place: Path) -> None:
    other = place / "other"
    other.mkdir()
    (place / f"{PREFIX}file").touch()
    (place / f"{PREFIX}link").symlink_to(other)
    killed, left = start()
    killed.kill()
    killed.communicate()
    assert (left / "file").exists()
    living, kept = start()
    assert not left.exists()
    own = ScratchFolder(PREFIX)
    assert (kept / "file").exists()
    living.communicate()
    assert living.returncode == 0
    assert not kept.exists(), "it goes with its process"
    own.close()
    own.close()
    assert sorted(path.name for path in place.iterdir()) == ["other", f"{PREFIX}file", f"{PREFIX}link"]
