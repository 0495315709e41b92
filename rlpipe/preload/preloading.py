"""The preloaded processes of a local cluster, and the hook that makes Ray fork its workers from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from rlpipe.common.temporary_folders import ScratchFolder
from rlpipe.configs.schema.root_config import Config
from rlpipe.preload.client import DEFAULT_STAGE, FOLDER, STAGE
from rlpipe.rollout.engine import resolve_engine

END_TIMEOUT_S = 10.0
"""Seconds for an import that is under way when the run ends."""


class Preloading:
    """Preloaded processes of one local cluster; they end with ``end``, or with this process."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._folder = ScratchFolder("rlpipe-preload-")
        command = [sys.executable, "-P", "-m", "rlpipe.preload.server", self._folder.path, *stages]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            # Hide what libraries print on import; an import that fails here fails in the worker, too, which reports it.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )

    @contextmanager
    def used_by_ray(self) -> Iterator[None]:
        """Fork the workers of a local cluster that is started within the block."""
        from rlpipe.actors.ray_internals import worker_program

        client = str(Path(__file__).with_name("client.py"))
        with worker_program(client), patch.dict(os.environ, {FOLDER: self._folder.path}):
            yield

    def end(self) -> None:
        """End the processes; kill those that have not ended within ``END_TIMEOUT_S``."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()  # nothing outlives SIGKILL
        self._folder.close()


def _environment() -> dict[str, str]:
    """Return this process's environment, with rlpipe importable from every working directory."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


_preloading: Preloading | None = None
"""Preloaded processes of the local cluster that runs or is about to start; this process has at most one cluster."""


def begin(config: Config) -> None:
    """Start preloading for the run's local cluster, unless that has been done already or the run joins a cluster.

    If it is called first, the libraries load while this process reads its data and starts Ray.
    """
    if starts_cluster(config) and config.cluster.preload:
        begin_stages(stages_of(config))


def begin_stages(stages: Sequence[str]) -> None:
    """Start preloading the given stages; called directly for a local cluster that several runs of this process join."""
    global _preloading
    if _preloading is None and sys.platform == "linux":
        _preloading = Preloading(stages)


@contextmanager
def used_by_ray() -> Iterator[None]:
    """Fork the workers of a local cluster that is started within the block, if ``begin`` has preloaded anything."""
    if _preloading is None:
        yield
    else:
        with _preloading.used_by_ray():
            yield


def end() -> None:
    """End the preloaded processes; to be called after the cluster that used them has ended."""
    global _preloading
    if _preloading is not None:
        _preloading.end()
        _preloading = None


def stage_variables(stage: str) -> Mapping[str, str]:
    """Return the environment variables of an actor to be forked from a stage; empty if nothing is preloaded."""
    return {} if _preloading is None else {STAGE: stage}


def starts_cluster(config: Config) -> bool:
    """Return whether the run will start a local cluster instead of joining one."""
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return False
    return "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def stages_of(config: Config) -> list[str]:
    """Return the stages to preload; with GPUs none imports torch, because it may open the device before the fork."""
    if config.learner.num_gpus or (config.algorithm.kind == "rl" and config.rollout.num_gpus):
        return [DEFAULT_STAGE]
    return ["learner", engine_stage(config)] if config.algorithm.kind == "rl" else ["learner"]


def engine_stage(config: Config) -> str:
    """Return the stage to fork engines from; the transformers engine needs the same imports as a learner."""
    return "engine" if resolve_engine(config.rollout) == "vllm" else "learner"
