"""Reporting of a run: metrics to every tracker, progress to the terminal, and a summary at the end."""

from rlpipe.tracking.trackers import Tracker, open_trackers

__all__ = ["Tracker", "open_trackers"]
