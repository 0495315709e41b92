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
    """Tracker that feeds several others; one that raises is dropped with a single warning, and the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._for_each(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._for_each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _for_each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
                logger.warning("%s tracking stops, the run continues: %s: %s", name, type(error).__name__, error)
                del self._trackers[name]


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
