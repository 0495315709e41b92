"""How many threads a rank computes with on the CPU."""

from __future__ import annotations

import os

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.hardware.cgroup import num_cores


def num_threads(learner: LearnerConfig) -> int:
    """As the config says, else the CPUs that Ray reserves; a rank with a GPU whose weights the host updates takes its
    share of the machine, which is idle otherwise, and which that update is predicted with."""
    if learner.num_threads is not None:
        return learner.num_threads
    reserved = max(1, int(learner.num_cpus))
    updates_on_host = learner.offload != "none" or (learner.strategy == "zero3" and learner.zero3.offload_optimizer)
    if not learner.num_gpus or not updates_on_host:
        return reserved
    return max(reserved, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
