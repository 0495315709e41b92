"""Trial of a run's first step in a temporary folder: Ray, engines, rewards, learner, weights and checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from rlpipe.common import run_files
from rlpipe.common.atomic_io import existing_folder
from rlpipe.common.temporary_folders import ScratchFolder
from rlpipe.configs.compose import load_config, quoted
from rlpipe.configs.options import to_yaml
from rlpipe.configs.schema.root_config import Config
from rlpipe.doctor.observations import Observation, ok
from rlpipe.tracking.jsonl import read_rows, show_beginning

SMALL = (
    "algorithm.num_steps=1",
    "algorithm.num_minibatches=1",
    "algorithm.num_epochs_per_step=1",
    "data.held_out.every_steps=0",
    "data.held_out.size=0",
    "data.held_out.path=null",
    "data.held_out.split=null",
    "data.held_out.correct_by=null",
    "learner.schedule.warmup_steps=0",
    "replay.refill_attempts=0",
    "resume=never",
    "ledger.folder=null",
    "tracking.progress=none",
    "tracking.tensorboard=false",
    "tracking.ray_metrics=false",
    "tracking.wandb=false",
    "tracking.mlflow=false",
    "tracking.trackio=false",
    "health={}",
)
"""Options with which a run is one step without evaluations, trackers or traces of it."""


def shrink(config: Config, folder: Path) -> Config:
    """Return the config of one step, of as few groups as there are ranks, with its output in a folder.

    It is made from the resolved config: models below ``${output}`` are those of the run.
    """
    least = 2 if config.algorithm.kind == "preference" and config.algorithm.preference.loss == "kto" else 1
    num_groups = max(config.learner.num_ranks, least)
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    overrides = [*SMALL, f"algorithm.groups_per_step={num_groups}", f"output={quoted(folder / 'run')}"]
    return load_config(overrides, file=file, need_files=False)  # they were there


def try_step(config: Config) -> Iterator[Observation]:
    """Train one step of as few groups as there are ranks, beside the run's output; raise what the run would raise."""
    from rlpipe.run.pipeline import train  # Ray takes a second

    scratch = ScratchFolder(".rlpipe-doctor-", existing_folder(Path(config.output).absolute()))
    folder = Path(scratch.path)
    try:
        small = shrink(config, folder)
        with redirect_stdout(io.StringIO()):
            summary = train(small)
        yield ok("trial step", f"trained in {summary['seconds']:.0f} s{_times(folder / 'run')}")
        for row in list(read_rows(folder / "run" / run_files.COMPLETIONS))[:1]:
            reward = "none" if row["reward"] is None else f"{row['reward']:.3g}"
            yield ok("completion", f"{show_beginning(row['completion'])} (reward {reward})")
    finally:
        scratch.close()


def _times(output: Path) -> str:
    """Return the times of the parts of the step that was trained, as the end of a sentence."""
    row = next((row for row in read_rows(output / run_files.METRICS) if "loss" in row), {})
    names = {"time/generate": "generating", "time/score": "scoring", "time/train": "training"}
    times = [f"{name} {row[key]:.1f} s" for key, name in names.items() if row.get(key) is not None]
    return f" ({', '.join(times)})" if times else ""
