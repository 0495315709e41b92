"""Which rewards share a pool of scoring processes, how many it has, and how groups are spread over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlpipe.configs.schema import RewardConfig, ScoringConfig

SHARED_POOL = "scorer"
MAX_GROUPS_PER_CALL = 32
"""Groups of one call, so that a slow reward still spreads over the pool."""

Group = TypeVar("Group")


def split_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, RewardConfig]]:
    """The rewards of each pool; those without processes of their own share one."""
    shared = {name: reward for name, reward in rewards.items() if reward.num_processes is None}
    pools = {SHARED_POOL: shared} if shared else {}
    own = {name: reward for name, reward in rewards.items() if reward.num_processes is not None}
    return pools | {f"reward-{name}": {name: reward} for name, reward in own.items()}


def pool_size(scoring: ScoringConfig, members: Mapping[str, RewardConfig]) -> int:
    """Processes of the pool that scores ``members``."""
    own = next(iter(members.values())).num_processes
    return scoring.num_processes if own is None else own


def split_calls(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Groups that were finished together, as the calls by which a pool of ``size`` processes scores them."""
    share = min(max(1, -(-len(groups) // size)), MAX_GROUPS_PER_CALL)
    return [groups[start : start + share] for start in range(0, len(groups), share)]
