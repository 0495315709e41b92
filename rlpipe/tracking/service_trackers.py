"""Trackers of Weights & Biases, MLflow and Trackio; the id of their run is kept in the output, so that it goes on."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

from rlpipe.common import run_files
from rlpipe.tracking.completion_table import COMPLETIONS, CompletionTable

MAX_PARAMETER_CHARS = 500
"""Characters of a parameter's value, of which MLflow takes no more."""
MAX_NAME_CHARS = 250
PARAMETERS_AT_ONCE = 100
PARENTS = frozenset({"entropy", "kl", "reward"})
"""Metrics whose names are also the first part of others: MLflow's file store has no file and folder of one name."""


class WandbTracker:
    """Tracker of a run of Weights & Biases.

    If the mode is offline, upload the files under ``output/wandb`` with ``wandb sync``.
    """

    def __init__(self, output: Path, *, run_name: str, project: str, config: Mapping[str, Any], mode: str) -> None:
        import wandb

        output.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=run_name,
            id=_stored_id(output / run_files.WANDB_ID, lambda: uuid4().hex[:8]),
            resume="allow",
            mode=cast(Literal["online", "offline"], mode),
            dir=str(output),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B's own step only increases; it would discard steps that a resumed run logs again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_completions(self, table: CompletionTable) -> None:
        import wandb

        shown = wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows], allow_mixed_types=True)
        self._run.log({"step": table.step, COMPLETIONS: shown})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """Tracker of a run of MLflow, at ``MLFLOW_TRACKING_URI`` or in the folder ``mlruns`` of the output.

    The experiment is ``MLFLOW_EXPERIMENT_NAME``, or the project of the config.
    """

    def __init__(self, output: Path, *, run_name: str, project: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        from rlpipe.configs.options import leaves  # not above: readers of logs do without OmegaConf

        output.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (output.absolute() / run_files.MLRUNS).as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its databases need more than mlflow-skinny
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)

        def create() -> str:
            run_id: str = self._client.create_run(experiment, run_name=run_name).info.run_id
            return run_id

        self._id = _stored_id(output / run_files.MLFLOW_ID, create)
        self._client.update_run(self._id, status="RUNNING")
        existing = self._client.get_run(self._id).data.params.keys()
        parameters = {_mlflow_name(key): str(value)[:MAX_PARAMETER_CHARS] for key, value in leaves(config)}
        new = [Param(key, value) for key, value in parameters.items() if key not in existing]  # they can't be changed
        for start in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=new[start : start + PARAMETERS_AT_ONCE])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = [(name, value) for name, value in metrics.items() if math.isfinite(value)]
        entries = [Metric(_metric_name(name), value, now, step) for name, value in finite]
        self._client.log_batch(self._id, metrics=entries)

    def log_completions(self, table: CompletionTable) -> None:
        from pandas import DataFrame

        # MLflow's log_table lists all tables in one tag of the run, which becomes too long for its databases.
        text = DataFrame(table.to_columns()).to_json(orient="split", index=False)
        self._client.log_text(self._id, text, f"{COMPLETIONS}/step_{table.step:06}.json")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _metric_name(name: str) -> str:
    """Return the name of a metric as MLflow takes it, ``reward.greedy`` for ``reward/greedy``."""
    first, _, rest = name.partition("/")
    return _mlflow_name(f"{first}.{rest}" if rest and first in PARENTS else name)


def _mlflow_name(name: str) -> str:
    """Return the name of a metric or parameter as MLflow takes it: a path of plain characters, not too long."""
    plain = re.sub(r"[^/\w.\- :]", "_", name)
    folders = [folder for folder in plain.split("/") if folder.strip(".")]
    return "/".join(folders)[:MAX_NAME_CHARS] or "_"


class TrackioTracker:
    """Tracker of a run of Trackio, whose files are in ``TRACKIO_DIR``; ``trackio show`` shows them.

    Trackio resumes runs by their names alone, so the name that is kept in the output ends with a random part.
    """

    def __init__(self, output: Path, *, run_name: str, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        from rlpipe.configs.options import leaves

        output.mkdir(parents=True, exist_ok=True)
        name = _stored_id(output / run_files.TRACKIO_NAME, lambda: f"{run_name}-{uuid4().hex[:8]}")
        self._run = trackio.init(project=project, name=name, config=dict(leaves(config)), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, table: CompletionTable) -> None:
        import trackio
        from pandas import DataFrame

        self._run.log({COMPLETIONS: trackio.Table(dataframe=DataFrame(table.to_columns()))}, step=table.step)

    def close(self, *, failed: bool = False) -> None:
        """Finish the run; Trackio has no state for one that failed."""
        self._run.finish()


def _stored_id(path: Path, create: Callable[[], str]) -> str:
    if not path.exists():
        path.write_text(create())
    return path.read_text().strip()
