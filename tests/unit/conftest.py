"""Stands here so that the unit tests, of which several run at one time, do not fight for the cores."""

from __future__ import annotations

import os

# Before torch is loaded: threads that wait for each other on shared cores take many times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
