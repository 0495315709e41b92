"""Start of a run's actors: engines, scorers, replay actor, dataset actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from rlpipe.actors.dataset import DatasetActor, DatasetSetup
from rlpipe.actors.replay import HookActor, ReplayActor, ReplaySetup
from rlpipe.actors.reward import Engines, ScoringActor
from rlpipe.actors.rollout import QUESTIONS, TURNS, RolloutActor
from rlpipe.actors.weights import DirectWeightsActor, WeightsActor
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.plan.dtype_work import engine_products, learner_products
from rlpipe.preload import preloading
from rlpipe.replay.ledger.query import ledger_path
from rlpipe.run.cluster import (
    ASYNC_CALLS,
    ENGINE_CALLS,
    QUESTION_CALLS,
    TURN_CALLS,
    Reservation,
    ResourceRequest,
    end_actors,
    start_actor,
    until_ready,
    wait_started,
)
from rlpipe.run.engine_pool import EpisodePool
from rlpipe.run.prepare import ResumePoint, RewardLike, Run
from rlpipe.run.scoring_pools import LearnerPool, ScorerPool, ScoringPool, Spawn
from rlpipe.scoring.pools import FEATURE_PATH, RewardPool, resolve_pools, split_learner
from rlpipe.scoring.processes import MemoryLimit
from rlpipe.scoring.rewards import ENVIRONMENT_PATH
from rlpipe.tracking.phases import PHASES

if TYPE_CHECKING:
    from rlpipe.actors.served import GroupScorer
    from rlpipe.run.served_pool import ServedPool


@dataclass(kw_only=True, frozen=True)
class Workers:
    """Engines and scoring pools that are running or about to start."""

    engines: Mapping[str, ActorHandle]
    start_engine: Callable[[str], ObjectRef]
    """Makes an engine's process load its model."""
    pools: Sequence[ScoringPool]
    episodes: EpisodePool | None = None
    """Processes that play episodes, or None."""
    engines_share_gpus: bool = False
    """Whether an engine may share a GPU with others. vLLM measures the free memory of its GPU while it starts, so that
    engines then start one after another, and before the pools."""

    async def start(self, timeout_s: float) -> None:
        """Load the models of all engines and pools, and wait until they are ready; raise as ``until_ready``."""
        in_turn, together = (self.engines, ()) if self.engines_share_gpus else ((), self.engines)
        for name in in_turn:
            await self._start_engine(name, timeout_s)
        async with asyncio.TaskGroup() as tasks:
            for name in together:
                tasks.create_task(self._start_engine(name, timeout_s))
            tasks.create_task(self._start_pools())
            if self.episodes is not None:
                tasks.create_task(self.episodes.start())

    async def _start_pools(self) -> None:
        with PHASES.phase("loading rewards"):
            async with asyncio.TaskGroup() as tasks:
                for pool in self.pools:
                    tasks.create_task(pool.start())

    async def _start_engine(self, name: str, timeout_s: float) -> None:
        # Ray itself replaces a process that died and repeats the call, but not in every case.
        with PHASES.phase(f"loading engine {name}"):
            await until_ready(name, self.start_engine(name), lambda: (name, self.start_engine(name)), timeout_s)


_HOOK = ResourceRequest(name="hook")
COORDINATING: dict[str, Any] = {
    "max_concurrency": ASYNC_CALLS,
    "restarts": True,
    "repeats_calls": True,
    "on_driver_host": True,
}
"""Options of the actors that coordinate learner ranks and controller."""


def engine_needs(config: Config) -> list[ResourceRequest]:
    rollout, products = config.rollout, engine_products(config)
    return [
        ResourceRequest(
            name=f"rollout-{index}",
            num_cpus=rollout.num_cpus,
            num_gpus=rollout.num_gpus,
            resources=rollout.resources,
            remedy="lower rollout.num_engines, rollout.num_cpus or rollout.num_gpus, or join a larger cluster",
            products=products,
        )
        for index in range(rollout.num_engines)
    ]


