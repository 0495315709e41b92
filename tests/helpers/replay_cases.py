"""Small groups, as engines and scorers would return them, and stores with a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.common.run_files import LEDGER
from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig, ReplayPolicyConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import ReplayConfig
from rlpipe.data.sources.row_source import Cursor
from rlpipe.replay.buffer import GroupTicket
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.replay.store import Outcome, ReplayStore
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import NO_VERSION, Prompt, Rollout, RolloutGroup

REWARD = "right"
RUN_CONFIG: dict[str, Any] = {
    "algorithm": {"num_steps": 100, "groups_per_step": 2},
    "learner": {"schedule": {"name": "constant"}},
    "replay": {"max_staleness": 2},
    "seed": 0,
    "weights": {"every_steps": 1},
}


def group(
    group_id: int,
    rewards: list[float | None],
    *,
    lengths: list[int] | None = None,
    version: int = 0,
    scored: bool = True,
) -> RolloutGroup:
    """Return a group with a prompt of two tokens and one completion per reward, by default of three tokens."""
    lengths = lengths or [3] * len(rewards)
    prompt = Prompt(prompt_id=group_id, epoch=0, token_ids=np.array([7, 8], np.int32), prompt="p", task={})
    rollouts = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        mask = np.array([False, False] + [True] * length)
        rollouts.append(
            Rollout(
                group_id=group_id,
                sample_index=index,
                prompt_id=group_id,
                task={},
                token_ids=np.arange(2 + length, dtype=np.int32),
                loss_mask=mask,
                logprobs=np.zeros(2 + length, np.float32),
                policy_versions=np.where(mask, version, NO_VERSION).astype(np.int32),
                rewards={REWARD: reward} if scored else {},
                reward=reward if scored else None,
            )
        )
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


def admitted(group_id: int, version: int = 0, *, attempt: int = 0) -> GroupTicket:
    return GroupTicket(
        group_id=group_id, version=version, epoch=0, position=group_id, prompt_id=group_id, attempt=attempt
    )


def open_store(
    folder: Path,
    *,
    groups_per_step: int = 2,
    num_steps: int = 100,
    max_staleness: int = 1,
    keep_steps: int = 10,
    fail: str = "skip_group",
    replay: ReplayConfig | None = None,
    policy: ReplayPolicyConfig | None = None,
    advantage: str = "grpo",
) -> ReplayStore:
    """Open a store on the ledger in ``folder``, which is created if it is missing."""
    return ReplayStore(
        Ledger(folder / LEDGER, keep_steps=keep_steps),
        algorithm=AlgorithmConfig(
            groups_per_step=groups_per_step,
            num_steps=num_steps,
            replay=policy or ReplayPolicyConfig(),
            advantage=AdvantageConfig(path=advantage) if ":" in advantage else AdvantageConfig(name=advantage),
        ),
        learner=LearnerConfig(max_tokens_per_microbatch=64),
        replay=replay or ReplayConfig(max_staleness=max_staleness),
        rewards={REWARD: RewardConfig(path="none", fail=fail)},
        seed=0,
        num_samples=1,
    )


def admit(store: ReplayStore, *group_ids: int, version: int = 0, attempt: int = 0) -> None:
    """Admit the prompts at the positions that equal the ids."""
    place = Cursor(epoch=0, position=max(group_ids) + 1)
    store.admit([admitted(group_id, version, attempt=attempt) for group_id in group_ids], place)


def score(store: ReplayStore, group_id: int, rewards: list[float | None]) -> Outcome:
    scores = GroupScores(group_id=group_id, scores={REWARD: rewards})
    return store.scored([group_id], [[scores]])


def bring(store: ReplayStore, group_id: int, rewards: list[float | None], *, version: int = 0) -> Outcome:
    """Generate and score an admitted group."""
    store.generated([group(group_id, list(rewards), version=version, scored=False)])
    return score(store, group_id, rewards)
