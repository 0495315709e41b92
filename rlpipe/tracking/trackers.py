"""The ``Tracker`` protocol, several trackers as one, and trackers on threads of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.jsonl import JsonlTracker

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receiver of a run's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


CLOSE_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for one tracker, which may upload what it has."""


class Trackers:
    """Tracker that feeds several others, in their order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        while self._trackers:
            self._trackers.pop(0).close()


class BackgroundTracker:
    """Tracker that is opened and fed on a thread of its own, so that one that waits or fails delays no step.

    One that can't be opened is off, with a warning. One that raises is tried again at each step: the first failure in
    a row is a warning, and when it works again, another says how many steps it lacks.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_tracker
        self._waiting: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name=f"{name} tracking", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._thread.is_alive():
            self._waiting.put((step, metrics))

    def close(self) -> None:
        """Wait until all steps are tracked, but not longer than ``CLOSE_TIMEOUT_S``."""
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "%s tracking has not ended within %g s, and may lack steps; metrics.jsonl has all",
                self._name,
                CLOSE_TIMEOUT_S,
            )

    def _run(self) -> None:
        try:
            tracker = self._open()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            logger.warning("%s tracking is off: %s", self._name, describe_error(error))
            return
        while (entry := self._waiting.get()) is not None:
            self._try(lambda entry=entry: tracker.log(*entry))  # type: ignore[misc]
        self._try(tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            if not self._num_lost:
                logger.warning("%s tracking fails, the run continues: %s", self._name, describe_error(error))
            self._num_lost += 1
        else:
            if self._num_lost:
                logger.warning("%s tracking works again; it lacks %d steps", self._name, self._num_lost)
            self._num_lost = 0


def open_trackers(
    config: TrackingConfig, *, output: Path, run_name: str, first_step: int, resolved_config: Mapping[str, Any]
) -> Tracker:
    """Open the trackers that ``config`` asks for, and always ``metrics.jsonl``.

    ``first_step`` is the first step that this process will log, 0 in a new run: what an interrupted run has logged
    of it and of later steps is dropped, so that no step appears twice. A tracker other than JSONL that can't be
    opened, or that fails, costs a warning.
    """
    jsonl = JsonlTracker(output / "metrics.jsonl", first_step)

    def open_tensorboard() -> Tracker:
        from rlpipe.tracking.backends import TensorBoardTracker

        return TensorBoardTracker(output / "tensorboard", first_step)

    def open_wandb() -> Tracker:
        from rlpipe.tracking.backends import WandbTracker

        return WandbTracker(
            output, project=config.wandb_project, mode=config.wandb_mode, run_name=run_name, config=resolved_config
        )

    def open_ray_metrics() -> Tracker:
        from rlpipe.tracking.backends import RayMetricsTracker

        return RayMetricsTracker(run_name)

    optional = {
        "TensorBoard": (config.tensorboard, open_tensorboard),
        "W&B": (config.wandb, open_wandb),
        "Ray metrics": (config.ray_metrics, open_ray_metrics),
    }
    wanted = [BackgroundTracker(name, opener) for name, (is_on, opener) in optional.items() if is_on]
    return Trackers([jsonl, *wanted])
