"""Tests of the cache of groups that are replayed: after a restart it holds what it held before."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from rlpipe.configs.schema.algorithm_config import ReplayPolicyConfig
from rlpipe.replay.ledger.run_ledger import TakenStep
from rlpipe.replay.replay_cache import ReplayCache


@dataclass
class Group:
    """A group without rollouts."""

    group_id: int
    has_signal: bool


def make_cache(limit: int) -> ReplayCache:
    def has_signal(group: Any) -> bool:
        return bool(group.has_signal)

    return ReplayCache(limit=limit, policy=ReplayPolicyConfig(), has_signal=has_signal)


@pytest.mark.parametrize("seed", range(100))
def test_the_cache_is_restored_as_it_was(seed: int) -> None:
    """Run random steps, and drop the tokens of old groups that nothing needs any more, as checkpoints do."""
    rng = random.Random(seed)
    limit, per_step, keep_steps = rng.randint(1, 5), rng.randint(1, 3), rng.randint(0, 2)
    cache, groups, with_tokens = make_cache(limit), {}, set()
    steps: list[TakenStep] = []
    for step in range(12):
        ids = [step * per_step + index for index in range(per_step)]
        fresh: list[Any] = [Group(group_id, rng.random() < 0.6) for group_id in ids]
        replayed = [group.group_id for group in cache.replacements_for(fresh)]
        cache.keep(fresh)
        steps.append(TakenStep(ids, replayed))
        groups |= {group.group_id: group for group in fresh}
        with_tokens |= {*ids}
        if rng.random() < 0.4:
            first_kept = step + 1 - keep_steps
            needed = {group_id for later in steps[max(first_kept, 0) :] for group_id in later.replayed}
            needed |= {*cache.ids}
            with_tokens = {entry for entry in with_tokens if entry // per_step >= first_kept or entry in needed}

    def load(group_ids: list[int]) -> Iterable[Any]:
        return (groups[group_id] for group_id in group_ids)

    restored = make_cache(limit)
    restored.restore(
        [TakenStep([entry for entry in step.fresh if entry in with_tokens], step.replayed) for step in steps], load
    )
    assert restored.ids == cache.ids
