"""Servers of other frameworks for tests, whose packages are in a folder of their own beside this environment's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

HELPERS = Path(__file__).parent


class FrameworkServer(NamedTuple):
    address: str
    process: psutil.Process


@contextmanager
def framework_server(framework: str, *arguments: str, home: Path) -> Iterator[FrameworkServer]:
    """Run ``<framework>_server.py`` and yield its address, the first line that it prints; end it with its children.

    Skips the test if the framework's folder is missing.
    """
    folder = Path(sys.prefix) / framework
    if not folder.is_dir():
        pytest.skip(f"needs {framework} in {folder}, which make install fills")
    program = HELPERS / f"{framework}_server.py"
    with subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env={**os.environ, "PYTHONPATH": f"{folder}:{HELPERS}", "HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        process = psutil.Process(started.pid)
        try:
            assert started.stdout is not None
            address = started.stdout.readline().strip()
            assert address, f"{program.name} ended before it gave an address"
            yield FrameworkServer(address, process)
        finally:
            children = process.children(recursive=True) if process.is_running() else []
            for one in (*children, process):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
