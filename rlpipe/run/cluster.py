"""Joins or starts the Ray cluster, checks that the run fits on it, and starts actors that answer."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef, PlacementGroupID
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.actors.remote import describe_failure, root_cause
from rlpipe.configs.schema.root_config import ClusterConfig, Config
from rlpipe.errors import ConfigError, RunError, WaitTimeout
from rlpipe.hardware.dtype_speed import Products
from rlpipe.preload import preloading
from rlpipe.run.host_watch import leave_to_watch

logger = logging.getLogger(__name__)

ENGINE_CALLS = 4
"""Calls that a rollout actor answers at one time: a waiting collect, a load, a submission, a health check."""
QUESTION_CALLS = 128
"""Questions of scoring processes that it answers at one time besides."""
ASYNC_CALLS = 1000
"""Calls that an actor of coroutines answers at one time."""
END_TIMEOUT_S = 60.0
"""Seconds that the actors of a run may take to end."""


@dataclass(kw_only=True, frozen=True)
class Need:
    """What one process of the run asks of the cluster."""

    name: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    remedy: str = "lower what the config asks for, or join a larger cluster"
    products: Products | None = None
    """What it computes most of on a CPU, by whose speed ``dtype=auto`` chooses a type."""

    @property
    def all_resources(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}

    @property
    def asked(self) -> dict[str, float]:
        """Those of them that are not 0."""
        return {name: amount for name, amount in self.all_resources.items() if amount}


def connect(cluster: ClusterConfig, needs: Sequence[Need]) -> bool:
    """Joins the cluster of the config or of RAY_ADDRESS, else starts a local one, and says whether it has.

    Raises ``ConfigError`` if the run asks for more than there is, and ``RunError`` if Ray does not start.
    """
    address = cluster.address or os.environ.get("RAY_ADDRESS") or None
    starts = address is None and not ray.is_initialized()
    if not ray.is_initialized():
        leave_to_watch()
        # Ray says at warning level that its own cluster asks for a token, which it then hands out by itself.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        options: dict[str, Any] = {"log_to_driver": cluster.log_to_driver, "logging_level": logging.WARNING}
        if address is None:
            wanted = sum(need.num_cpus for need in needs)
            options["num_cpus"] = cluster.num_cpus or max(os.cpu_count() or 1, int(wanted + 0.999))
            os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, a browser would starve the run
        try:
            with preloading.used_by_ray():
                ray.init(address or "local", **options)
        except ConnectionError as error:
            raise ConfigError(
                f"cluster.address={address}: no Ray cluster answers there ({error}); "
                "one that asks for a token needs RAY_AUTH_MODE=token in the environment"
            ) from None
        except Exception as error:  # Ray raises a bare one where its processes are not up in time
            if address is not None:
                raise
            raise RunError(
                f"Ray did not start on this machine ({error}); its logs are under /tmp/ray/session_latest/logs: "
                "run again, or start it with `ray start --head` and set cluster.address=auto"
            ) from None
    check_fit(needs, ray.cluster_resources())
    return starts


def check_fit(needs: Sequence[Need], available: Mapping[str, float]) -> None:
    """Raises ``ConfigError`` naming the resource, the parts that ask for it, and what the cluster has."""
    total: Counter[str] = Counter()
    for need in needs:
        total.update(need.asked)
    for resource, wanted in total.items():
        has = available.get(resource, 0.0)
        if wanted > has + 1e-9:
            askers = [need for need in needs if need.all_resources.get(resource)]
            parts = ", ".join(f"{need.name} {need.all_resources[resource]:g}" for need in askers)
            raise ConfigError(
                f"the run needs {wanted:g} {resource} ({parts}) but the cluster has {has:g}: {askers[0].remedy}"
            )


class Reservation:
    """Places on the cluster, one for each need, that are held until ``release``.

    Raises ``WaitTimeout`` with what is asked for and what is free if the cluster can't hold them all in time; what
    the cluster has in all is checked before, by ``check_fit``.
    """

    def __init__(self, needs: Sequence[Need], timeout_s: float) -> None:
        self._bundles = {need.name: need.asked for need in needs if need.asked}
        self._index = {name: index for index, name in enumerate(self._bundles)}
        self._group = placement_group(list(self._bundles.values())) if self._bundles else None
        if self._group is not None and not self._group.wait(timeout_s):
            timeout = no_room(self._bundles, timeout_s)
            self.release()
            raise timeout

    def place(self, name: str) -> dict[str, Any]:
        """The options that put an actor into the place of the need of that name."""
        if self._group is None or name not in self._index:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index[name])
        return {"scheduling_strategy": strategy}

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def placement_groups() -> set[str]:
    """Ids of those that this driver's job holds; an id ends with the job's."""
    job = ray.get_runtime_context().get_job_id()
    table = placement_group_table()
    return {group for group, entry in table.items() if group.endswith(job) and entry["state"] != "REMOVED"}


def release_placement_groups(ids: Set[str]) -> None:
    """For those whose owner has died: Ray keeps them until the job ends."""
    for group in ids:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def no_room(asked: Mapping[str, Mapping[str, float]], timeout_s: float) -> WaitTimeout:
    """The error for processes, with what each asks, that found no place in time."""
    return WaitTimeout(
        f"the cluster had no room for {asked} within cluster.schedule_timeout_s={timeout_s:g} seconds: it has "
        f"{_readable(ray.cluster_resources())}, free are {_readable(ray.available_resources())}; "
        "end other work, or ask for less"
    )


def start_actor(
    actor_class: type,
    need: Need,
    *args: Any,
    reservation: Reservation | None = None,
    place: str | None = None,
    max_concurrency: int | None = None,
    concurrency_groups: Mapping[str, int] | None = None,
    restarts: bool = False,
    repeats_calls: bool = False,
    beside_driver: bool = False,
    stage: str | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """Starts an actor whose name on the dashboard is that of the need, in its reserved place or that of ``place``.

    ``concurrency_groups`` are calls of their own, beside those of ``max_concurrency``. Where it ``restarts``, Ray puts
    another process in the place of a dead one; where it also ``repeats_calls``, that one gets the calls which the dead
    one had not answered. ``beside_driver`` places it on the driver's host, so that no other host's death concerns it.
    ``stage`` is the one of ``rlpipe.preload`` that a local process is forked from.
    """
    options: dict[str, Any] = {"name": need.name, "num_cpus": need.num_cpus, "num_gpus": need.num_gpus}
    # Ray's head keeps 3 KB of every call it traces, up to 100,000 calls; a run makes several for every group.
    options["enable_task_events"] = False
    options |= {"max_restarts": -1 if restarts else 0, "max_task_retries": -1 if repeats_calls else 0}
    if need.resources:
        options["resources"] = dict(need.resources)
    if max_concurrency:
        options["max_concurrency"] = max_concurrency
    if stage is not None and (variables := preloading.stage_variables(stage)):
        options["runtime_env"] = {"env_vars": dict(variables)}
    if beside_driver:
        # Ray forgets a NodeAffinitySchedulingStrategy where an actor asks for no resources.
        options["label_selector"] = {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    if reservation is not None:
        options |= reservation.place(place or need.name)
    remote: Any = ray.remote
    remote_class: Any = remote(concurrency_groups=dict(concurrency_groups or {}))(actor_class)
    actor: ActorHandle = remote_class.options(**options).remote(*args, **kwargs)
    return actor


def shares_gpus(config: Config) -> bool:
    """Whether an engine and a learner rank may be placed on the same GPU: both ask for a part of one."""
    return config.rollout.num_gpus % 1 > 0 and config.learner.num_gpus % 1 > 0


MAX_STARTS = 3
"""Processes that may die at their start, one after the other, in one place."""
RESTART_PAUSE_S = 1.0
"""Before the next of them starts: Ray may not know yet that the last one is dead."""


class DiedAtStart(RunError):
    """The process of an actor ended, or went out of Ray's reach, before it was ready."""


