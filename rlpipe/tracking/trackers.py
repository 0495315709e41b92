"""The ``Tracker`` protocol, several trackers as one, trackers on threads of their own, and those of other tools."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from rlpipe.common import run_files
from rlpipe.common.formatting import HIDDEN, without_password
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.completion_table import COMPLETIONS, CompletionTable
from rlpipe.tracking.jsonl import JsonlTracker
from rlpipe.tracking.service_trackers import MlflowTracker, TrackioTracker, WandbTracker

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receiver of a run's metrics and of some of its completions."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_completions(self, table: CompletionTable) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """End the tracking of a run that has finished, or has ``failed`` or been stopped."""
        ...


CLOSE_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for one tracker, which may upload what it has."""


class Trackers:
    """Tracker that feeds several others, in their order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_completions(self, table: CompletionTable) -> None:
        for tracker in self._trackers:
            tracker.log_completions(table)

    def close(self, *, failed: bool = False) -> None:
        while self._trackers:
            self._trackers.pop(0).close(failed=failed)


class BackgroundTracker:
    """Tracker that is opened and fed on a thread of its own, so that one that waits or fails delays no step.

    One that can't be opened is off, with a warning. One that raises is tried again at each step: the first failure in
    a row is a warning, and when it works again, another says how many entries it lacks.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_tracker
        self._waiting: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._num_lost, self._has_failed = 0, False
        self._thread = threading.Thread(target=self._run, name=f"{name} tracking", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._enqueue(lambda tracker: tracker.log(step, metrics))

    def log_completions(self, table: CompletionTable) -> None:
        self._enqueue(lambda tracker: tracker.log_completions(table))

    def _enqueue(self, action: Callable[[Tracker], None]) -> None:
        if self._thread.is_alive():
            self._waiting.put(action)

    def close(self, *, failed: bool = False) -> None:
        """Wait until all steps are tracked, but not longer than ``CLOSE_TIMEOUT_S``."""
        self._has_failed = failed
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "%s tracking has not ended within %g s, and may lack steps; %s has all",
                self._name,
                CLOSE_TIMEOUT_S,
                run_files.METRICS,
            )

    def _run(self) -> None:
        try:
            tracker = self._open()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            logger.warning("%s tracking is off: %s", self._name, describe_error(error))
            return
        while (action := self._waiting.get()) is not None:
            self._try(partial(action, tracker))
        self._try(partial(tracker.close, failed=self._has_failed))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a tracker must not end the run it tracks
            if not self._num_lost:
                logger.warning("%s tracking fails, the run continues: %s", self._name, describe_error(error))
            self._num_lost += 1
        else:
            if self._num_lost:
                logger.warning("%s tracking works again; it lacks %d entries", self._name, self._num_lost)
            self._num_lost = 0


def open_trackers(
    config: TrackingConfig, *, output: Path, run_name: str, first_step: int, resolved_config: Mapping[str, Any]
) -> Tracker:
    """Open the trackers that ``config`` asks for, and always ``metrics.jsonl``.

    ``first_step`` is the first step that this process will log, 0 in a new run: what an interrupted run has logged
    of it and of later steps is dropped, so that no step appears twice. A tracker other than JSONL that can't be
    opened, or that fails, costs a warning.
    """
    jsonl = JsonlTracker(output / run_files.METRICS, first_step)

    def open_service(kind: Callable[..., Tracker], **options: str) -> Callable[[], Tracker]:
        return lambda: kind(
            output, run_name=run_name, project=config.project, config=without_secrets(resolved_config), **options
        )

    optional: dict[str, tuple[bool, Callable[[], Tracker]]] = {
        "TensorBoard": (config.tensorboard, partial(TensorBoardTracker, output / run_files.TENSORBOARD, first_step)),
        "W&B": (config.wandb, open_service(WandbTracker, mode=config.wandb_mode)),
        "MLflow": (config.mlflow, open_service(MlflowTracker)),
        "Trackio": (config.trackio, open_service(TrackioTracker)),
        "Ray metrics": (config.ray_metrics, partial(RayMetricsTracker, run_name)),
    }
    enabled = [BackgroundTracker(name, opener) for name, (is_on, opener) in optional.items() if is_on]
    return Trackers([jsonl, *enabled])


def without_secrets(tree: Any, name: str = "") -> Any:
    """Return a tree of ``to_tree`` for other machines: without passwords of URLs, and texts with names of secrets."""
    from rlpipe.configs.options import SECRET_NAME  # not above: readers of logs do without OmegaConf

    if isinstance(tree, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value, name) for value in tree]
    if not isinstance(tree, str):
        return tree
    if SECRET_NAME.search(name) and tree and not tree.startswith("${"):
        return HIDDEN
    return without_password(tree)


class TensorBoardTracker:
    """Tracker of one scalar per metric; TensorBoard hides ``first_step`` and later steps of earlier files."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def log_completions(self, table: CompletionTable) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        summary = text_pb(COMPLETIONS, table.to_markdown())
        self._writer.add_event(self._event(wall_time=time.time(), step=table.step, summary=summary))
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


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
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            gauge = Gauge(prometheus_name(name), description=f"rlpipe: {name}", tag_keys=("run",))
            self._gauges[name] = gauge.set_default_tags({"run": self._run_name})
        return self._gauges[name]

    def log_completions(self, table: CompletionTable) -> None:
        """Do nothing, because Prometheus has no texts."""

    def close(self, *, failed: bool = False) -> None:
        """Do nothing, because Ray drops the gauges with the process."""
