"""A pool of scorers that Ray Serve serves, imported only where one is used: Serve takes a second to import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rlpipe.actors.remote import call_in_thread, check_lost, wait_within
from rlpipe.actors.served import ScorerHung
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import RlpipeError, RunError, WaitTimeout
from rlpipe.run.scoring_pools import ScoringPool
from rlpipe.scoring.scorer import GroupScores
from rlpipe.scoring.validation import describe_exception

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths of replicas after which a request for a group fails."""
RETRY_PAUSE_S = 0.5


class ServedPool(ScoringPool):
    """Pool that sends one group per request; the replicas combine requests into batches.

    A request whose replica dies is repeated: Serve starts another replica, and the group waits for it, for at most
    ``start_timeout_s`` plus the time limit of scoring. The number of concurrent requests is limited to what the
    replicas can accept, so that further ones wait in this process.
    """

    def __init__(
        self, name: str, rewards: Mapping[str, RewardConfig], *, deploy: Callable[[], Any], start_timeout_s: float
    ) -> None:
        super().__init__(rewards, size=1)
        serve = next(iter(rewards.values())).serve
        self._name, self._deploy, self._start_timeout_s = name, deploy, start_timeout_s
        self._answer_timeout_s = start_timeout_s + 2 * serve.batch_groups * self._timeout_s
        self._requests = asyncio.Semaphore(2 * serve.batch_groups * (serve.max_replicas or serve.replicas))
        self._handle: Any = None

    async def start(self) -> None:
        """Deploy the replicas; raise ``WaitTimeout`` if they are late, ``RunError`` if they can't start."""
        try:
            self._handle = await wait_within(self._start_timeout_s, call_in_thread(self._deploy))
        except TimeoutError:
            raise WaitTimeout(
                f"the replicas of {self._name} have not started within "
                f"cluster.start_timeout_s={self._start_timeout_s:g} seconds"
            ) from None
        except (RuntimeError, RayServeException) as error:
            raise RunError(f"the replicas of {self._name} can't start: {describe_exception(error)}") from None

    async def score(self, groups: ObjectRef, group_ids: Mapping[int, int]) -> list[GroupScores]:
        results = await asyncio.gather(*(self._score_chunk(groups, [index], group_ids) for index in group_ids))
        return [scores for result in results for scores in result]

    async def _score_chunk(
        self, groups: ObjectRef, chunk: Sequence[int], group_ids: Mapping[int, int]
    ) -> list[GroupScores]:
        (index,) = chunk
        scores = await self._request_scores(groups, index, alone=False)
        if isinstance(scores, str):  # another group of the batch may be the cause
            scores = await self._request_scores(groups, index, alone=True)
        return [self.failed(group_ids[index], scores)] if isinstance(scores, str) else scores

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        return await self._request_scores(groups, *indices, alone=True)

    async def _request_scores(self, groups: ObjectRef, index: int, *, alone: bool) -> list[GroupScores] | str:
        num_deaths = 0
        while True:
            async with self._requests:
                try:
                    request: Any = self._handle.score.remote(groups, index, alone)
                    scores: list[GroupScores] = await wait_within(self._answer_timeout_s, request)
                    return scores
                except TimeoutError:
                    return f"no replica of {self._name} answered within {self._answer_timeout_s:g} seconds"
                except RayTaskError as error:
                    check_lost(error, f"{self._name} to score a group")
                    cause = getattr(error, "cause", error)
                    if isinstance(cause, RlpipeError):
                        raise
                    return str(cause) if isinstance(cause, ScorerHung) else describe_exception(cause)
                except (RayServeException, RayError) as error:
                    check_lost(error, f"{self._name} to score a group")
                    num_deaths += 1
                    logger.warning("scoring: a replica of %s died: %s", self._name, describe_exception(error))
                    if num_deaths == MAX_DEATHS:
                        return f"{MAX_DEATHS} replicas of {self._name} died while they scored it"
            await asyncio.sleep(RETRY_PAUSE_S)