def learner_needs(config: Config) -> list[ResourceRequest]:
    learner, products = config.learner, learner_products(config)
    return [
        ResourceRequest(
            name=f"learner-{rank}",
            num_cpus=learner.num_cpus,
            num_gpus=learner.num_gpus,
            resources=learner.resources,
            remedy="lower learner.num_ranks, learner.num_cpus or learner.num_gpus, or join a larger cluster",
            products=products,
        )
        for rank in range(learner.num_ranks)
    ]


def pool_need(pool: RewardPool) -> ResourceRequest:
    """Return the resources that one process of a pool requests."""
    if pool.is_served:
        name, remedy = f"replica-{pool.name}", "lower serve.replicas, num_cpus or num_gpus of what Ray Serve serves"
    else:
        name = pool.name
        remedy = "lower scoring.num_processes or the rewards' num_processes, num_cpus or num_gpus"
    return ResourceRequest(name=name, num_cpus=pool.num_cpus, num_gpus=pool.num_gpus, remedy=remedy)


def pool_needs(pools: Iterable[RewardPool], *, served: bool) -> list[ResourceRequest]:
    """Return the needs of the scoring processes that this run starts, or of the replicas that Ray Serve places."""
    needs = [(pool_need(pool), pool.size) for pool in pools if pool.is_served == served]
    return [replace(need, name=f"{need.name}-{index}") for need, size in needs for index in range(size)]


def episode_needs(config: Config) -> list[ResourceRequest]:
    """Return the needs of the processes that play episodes; none if the run has no environment."""
    count = config.environment.num_processes if config.environment.is_used else 0
    remedy = "lower environment.num_processes or environment.num_cpus"
    return [
        ResourceRequest(name=f"episodes-{index}", num_cpus=config.environment.num_cpus, remedy=remedy)
        for index in range(count)
    ]


def generation_needs(config: Config, rewards: Mapping[str, RewardConfig] | None = None) -> list[ResourceRequest]:
    """Return the needs of all processes that generate and score groups; ``rewards`` are by default the config's."""
    pools = resolve_pools(config, rewards).values()
    needs = [*engine_needs(config), *episode_needs(config)]
    return [*needs, *pool_needs(pools, served=False), *pool_needs(pools, served=True)]


def memory_limit(config: Config, members: Mapping[str, RewardConfig]) -> MemoryLimit | None:
    """Return the memory limit of each process of the pool that scores ``members``, or None."""
    name, reward = next(iter(members.items()))
    limit = MemoryLimit(option="scoring.memory_gb", gb=config.scoring.memory_gb) if config.scoring.memory_gb else None
    if reward.num_processes is None or reward.isolation == "sandbox" or reward.memory_gb == config.scoring.memory_gb:
        return limit
    return MemoryLimit(option=f"scoring.rewards.{name}.memory_gb", gb=reward.memory_gb) if reward.memory_gb else None


@contextmanager
def open_served_pools(run: Run, engines: Engines, cluster_is_own: bool) -> Iterator[list[ServedPool]]:
    """Yield the pools of rewards that Ray Serve serves, not deployed yet.

    Their applications end with the context, or with the cluster if it is the run's own.
    """
    served = [pool for pool in resolve_pools(run.config, run.rewards).values() if pool.is_served]
    if not served:
        yield []
        return
    from rlpipe.actors.served import Lease, end_apps, start_serve  # Ray Serve takes a second to import

    lease = start_actor(Lease, ResourceRequest(name="lease"), on_driver_host=True)
    started = start_serve()
    pools = {f"{run.config.name}-{pool.name}-{uuid4().hex[:8]}": pool for pool in served}
    try:
        yield [_served_pool(run, pool.name, pool.members, app, lease, engines) for app, pool in pools.items()]
    finally:
        if not cluster_is_own:
            end_apps(list(pools), whole=started)


