"""Stands here so that tests of all folders can import the helpers beside it."""

from __future__ import annotations

import signal

# A shell's background jobs ignore Ctrl-C, and so does what they start: tests send it to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
