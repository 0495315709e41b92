"""Groups of earlier steps that are trained again instead of groups without signal, and how they are chosen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.algorithms.plugins import REPLAY, call_function, own_error, registrar
from rlpipe.configs.schema.algorithm_config import ReplayPolicyConfig
from rlpipe.replay.ledger.run_ledger import TakenStep
from rlpipe.types import RolloutGroup


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayInputs:
    """The step that kept groups are chosen for."""

    groups: Sequence[RolloutGroup]
    """The new groups of the step."""
    num_wanted: int
    """Number of them whose rewards are all equal, each of which a kept group may replace."""
    config: ReplayPolicyConfig


ReplayPolicy = Callable[[Sequence[RolloutGroup], ReplayInputs], list[RolloutGroup]]
"""Function that chooses at most ``num_wanted`` of the kept groups, which are given with the oldest first."""
REPLAY_POLICIES: dict[str, ReplayPolicy] = {}
"""The built-in policies by ``algorithm.replay.name``."""
register_replay_policy = registrar(REPLAY_POLICIES)


@register_replay_policy("newest")
def newest(kept: Sequence[RolloutGroup], inputs: ReplayInputs) -> list[RolloutGroup]:
    """Choose the groups that were sampled last."""
    return list(reversed(kept))[: inputs.num_wanted]


@register_replay_policy("most_spread")
def most_spread(kept: Sequence[RolloutGroup], inputs: ReplayInputs) -> list[RolloutGroup]:
    """Choose the groups whose rewards have the largest standard deviation; of equal ones the newer."""
    spreads = [np.std([rollout.reward for rollout in group.sampled if rollout.reward is not None]) for group in kept]
    order = sorted(range(len(kept)), key=lambda index: (spreads[index], index), reverse=True)
    return [kept[index] for index in order[: inputs.num_wanted]]


def own_choice(kept: Sequence[RolloutGroup], inputs: ReplayInputs) -> list[RolloutGroup]:
    """Return the groups that the user's function chooses; raise ``RunError`` if they are not some of the kept ones."""
    config = inputs.config
    chosen = call_function(config, REPLAY, list(kept), inputs)
    if not isinstance(chosen, list | tuple) or not all(isinstance(group, RolloutGroup) for group in chosen):
        raise own_error(config, REPLAY, f"returned {chosen!r:.80}, not a list of kept groups")
    ids, by_id = [group.group_id for group in chosen], {group.group_id: group for group in kept}
    if not {*ids} <= by_id.keys() or len({*ids}) < len(ids):
        raise own_error(config, REPLAY, f"returned the groups {ids}, which are not different ones of the kept groups")
    if len(ids) > inputs.num_wanted:
        raise own_error(config, REPLAY, f"returned {len(ids)} groups, and inputs.num_wanted is {inputs.num_wanted}")
    return [by_id[group_id] for group_id in ids]


class ReplayCache:
    """Cache of the newest ``limit`` groups with differing rewards; each is handed out once.

    ``policy`` says which ones are handed out.
    """

    def __init__(self, *, limit: int, policy: ReplayPolicyConfig, has_signal: Callable[[RolloutGroup], bool]) -> None:
        self._policy, self._has_signal = policy, has_signal
        self._groups: deque[RolloutGroup] = deque(maxlen=limit)

    @property
    def ids(self) -> list[int]:
        return [group.group_id for group in self._groups]

    def keep(self, groups: Iterable[RolloutGroup]) -> None:
        if self._groups.maxlen:
            self._groups.extend(group for group in groups if self._has_signal(group))

    def restore(self, steps: Sequence[TakenStep], load: Callable[[list[int]], Iterable[RolloutGroup]]) -> None:
        """Fill the cache as the steps left it, which ran in this order; ``load`` returns groups by their ids.

        Groups that were replayed had signal. Of the others only the newest are loaded, up to as many with signal as
        the cache holds: none before them can be in it.
        """
        limit, replayed = self._groups.maxlen or 0, {group_id for step in steps for group_id in step.replayed}
        loaded: dict[int, RolloutGroup] = {}
        first = len(steps)
        while first > 0 and len(loaded) < limit:
            first -= 1
            groups = load([group_id for group_id in steps[first].fresh if group_id not in replayed])
            loaded |= {group.group_id: group for group in groups if self._has_signal(group)}
        ids: deque[int] = deque(maxlen=limit)
        for step in steps[first:]:
            ids = deque((group_id for group_id in ids if group_id not in step.replayed), limit)
            ids.extend(group_id for group_id in step.fresh if group_id in loaded or group_id in replayed)
        self._groups.extend(loaded[group_id] for group_id in ids if group_id in loaded)

    def replacements_for(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return a kept group for each of ``groups`` without reward variance, or fewer if not enough are kept."""
        num_wanted = sum(not self._has_signal(group) for group in groups) if self._groups else 0
        if not num_wanted:
            return []
        choose = REPLAY_POLICIES[self._policy.name] if self._policy.path is None else own_choice
        chosen = choose(tuple(self._groups), ReplayInputs(groups=groups, num_wanted=num_wanted, config=self._policy))
        ids = {group.group_id for group in chosen}
        self._groups = deque((group for group in self._groups if group.group_id not in ids), self._groups.maxlen)
        return chosen
