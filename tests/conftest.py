"""Selection of the matrix cases that `make test` runs, and the place where tests keep measurements of this machine."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import covering

from rlpipe.common.temporary_folders import ScratchFolder

# A shell's background jobs ignore Ctrl-C, and so do their children, but tests send it to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Measurements of this machine are kept there, once for all processes of a test run.
# What DeepSpeed compiles, which takes a minute, stays for the next test run.
PREFIX = "rlpipe-tests-cache-"
if PREFIX not in os.environ.get("XDG_CACHE_HOME", ""):
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(caches / "rlpipe-tests" / "torch_extensions"))
    MEASUREMENTS = ScratchFolder(PREFIX)  # goes with this process
    os.environ["XDG_CACHE_HOME"] = MEASUREMENTS.path


@pytest.fixture(autouse=True)
def same_folder() -> Iterator[None]:
    """Return to the folder of before, which a run or actor in this process may have left."""
    before = Path.cwd()
    yield
    os.chdir(before)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that stands in for the user's cache during a test."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of ``covering`` tests as slow if other cases of the same test already cover their values."""
    matrices: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("covering"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for matrix in matrices.values():
        marker = matrix[0].get_closest_marker("covering")
        kept = covering([item.callspec.params for item in matrix], strength=marker.args[0])
        for index, item in enumerate(matrix):
            if index not in kept:
                item.add_marker(pytest.mark.slow)
