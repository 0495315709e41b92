"""Names of Ray's private modules that rlpipe depends on, so that an upgrade of Ray is checked against one file.

Those of Ray Train and Ray Serve are in ``actors/trainer.py`` and ``actors/served.py``, which alone import them.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import ray

RAY_START_S = 120.0
"""Longest time until the processes of a local cluster have registered, in seconds."""
RETRY_S = 0.2
JOIN_TIME = "RAY_gcs_server_port_wait_time_s"


@dataclass(kw_only=True, frozen=True)
class Host:
    """Living node of the cluster."""

    address: str
    port: int
    """Port at which one of Ray's processes listens."""
    is_head: bool = False


@dataclass(kw_only=True, frozen=True)
class LivingActor:
    """Living actor of this job."""

    name: str
    """Its name, or an empty string."""
    class_name: str
    node_id: str


def own_node() -> dict[str, str]:
    """Return the label selector of this process's node."""
    from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]

    return {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}


def hide_lines(patterns: Sequence[str]) -> None:
    """Hide lines that match one of the ``patterns`` from the terminal; ``RAY_DEDUP_LOGS=0`` still shows them."""
    from ray._private import ray_logging
    from ray._private.ray_constants import RAY_DEDUP_LOGS_SKIP_REGEX

    configured = [RAY_DEDUP_LOGS_SKIP_REGEX] if RAY_DEDUP_LOGS_SKIP_REGEX else []
    ray_logging.stdout_deduplicator.skip_re = re.compile("|".join([*configured, *patterns]))


def hide_token_warning() -> None:
    """Hide the warning that Ray's own cluster needs a token; Ray then provides that token by itself."""
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def is_killed_on_stop() -> bool:
    """Return whether this process is a job that ``ray job stop`` kills 3 seconds after its signal, Ray's default."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    return RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ and "RAY_JOB_STOP_WAIT_TIME_S" not in os.environ


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keep this process's own handler of SIGTERM, if it has one, while Ray is initialized within the block.

    Ray would replace it by one that exits with code 15, and wrap that by one that aborts the process after 3 seconds.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler in (None, signal.SIG_DFL) or threading.current_thread() is not threading.main_thread():
        yield
        return
    from ray._private import utils

    with patch.object(utils, "set_sigterm_handler"):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def private_services() -> Iterator[None]:
    """Have a local cluster that is started within the block serve this process alone.

    Its processes are in sessions of their own, so that they outlive a signal to the driver's process group, as
    ``timeout`` and Slurm send it, until the driver has written its checkpoint; when the driver dies, Ray ends them.
    They listen at loopback addresses: on Linux Ray prepares each cluster for other hosts, unless this switch of its,
    which other platforms have on, says otherwise. The environment turns it off again.
    """
    from ray._private import ray_constants, services

    started: Any = partial(services.ConsolePopen, start_new_session=True)
    with patch.object(services, "ConsolePopen", started), patient_start():
        if os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR) is not None:
            yield
            return
        variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
        with patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False), patch.dict(os.environ, variables):
            yield


@contextmanager
def brief_join() -> Iterator[None]:
    """Have Ray try for 40 seconds to join a cluster within the block, instead of six minutes.

    A time that the environment sets is kept.
    """
    if JOIN_TIME in os.environ:
        yield
        return
    os.environ[JOIN_TIME] = "1"  # attempts, each of 40 seconds if nothing answers
    try:
        yield
    finally:
        del os.environ[JOIN_TIME]  # a local cluster has this time to start


@contextmanager
def patient_start() -> Iterator[None]:
    """Give the processes of a local cluster that is started within the block ``RAY_START_S`` seconds to register.

    Ray allows 30: too few for a machine that is busy, or that reads Ray's programs for the first time.
    """
    from ray._private import services

    with patch.object(services, "get_node", _retried(services.get_node, RAY_START_S)):
        yield


def _retried(get_node: Callable[..., Any], limit_s: float) -> Callable[..., Any]:
    """Return ``get_node`` with retries for ``limit_s`` seconds while Ray's head does not know the node."""

    def ask(*arguments: Any) -> Any:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_S)

    return ask


@contextmanager
def worker_program(path: str) -> Iterator[None]:
    """Have a local cluster that is started within the block start its workers by the program at ``path``."""
    from ray._private import parameter

    params: Any = partial(parameter.RayParams, setup_worker_path=path)
    with patch.object(parameter, "RayParams", params):
        yield


async def query_head(timeout_s: float) -> tuple[dict[str, Host], list[LivingActor]]:
    """Return the living nodes by id, and the living actors of this job; Ray's public calls may block for minutes.

    Raises ``RpcError`` or ``TimeoutError`` if the head does not answer.
    """
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

    context = ray.get_runtime_context()
    head: Any = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]
    job = ray.JobID.from_hex(context.get_job_id())
    actors = await head.async_get_all_actor_info(job_id=job, actor_state_name="ALIVE", timeout=timeout_s)
    nodes, _ = await head.async_get_all_node_info(timeout=timeout_s)
    head_port = int(context.gcs_address.rpartition(":")[2])
    hosts = {
        info.node_id.hex(): Host(
            address=info.node_manager_address,
            port=head_port if info.is_head_node else info.node_manager_port,
            is_head=info.is_head_node,
        )
        for info in nodes.values()
        if info.state == GcsNodeInfo.ALIVE
    }
    return hosts, [
        LivingActor(name=actor.name, class_name=actor.class_name, node_id=actor.address.node_id.hex())
        for actor in actors.values()
    ]


def nvml_gpus() -> list[tuple[str, tuple[int, int]]]:
    """Return the name and compute capability of each NVIDIA GPU, by the driver's library, which takes no GPU memory.

    It also lists GPUs that this process may not use. Raises ``OSError`` if there is no driver.
    """
    from ray._private.thirdparty import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            (pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles
        ]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from None
    return gpus
