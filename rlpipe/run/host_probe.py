"""Asks each host of a Ray cluster for its clock, and whether it sees a file of this one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import ray

from rlpipe.actors.node import start_on_nodes
from rlpipe.actors.remote import get_remote
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.run.cluster import connect


@dataclass(kw_only=True, frozen=True)
class HostState:
    address: str
    ahead_s: float
    """Seconds that its clock is ahead of this machine's."""
    sees_file: bool


def look(file: str) -> tuple[float, bool]:
    """Return this host's time, in seconds since 1970, and whether it has a file."""
    return time.time(), Path(file).exists()


def probe_hosts(cluster: ClusterConfig, file: Path) -> list[HostState]:
    """Return the state of each living host of the cluster, which is joined for it unless it was already."""
    joined = ray.is_initialized()
    connect(cluster, [])
    try:
        states = []
        for node in (node for node in ray.nodes() if node["Alive"]):
            sent = time.time()
            (answer,) = start_on_nodes([node["NodeID"]], look, str(file))
            told, sees = get_remote(
                answer,
                f"host {node['NodeManagerAddress']} to tell its time",
                within=cluster.start_timeout_s,
                option="cluster.start_timeout_s",
            )
            ahead = min(0.0, told - sent) + max(0.0, told - time.time())  # the answer was made between the two
            states.append(HostState(address=node["NodeManagerAddress"], ahead_s=ahead, sees_file=sees))
        return states
    finally:
        if not joined:
            ray.shutdown()
