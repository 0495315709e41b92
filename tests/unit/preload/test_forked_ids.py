"""Tests that workers forked from one preloaded process draw ids of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlpipe.preload.server import STAGES

PROGRAM = """
import os, sys, threading
from rlpipe.preload import server

for stage in sys.argv[1].split(","):
    with server.without_ray():
        server._import_all(server.STAGES[stage].modules)
with server.without_ray_ids():
    server._import_all(server.STAGES[stage].ray_modules)
assert set(server.STAGES[stage].ray_modules) <= sys.modules.keys()

from ray._raylet import WorkerID


def draw():
    found = [WorkerID.from_random().hex()]
    thread = threading.Thread(target=lambda: found.append(WorkerID.from_random().hex()))
    thread.start()
    thread.join()
    return found


for _ in range(3):
    if os.fork() == 0:
        os.write(1, (" ".join(draw()) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


def chain(stage: str) -> list[str]:
    parent = STAGES[stage].parent
    return [*([] if parent is None else chain(parent)), stage]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=[pytest.mark.slow] * (name == "engine")) for name in STAGES]
)
def test_forks_draw_ids_of_their_own(stage: str) -> None:
    arguments = [sys.executable, "-c", PROGRAM, ",".join(chain(stage))]
    found = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 6
    assert len(set(found)) == 6, "Ray's generator was used before the fork"
