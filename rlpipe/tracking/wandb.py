"""Metrics as a run in Weights & Biases, online or, without an account, offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import wandb

from rlpipe.common.formatting import HIDDEN, without_password
from rlpipe.configs.options import SECRET_NAME

RUN_ID_FILE = "wandb_run_id.txt"


class WandbTracker:
    """Tracker of the W&B run whose id is kept in the output folder, so that a resumed run continues its curves.

    If the mode is offline, upload the files under ``output/wandb`` with ``wandb sync``.
    """

    def __init__(self, output: Path, *, project: str, mode: str, run_name: str, config: Mapping[str, Any]) -> None:
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