async def until_ready(
    name: str, start: ObjectRef, start_again: Callable[[], tuple[str, ObjectRef]], timeout_s: float
) -> None:
    """Waits for the ``start()`` of an actor; has another process start where that one dies, which may have a new name.

    Raises the actor's own error, ``WaitTimeout`` naming one that has not started within ``timeout_s``, or ``RunError``
    after ``MAX_STARTS`` deaths.
    """
    for starts_left in reversed(range(MAX_STARTS)):
        try:
            with _failures_at_start(name, timeout_s):
                async with asyncio.timeout(timeout_s):
                    await start
        except DiedAtStart as death:
            if not starts_left:
                raise RunError(f"{MAX_STARTS} processes in a row died at their start, the last: {death}") from None
            logger.warning("%s; another takes its place", death)
            await asyncio.sleep(RESTART_PAUSE_S)
            name, start = start_again()
        else:
            return


def wait_started(name: str, start: ObjectRef, timeout_s: float) -> None:
    """Waits for the ``start()`` of an actor; raises its own error, ``DiedAtStart``, or ``WaitTimeout`` naming it."""
    with _failures_at_start(name, timeout_s):
        ray.get(start, timeout=timeout_s)


@contextmanager
def _failures_at_start(name: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:  # Ray's own is one as well
        raise WaitTimeout(
            f"actor {name} has not started within cluster.start_timeout_s={timeout_s:g} seconds"
        ) from None
    except RayTaskError as error:
        raise root_cause(error, f"actor {name} failed at its start") from None
    except (RayActorError, OutOfMemoryError) as error:
        raise DiedAtStart(f"actor {name} died at its start: {describe_failure(error)}") from None


def end_actors(kept: Set[str]) -> None:
    """Ends the named actors of this job but ``kept``, and waits until their names are free for the next run.

    Call it before their places are released: Ray holds on to the name of an actor that dies with its place for as
    long as anything here refers to it.
    """
    ended = set(ray.util.list_named_actors()) - kept
    for name in ended:
        with suppress(ValueError):
            ray.kill(ray.get_actor(name))
    deadline = time.monotonic() + END_TIMEOUT_S
    while ended & set(ray.util.list_named_actors()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _readable(resources: Mapping[str, float]) -> dict[str, float]:
    """The countable resources, without Ray's node and memory entries."""
    hidden = ("node:", "memory", "object_store_memory")
    return {name: amount for name, amount in sorted(resources.items()) if not name.startswith(hidden)}