def _served_pool(
    run: Run, name: str, members: Mapping[str, RewardConfig], app: str, lease: ActorHandle, engines: Engines
) -> ServedPool:
    from rlpipe.actors.served import ServedSetup, deploy
    from rlpipe.run.served_pool import ServedPool

    config, reward = run.config, next(iter(members.values()))
    setup = ServedSetup(
        app=app,
        make=_scorer_maker(run, members, engines),
        folder=os.getcwd(),
        serve=reward.serve,
        timeout_s=reward.timeout_s,
        lease=lease,
    )
    return ServedPool(
        name,
        members,
        deploy=partial(deploy, setup, num_cpus=reward.num_cpus, num_gpus=reward.num_gpus),
        start_timeout_s=config.cluster.start_timeout_s,
    )


def _scorer_maker(run: Run, members: Mapping[str, RewardConfig], engines: Engines) -> Callable[[], GroupScorer]:
    """Return a function that makes a replica's scorer, called in the replica."""
    from rlpipe.actors.served import make_features, make_scorer

    if next(iter(members.values())).path == FEATURE_PATH:
        # It holds its own copy of the model, perhaps on another kind of device than the policy.
        model = replace(run.model, dtype=run.requested_dtype)
        return partial(make_features, model, run.config.algorithm.ebft.features)
    return partial(
        make_scorer, dict(members), _callables_of(run, members), run.model, run.config.algorithm.num_steps, engines
    )


@contextmanager
def open_workers(run: Run, replay: ActorHandle | None = None, *, cluster_is_own: bool = False) -> Iterator[Workers]:
    """Start the processes of engines and scorers, which have loaded nothing yet; end them with the context.

    ``replay`` is the replay actor, through which groups reach the learner if it computes rewards. ``cluster_is_own``
    says that the cluster ends with the run, so that Ray Serve's applications need not be ended.
    """
    config, cluster = run.config, run.config.cluster
    needs = {need.name: need for need in engine_needs(config)}
    actors_before = set(ray.util.list_named_actors())
    with ExitStack() as stack:
        scorer_needs = pool_needs(resolve_pools(config, run.rewards).values(), served=False)
        players = episode_needs(config)
        reservation = Reservation([*needs.values(), *players, *scorer_needs], cluster.schedule_timeout_s)
        stack.callback(reservation.release)
        stack.callback(end_actors, actors_before)
        engines = {
            name: start_actor(
                RolloutActor,
                need,
                name,
                reservation=reservation,
                max_concurrency=ENGINE_CALLS,
                concurrency_groups={
                    QUESTIONS: QUESTION_CALLS,
                    **({TURNS: TURN_CALLS + len(players)} if players else {}),
                },
                restarts=True,
                stage=preloading.engine_stage(config),
            )
            for name, need in needs.items()
        }
        engine_handles = Engines(actors=engines, chat_template_kwargs=config.data.chat_template_kwargs)
        served = stack.enter_context(open_served_pools(run, engine_handles, cluster_is_own))
        pools: list[ScoringPool] = [*start_pools(run, reservation, engine_handles), *served]
        if learner_rewards := split_learner(run.rewards):
            assert replay is not None, "without a learner, the features are those of a copy"
            pools.append(LearnerPool(learner_rewards, replay, cluster))

        def start_engine(name: str) -> ObjectRef:
            # Retried, so that the call waits for the new process if the old one is just ending.
            call: Any = engines[name].start.options(max_task_retries=3)
            ref: ObjectRef = call.remote(run.model, config.rollout, config.weights, config.data.max_prompt_tokens)
            return ref

        episodes = start_episodes(run, players, reservation, engines) if players else None
        yield Workers(
            engines=engines,
            start_engine=start_engine,
            pools=pools,
            episodes=episodes,
            engines_share_gpus=config.rollout.num_gpus % 1 > 0,
        )


def start_episodes(
    run: Run, needs: Sequence[ResourceRequest], reservation: Reservation, engines: Mapping[str, ActorHandle]
) -> EpisodePool:
    """Start the processes that play episodes, without waiting until they are ready."""
    from rlpipe.actors.episodes import EpisodeActor, EpisodeSetup  # imports an HTTP server, for agents

    setup = EpisodeSetup(
        config=replace(run.config, model=run.model),
        engines=engines,
        folder=os.getcwd(),
        is_scored=any(reward.path != ENVIRONMENT_PATH for reward in run.rewards.values()),
    )
    processes = {
        need.name: start_actor(
            EpisodeActor, need, need.name, reservation=reservation, max_concurrency=ASYNC_CALLS, restarts=True
        )
        for need in needs
    }

    def start(name: str) -> ObjectRef:
        call: Any = processes[name].start.options(max_task_retries=3)
        ref: ObjectRef = call.remote(setup)
        return ref

    return EpisodePool(processes, start=start, cluster=run.config.cluster)


