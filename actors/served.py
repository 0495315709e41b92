"""A scorer as a Ray Serve deployment, whose replicas score groups in batches and exit if they hang."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException

from rlpipe.actors.reward import Engines, open_chat
from rlpipe.common.imports import enter_folder
from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.scoring.processes import start_reaper
from rlpipe.scoring.rewards import Reward
from rlpipe.scoring.scorer import GroupScores, Scorer
from rlpipe.types import RolloutGroup

logger = logging.getLogger(__name__)

DRAIN_S = 0.5
"""Seconds before a hung replica exits, so that its last answer gets out."""
LEASE_POLL_S = 5.0
LEASE_TIMEOUT_S = 60.0
MAX_STARTS = 3
"""Number of times that replicas may fail to start before the application is given up."""


class GroupScorer(Protocol):
    """Any object that scores groups, such as a scorer of rewards."""

    def score(self, groups: Sequence[RolloutGroup]) -> list[GroupScores]: ...


class ScorerHung(Exception):
    """Error raised when a replica has not scored its groups in time."""


@dataclass(kw_only=True, frozen=True)
class ServedSetup:
    """Settings of a replica; ``make`` creates its scorer, ``folder`` is the driver's working directory."""

    app: str
    make: Callable[[], GroupScorer]
    folder: str
    serve: ServeConfig
    timeout_s: float
    """Seconds allowed for scoring one group."""
    lease: ActorHandle
    """Actor that lives as long as the run."""


class Lease:
    """Actor of the driver's job that ends with the job, however that ends."""

    def ping(self) -> None: ...


class ServedScorer:
    """Replica that scores groups, alone or in batches."""

    def __init__(self, setup: ServedSetup) -> None:
        enter_folder(setup.folder)
        start_reaper()
        self._setup = setup
        self._scorer = setup.make()
        self._scoring = asyncio.Lock()
        together: Any = self._score_together
        together.set_max_batch_size(setup.serve.batch_groups)
        together.set_batch_wait_timeout_s(setup.serve.batch_wait_s)
        threading.Thread(target=self._watch_lease, name="lease", daemon=True).start()

    async def score(self, groups: Sequence[RolloutGroup], index: int, alone: bool) -> list[GroupScores]:
        """Score ``groups[index]`` if the engine could sample it, ``alone`` or in a batch with others."""
        group = groups[index]
        if group.failure is not None:
            return []
        return await self._score([group]) if alone else [await self._score_together(group)]

    @serve.batch
    async def _score_together(self, groups: list[RolloutGroup]) -> list[GroupScores]:
        return await self._score(groups)

    async def _score(self, groups: list[RolloutGroup]) -> list[GroupScores]:
        limit = self._setup.timeout_s * len(groups)
        try:
            async with self._scoring:
                scoring = asyncio.get_running_loop().run_in_executor(None, self._scorer.score, groups)
                async with asyncio.timeout(limit):
                    return await asyncio.shield(scoring)
        except TimeoutError:
            # The scoring thread can't be ended, so the process exits, and Serve replaces this replica.
            asyncio.get_running_loop().call_later(DRAIN_S, os._exit, 1)
            limit_text = f"{limit:g} seconds (timeout_s) for {len(groups)} groups"
            raise ScorerHung(f"a replica of {self._setup.app} took longer than {limit_text}") from None

    def _watch_lease(self) -> None:
        """Delete the deployment if the run ends without doing so: deployments outlive the job that made them."""
        while True:
            time.sleep(LEASE_POLL_S)
            try:
                ray.get(self._setup.lease.ping.remote(), timeout=LEASE_TIMEOUT_S)
            except GetTimeoutError:
                continue  # slow, or silent until Ray takes its node for dead
            except RayActorError:
                logger.warning("%s is removed, because its run has ended", self._setup.app)
                serve.delete(self._setup.app, _blocking=False)
                return


def make_scorer(
    rewards: Mapping[str, RewardConfig],
    callables: Mapping[str, Reward],
    model: ModelConfig,
    num_steps: int,
    engines: Engines | None = None,
) -> GroupScorer:
    """Return the scorer of a replica; runs in the replica."""
    tokenizer = load_tokenizer(model)
    return Scorer(rewards, tokenizer, callables, num_steps, open_chat(engines, tokenizer, model))


def make_features(model: ModelConfig, config: FeatureConfig) -> GroupScorer:
    """Return EBFT's scorer, with a feature network of its own."""
    from rlpipe.scoring.feature_scorer import make_feature_scorer  # the driver needs no model

    return make_feature_scorer(model, config)


def start_serve() -> bool:
    """Start Ray Serve without its HTTP proxies if it is not running, and return whether it was started."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        serve.start(proxy_location="Disabled")
        return True
    return False


def end_apps(apps: Sequence[str], *, whole: bool) -> None:
    """Delete applications, and with ``whole`` shut Ray Serve down too, unless it serves other applications."""
    with suppress(RayServeException, RayError):  # if Serve is gone, so are its applications
        applications = serve.status().applications
        for app in apps:
            if app in applications:
                serve.delete(app)
        if whole and not applications.keys() - set(apps):
            serve.shutdown()


def deploy(setup: ServedSetup, *, num_cpus: float, num_gpus: float) -> Any:
    """Deploy the replicas, wait until they have loaded their scorers, and return Serve's handle.

    Raises ``RuntimeError`` with Serve's messages if they can't start.
    """
    config = setup.serve
    most = config.max_replicas or config.replicas
    options: dict[str, Any] = {"num_replicas": config.replicas}
    if most > config.replicas:
        options = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": most,
                "target_ongoing_requests": config.batch_groups,
            }
        }
    served: Any = serve.deployment(ServedScorer)
    deployment = served.options(
        name="scorer",
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=2 * config.batch_groups,  # the next batch waits at the replica
        health_check_period_s=config.health_check_s,
        graceful_shutdown_timeout_s=DRAIN_S,
        max_constructor_retry_count=MAX_STARTS,
        **options,
    )
    try:
        return serve.run(deployment.bind(setup), name=setup.app, route_prefix=None)
    except RuntimeError as error:
        application = serve.status().applications.get(setup.app)
        messages = [state.message for state in application.deployments.values()] if application else [str(error)]
        # A replica's own error is the last line of a traceback.
        raise RuntimeError("; ".join(message.strip().splitlines()[-1] for message in messages if message)) from None
