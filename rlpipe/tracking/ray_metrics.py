"""Metrics as Ray gauges, for Ray's dashboard and Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.util.metrics import Gauge


def prometheus_name(name: str) -> str:
    """Return a metric's name for Prometheus: ``rlpipe_time_train`` for ``time/train``; Ray prepends ``ray_``."""
    return "rlpipe_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_")


class RayMetricsTracker:
    """Tracker with one gauge per metric and one for the step, tagged with the run's name; Ray exports them itself."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._gauges: dict[str, Gauge] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, **metrics}.items():
            self._gauge(name).set(value)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            gauge = Gauge(prometheus_name(name), description=f"rlpipe: {name}", tag_keys=("run",))
            self._gauges[name] = gauge.set_default_tags({"run": self._run_name})
        return self._gauges[name]

    def close(self) -> None:
        """Do nothing, because Ray drops the gauges with the process."""
