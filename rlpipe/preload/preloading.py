"""Starts the preloaded processes of a local cluster, and has Ray ask them for its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlpipe.configs.schema.root_config import Config
from rlpipe.preload.client import DEFAULT_STAGE, FOLDER, STAGE
from rlpipe.rollout.engine import resolve_engine


class Preloading:
    """The preloaded processes of one local cluster; they end with ``end``, or with this process."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlpipe-preload-")
        command = [sys.executable, "-P", "-m", "rlpipe.preload.server", self._folder.name, *stages]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            # What libraries print when they are imported: what fails there fails in the worker, too, and is told.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )

    @contextmanager
    def used_by_ray(self) -> Iterator[None]:
        """A local cluster that is started within has its workers forked."""
        from ray._private import parameter

        client = str(Path(__file__).with_name("client.py"))
        params: Any = partial(parameter.RayParams, setup_worker_path=client)
        with patch.object(parameter, "RayParams", params), patch.dict(os.environ, {FOLDER: self._folder.name}):
            yield

    def end(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()


def _environment() -> dict[str, str]:
    """This process's, with rlpipe importable from every working directory."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


_preloading: Preloading | None = None
"""That of the local cluster which runs, or is about to be started; this process has at most one."""


def begin(config: Config) -> None:
    """Starts to load what the run's local cluster will need, unless that is under way or the run joins a cluster.

    Called first of all, the libraries load while this process reads its data and starts Ray.
    """
    if starts_cluster(config) and config.cluster.preload:
        begin_stages(stages_of(config))


def begin_stages(stages: Sequence[str]) -> None:
    """As ``begin``, for a local cluster that several runs will join from this process."""
    global _preloading
    if _preloading is None and sys.platform == "linux":
        _preloading = Preloading(stages)


@contextmanager
def used_by_ray() -> Iterator[None]:
    """A local cluster that is started within has its workers forked from what ``begin`` started, if it has."""
    if _preloading is None:
        yield
    else:
        with _preloading.used_by_ray():
            yield


def end() -> None:
    """Ends the preloaded processes, after the cluster that used them."""
    global _preloading
    if _preloading is not None:
        _preloading.end()
        _preloading = None


def stage_variables(stage: str) -> Mapping[str, str]:
    """Environment variables of an actor whose process is to be forked from a stage; none if nothing is preloaded."""
    return {} if _preloading is None else {STAGE: stage}


def starts_cluster(config: Config) -> bool:
    """Whether the run will start a local cluster, rather than join one."""
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return False
    return "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def stages_of(config: Config) -> list[str]:
    """What is preloaded: on GPUs no torch, whose libraries may open the device before a process forks."""
    if config.learner.num_gpus or (config.algorithm.kind == "rl" and config.rollout.num_gpus):
        return [DEFAULT_STAGE]
    return ["learner", engine_stage(config)] if config.algorithm.kind == "rl" else ["learner"]


def engine_stage(config: Config) -> str:
    """The stage that engines are forked from; transformers' own needs what a learner does."""
    return "engine" if resolve_engine(config.rollout.engine) == "vllm" else "learner"
