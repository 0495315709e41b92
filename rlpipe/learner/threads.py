"""The number of CPU threads of a learner rank."""

from __future__ import annotations

import os

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.hardware.cgroup import num_cores


def num_threads(learner: LearnerConfig) -> int:
    """Return the number of threads: as configured, or else the number of CPUs that Ray reserves.

    A rank with a GPU whose weights are updated on the host takes at least its share of the machine's cores, which are
    idle otherwise; the predicted time of that update assumes the same.
    """
    if learner.num_threads is not None:
        return learner.num_threads
    reserved = max(1, int(learner.num_cpus))
    updates_on_host = learner.offload != "none" or (learner.strategy == "zero3" and learner.zero3.offload_optimizer)
    if not learner.num_gpus or not updates_on_host:
        return reserved
    return max(reserved, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
