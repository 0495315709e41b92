"""Stands here so that tests of all folders can import the helpers beside it."""

from __future__ import annotations

import os
import signal
import tempfile

# A shell's background jobs ignore Ctrl-C, and so does what they start: tests send it to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is measured of this machine is kept there, once for all processes of a test run.
PREFIX = "rlpipe-tests-cache-"
if PREFIX not in os.environ.get("XDG_CACHE_HOME", ""):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=PREFIX)
