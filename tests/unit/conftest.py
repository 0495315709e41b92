"""Environment settings that must be in place before libraries are loaded, in every process of the unit tests."""

from __future__ import annotations

import os

# Before torch is loaded: threads that wait for each other on shared cores are many times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Triton is loaded: its interpreter runs kernels on the CPU, one program after the other.
os.environ.setdefault("TRITON_INTERPRET", "1")
