"""Probe of a Ray cluster: the clocks of its hosts, whether they see a file, and the cluster's size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlpipe.actors.node_dtypes import start_on_nodes
from rlpipe.actors.remote import get_remote
from rlpipe.configs.schema.root_config import Config
from rlpipe.run import workers
from rlpipe.run.cluster import connect, find_lack


@dataclass(kw_only=True, frozen=True)
class HostState:
    """A host's clock, and whether it sees a file of the run."""

    address: str
    ahead_s: float
    """Seconds that its clock is ahead of this machine's."""
    sees_file: bool


@dataclass(kw_only=True, frozen=True)
class ClusterState:
    """The hosts of a cluster, and the resources that it lacks."""

    hosts: list[HostState]
    lack: str | None = None
    """Resources that the run needs beyond those of the whole cluster, used by others or not; None if it fits."""


def read_clock_and_file(file: str) -> tuple[float, bool]:
    """Return this host's time, in seconds since 1970, and whether it has a file."""
    return time.time(), Path(file).exists()


def probe_cluster(config: Config, file: Path) -> ClusterState:
    """Return the state of the config's cluster, which is joined for it unless it was already."""
    joined = ray.is_initialized()
    connect(config.cluster, [])
    try:
        hosts = [_probe(node, file, config) for node in ray.nodes() if node["Alive"]]
        generating = workers.generation_needs(config) if config.algorithm.kind == "rl" else []
        needs = [*generating, *workers.learner_needs(config)]
        return ClusterState(hosts=hosts, lack=find_lack(needs, ray.cluster_resources()))
    finally:
        if not joined:
            ray.shutdown()


def _probe(node: Mapping[str, Any], file: Path, config: Config) -> HostState:
    sent_at = time.time()
    (answer,) = start_on_nodes([node["NodeID"]], read_clock_and_file, str(file))
    host_time, sees_file = get_remote(
        answer,
        f"host {node['NodeManagerAddress']} to tell its time",
        within=config.cluster.start_timeout_s,
        option="cluster.start_timeout_s",
    )
    ahead_s = min(0.0, host_time - sent_at) + max(0.0, host_time - time.time())  # the answer was made between the two
    return HostState(address=node["NodeManagerAddress"], ahead_s=ahead_s, sees_file=sees_file)
