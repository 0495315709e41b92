"""The scoring pool without processes of its own: the learner's ranks score its groups between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from rlpipe.actors.remote import answer
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.configs.schema.scoring_config import RewardConfig
from rlpipe.errors import WaitTimeout
from rlpipe.run.scorer_pool import ScoringPool
from rlpipe.scoring.scorer import GroupScores


class LearnerPool(ScoringPool):
    """Pool that passes groups to the replay actor, where the ranks fetch them once their current step ends."""

    def __init__(self, rewards: Mapping[str, RewardConfig], replay: ActorHandle, cluster: ClusterConfig) -> None:
        super().__init__(rewards, size=1)
        self._replay = replay
        self._limit_s = cluster.start_timeout_s + cluster.step_timeout_s

    async def start(self) -> None:
        """Do nothing, because the ranks are started by the learner group."""

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        call: Any = self._replay.score_features.remote(groups, list(indices))
        try:
            scores: list[GroupScores] = await answer(
                call,
                f"the learner to score {len(indices)} groups",
                within=self._limit_s,
                option="cluster.start_timeout_s and cluster.step_timeout_s",
            )
        except WaitTimeout as late:
            return str(late)
        return scores
