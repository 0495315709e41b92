"""Trackers of TensorBoard, Weights & Biases and Ray's metrics, which import their libraries when they are opened."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

from rlpipe.common.formatting import HIDDEN, without_password
from rlpipe.configs.options import SECRET_NAME

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


RUN_ID_FILE = "wandb_run_id.txt"


class WandbTracker:
    """Tracker of the W&B run whose id is kept in the output folder, so that a resumed run continues its curves.

    If the mode is offline, upload the files under ``output/wandb`` with ``wandb sync``.
    """

    def __init__(self, output: Path, *, project: str, mode: str, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        output.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=_run_id(output / RUN_ID_FILE),
            resume="allow",
            mode=cast(Literal["online", "offline"], mode),
            dir=str(output),
            config=without_secrets(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step only increases; it would discard steps that a resumed run logs again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid4().hex[:8])
    return path.read_text().strip()


def without_secrets(tree: Any, name: str = "") -> Any:
    """Return a tree of ``to_tree`` for other machines: without passwords of URLs, and texts with names of secrets."""
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

    def close(self) -> None:
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

    def close(self) -> None:
        """Do nothing, because Ray drops the gauges with the process."""
