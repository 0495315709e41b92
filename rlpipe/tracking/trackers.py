"""The ``Tracker`` protocol, and the tracker that passes the same metrics to several others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.jsonl import JsonlTracker

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receiver of a run's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Tracker that feeds several others; one that raises is tried again at each step, and the run goes on.

    The first of its failures in a row is a warning; when it works again, another says how many steps it lacks.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._num_lost: dict[str, int] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            if not self._try(name, lambda tracker=tracker: tracker.log(step, metrics)):  # type: ignore[misc]
                self._num_lost[name] = self._num_lost.get(name, 0) + 1
            elif num_lost := self._num_lost.pop(name, 0):
                logger.warning("%s tracking works again; it lacks %d steps", name, num_lost)

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            self._try(name, tracker.close)
        self._trackers.clear()

    def _try(self, name: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            if name not in self._num_lost:
                logger.warning("%s tracking fails, the run continues: %s: %s", name, type(error).__name__, error)
            return False
        return True


def open_trackers(
    config: TrackingConfig,
    *,
    output: Path,
    run_name: str,
    first_step: int,
    resolved_config: Mapping[str, Any],
) -> Tracker:
    """Open the trackers that ``config`` asks for, and always ``metrics.jsonl``.

    ``first_step`` is the first step that this process will log, 0 in a new run: what an interrupted run has logged
    of it and of later steps is dropped, so that no step appears twice. A tracker other than JSONL that can't be
    opened is left out with a warning.
    """
    trackers: dict[str, Tracker] = {"JSONL": JsonlTracker(output / "metrics.jsonl", first_step)}

    def open_tensorboard() -> Tracker:
        from rlpipe.tracking.tensorboard import TensorBoardTracker

        return TensorBoardTracker(output / "tensorboard", first_step)

    def open_wandb() -> Tracker:
        from rlpipe.tracking.wandb import WandbTracker

        return WandbTracker(
            output, project=config.wandb_project, mode=config.wandb_mode, run_name=run_name, config=resolved_config
        )

    def open_ray_metrics() -> Tracker:
        from rlpipe.tracking.ray_metrics import RayMetricsTracker

        return RayMetricsTracker(run_name)

    optional = {
        "TensorBoard": (config.tensorboard, open_tensorboard),
        "W&B": (config.wandb, open_wandb),
        "Ray metrics": (config.ray_metrics, open_ray_metrics),
    }
    for name, (wanted, opener) in optional.items():
        if not wanted:
            continue
        try:
            trackers[name] = opener()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            logger.warning("%s tracking is off: %s: %s", name, type(error).__name__, error)
    return Trackers(trackers)