def start_pools(run: Run, reservation: Reservation, engines: Engines) -> list[ScorerPool]:
    """Start the scoring actors, without waiting until they are ready."""
    return [
        ScorerPool(
            pool.name,
            pool.members,
            size=pool.size,
            spawn=_spawner(run, pool.members, pool_need(pool), reservation, engines),
            start_timeout_s=run.config.cluster.start_timeout_s,
            memory=memory_limit(run.config, pool.members),
        )
        for pool in resolve_pools(run.config, run.rewards).values()
        if not pool.is_served
    ]


def start_dataset(run: Run, start: ResumePoint) -> ActorHandle:
    """Start the actor that serves supervised rows, and wait until it has opened them."""
    config, need = run.config, ResourceRequest(name="dataset")
    setup = DatasetSetup(
        data=config.data,
        model=run.model,
        algorithm=config.algorithm,
        learner=config.learner,
        seed=config.seed,
        folder=os.getcwd(),
        first_step=start.step,
        cursor=start.cursor,
        num_rows=None if config.resume_changes == "allow" else start.num_rows,
    )
    dataset = start_actor(DatasetActor, need, setup, **COORDINATING)
    started: ObjectRef = dataset.start.remote()
    wait_started(need.name, started, config.cluster.start_timeout_s)
    return dataset


@contextmanager
def open_hook(run: Run) -> Iterator[None]:
    """Keep the actor of the user's hook, which the replay actor finds by its name, until the context exits."""
    path = run.config.scoring.on_rollouts_scored
    if path is None:
        yield
        return
    hook = start_actor(HookActor, _HOOK, path, os.getcwd(), restarts=True, on_driver_host=True)
    yield
    del hook  # Ray ends an actor with its last handle


def start_replay(run: Run) -> ActorHandle:
    """Start the replay actor, which has no ledger yet."""
    setup = ReplaySetup.of(run.config, ledger_path(run.output, run.config.name, run.config.ledger.folder), run.rewards)
    if run.config.scoring.on_rollouts_scored is not None:
        setup = replace(setup, hook=_HOOK.name)
    return start_actor(ReplayActor, ResourceRequest(name="replay"), setup, **COORDINATING)


def start_weights(config: Config, engines: Mapping[str, ActorHandle]) -> ActorHandle:
    """Start the actor that passes weights to the engines."""
    need, names, timeout_s = ResourceRequest(name="weights"), list(engines), config.weights.timeout_s
    if config.weights.transport == "object_store":
        return start_actor(WeightsActor, need, engines=names, timeout_s=timeout_s, **COORDINATING)
    workers = config.rollout.tensor_parallel_size
    return start_actor(
        DirectWeightsActor, need, engines=names, timeout_s=timeout_s, workers_per_engine=workers, **COORDINATING
    )


def _callables_of(run: Run, members: Mapping[str, RewardConfig]) -> dict[str, RewardLike]:
    """Return the rewards among ``members`` that the caller passed as objects."""
    return {name: run.callables[name] for name in members if name in run.callables}


def _spawner(
    run: Run, members: Mapping[str, RewardConfig], need: ResourceRequest, reservation: Reservation, engines: Engines
) -> Spawn:
    callables = _callables_of(run, members)
    memory = memory_limit(run.config, members)

    def spawn(name: str, bundle: str) -> tuple[ActorHandle, ObjectRef]:
        actor = start_actor(ScoringActor, replace(need, name=name), name, reservation=reservation, bundle=bundle)
        started: ObjectRef = actor.start.remote(
            dict(members), callables, run.model, run.config.algorithm.num_steps, os.getcwd(), memory, engines
        )
        return actor, started

    return spawn
