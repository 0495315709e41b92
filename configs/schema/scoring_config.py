"""Options of the rewards, and of the processes and replicas that compute them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlpipe.configs.schema.option import MISSING, Freezable, option


@dataclass(kw_only=True)
class ServeConfig(Freezable):
    replicas: int = option(
        0, "Replicas of a Ray Serve deployment that score in place of processes of the run's own; 0: none.", minimum=0
    )
    max_replicas: int | None = option(None, "Replicas under load; null: no more than replicas.", minimum=1)
    batch_groups: int = option(8, "Groups that a replica scores at one time.", minimum=1)
    batch_wait_s: float = option(0.02, "Seconds that a group waits for others to be scored with.", minimum=0)
    health_check_s: float = option(10.0, "Seconds between looks at a replica.", above=0)


@dataclass(kw_only=True)
class RewardConfig(Freezable):
    path: str = option(MISSING, "package.module:name, or file.py:name, of a function or RewardActor.")
    weight: float = option(1.0, "Factor in the sum.")
    timeout_s: float = option(60.0, "Seconds that scoring one group may take.", above=0)
    num_processes: int | None = option(
        None, "Processes of its own; null: functions share scoring.num_processes, others have 1.", minimum=1
    )
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each process of its own.", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for each process of its own.", minimum=0)
    isolation: str = option(
        "process",
        "sandbox: each call in a fresh process without network, for code that models wrote.",
        choices=("process", "sandbox"),
    )
    memory_gb: float | None = option(
        None,
        "GiB that a process of its own, or a sandboxed call, may take; null: scoring.memory_gb for functions without "
        "a GPU, else no limit.",
        above=0,
    )
    fail: str = option(
        "skip_group",
        "What a failure does: drop the group, count as 0, or stop the run.",
        choices=("skip_group", "zero", "raise"),
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the function, or for the class.")
    serve: ServeConfig = field(default_factory=ServeConfig)

    @property
    def is_served(self) -> bool:
        return self.serve.replicas > 0


@dataclass(kw_only=True)
class ScoringConfig(Freezable):
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    num_processes: int = option(1, "Processes that the reward functions share.", minimum=1)
    num_cpus: float = option(0.5, "CPUs that Ray reserves for each of them.", minimum=0)
    on_rollouts_scored: str | None = option(
        None, "package.module:name, or file.py:name, of a function that is given scored groups, in its own process."
    )
    memory_gb: float | None = option(
        4.0, "GiB that a process of functions may take beyond what it has at its start; null: no limit.", above=0
    )
