"""The Ray cluster of a run: joins or starts it, checks that the run fits on it, and starts and ends its actors."""

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
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpipe.actors.ray_internals import (
    brief_join,
    hide_lines,
    hide_token_warning,
    own_node,
    own_sigterm_handler,
    private_services,
)
from rlpipe.actors.remote import describe_failure, root_cause, wait_within
from rlpipe.configs.schema.root_config import ClusterConfig, Config
from rlpipe.errors import ConfigError, RunError, WaitTimeout
from rlpipe.hardware.dtype_speed import Products
from rlpipe.preload import preloading
from rlpipe.run.monitor import REPEATED_LINES

logger = logging.getLogger(__name__)

ENGINE_CALLS = 4
"""Concurrent calls of a rollout actor: a waiting collect, a load, a submission, a health check."""
QUESTION_CALLS = 128
"""Concurrent questions from scoring processes that a rollout actor answers in addition."""
TURN_CALLS = 4
"""Concurrent submissions of turns that a rollout actor takes, beside one waiting call of each process of episodes."""
ASYNC_CALLS = 1000
"""Concurrent calls of an actor whose methods are coroutines."""
END_TIMEOUT_S = 60.0
"""Time limit for the actors of a run to end, in seconds."""
FIT_POLL_S = 0.5
"""Seconds between two looks at the resources of a cluster that is too small."""
ADDRESS_FORMS = "set HOST:6379, the address that `ray start --head` printed, or auto for the cluster on this machine"


@dataclass(kw_only=True, frozen=True)
class ResourceRequest:
    """Resources that one process of the run requests from the cluster."""

    name: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    remedy: str = "lower the config's resources, or join a larger cluster"
    products: Products | None = None
    """Main matrix products of the process on a CPU; ``dtype=auto`` chooses a type by their speed."""

    @property
    def all_resources(self) -> dict[str, float]:
        """Amounts of all resources, by Ray's names."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}

    @property
    def requested(self) -> dict[str, float]:
        """Amounts of the resources that are not 0, by Ray's names."""
        return {name: amount for name, amount in self.all_resources.items() if amount}


def connect(cluster: ClusterConfig, needs: Sequence[ResourceRequest]) -> bool:
    """Join the cluster of the config or of RAY_ADDRESS, or else start a local one; return whether one was started.

    Raises ``ConfigError`` if no cluster can be joined at the address or the run needs more than the cluster has, and
    ``RunError`` if Ray does not start.
    """
    address = cluster.address or os.environ.get("RAY_ADDRESS") or None
    if address is not None and address.startswith("ray://"):
        raise ConfigError(f"cluster.address={address}: a run can't use Ray Client; {ADDRESS_FORMS}, or submit a job")
    starts = address is None and not ray.is_initialized()
    if not ray.is_initialized():
        hide_lines(REPEATED_LINES)
        hide_token_warning()
        options: dict[str, Any] = {"log_to_driver": cluster.log_to_driver, "logging_level": logging.WARNING}
        if address is None:
            num_cpus = sum(need.num_cpus for need in needs)
            options["include_dashboard"] = None if cluster.dashboard else False  # True would fail with a minimal Ray
            options["num_cpus"] = cluster.num_cpus or max(os.cpu_count() or 1, int(num_cpus + 0.999))
            os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, a browser would starve the run
            # Otherwise Ray shows all GPUs to processes that requested none, and a run on CPUs would fill the first.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        try:
            services = private_services() if address is None else brief_join()
            with preloading.used_by_ray(), services, own_sigterm_handler():
                ray.init(address or "local", **options)
        except Exception as error:  # Ray raises a bare Exception if its processes do not start in time
            if address is not None:
                if (refusal := _join_error(address, error)) is None:
                    raise
                raise refusal from None
            raise RunError(
                f"Ray did not start on this machine ({error}); its logs are under /tmp/ray/session_latest/logs: "
                "run again, or start it with `ray start --head` and set cluster.address=auto"
            ) from None
    if address is None:
        check_fit(needs, ray.cluster_resources())
    else:
        wait_fit(needs, cluster.schedule_timeout_s)
    return starts


def _join_error(address: str, error: Exception) -> ConfigError | None:
    """Return the error, in one line, for a cluster that can't be joined; None if Ray's own error is of another kind."""
    reason = " ".join(str(error).split())
    match error:
        case ConnectionError():
            return ConfigError(
                f"cluster.address={address}: no Ray cluster answers there ({reason}); "
                "one with token authentication needs RAY_AUTH_MODE=token in the environment"
            )
        case RayError() | RuntimeError():  # a missing or wrong token, or another version of Ray or Python
            return ConfigError(
                f"cluster.address={address}: Ray can't join the cluster there ({reason}); "
                "use the token (~/.ray/auth_token) and the versions of Python and Ray of its head"
            )
        case ValueError():
            return ConfigError(f"cluster.address={address} is no address of a Ray cluster ({reason}); {ADDRESS_FORMS}")
    return None


def wait_fit(needs: Sequence[ResourceRequest], timeout_s: float) -> None:
    """Wait until a joined cluster is large enough, whose hosts may still register or be started by an autoscaler.

    A pending placement group tells the autoscaler what is missing. Raises ``ConfigError`` after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    if (lack := find_lack(needs, ray.cluster_resources())) is None:
        return
    logger.warning("%s; waiting up to cluster.schedule_timeout_s=%g seconds for further hosts", lack, timeout_s)
    demand = placement_group([need.requested for need in needs if need.requested])
    try:
        while (lack := find_lack(needs, ray.cluster_resources())) is not None:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{lack}, or raise cluster.schedule_timeout_s={timeout_s:g} if further hosts will join"
                )
            time.sleep(FIT_POLL_S)
    finally:
        remove_placement_group(demand)


def check_fit(needs: Sequence[ResourceRequest], available: Mapping[str, float]) -> None:
    """Raise ``ConfigError`` if the cluster has too little of a resource, as ``find_lack`` says."""
    if (lack := find_lack(needs, available)) is not None:
        raise ConfigError(lack)


def find_lack(needs: Sequence[ResourceRequest], available: Mapping[str, float]) -> str | None:
    """Return which resource the cluster has too little of, and the processes that need it; None if the needs fit."""
    total: Counter[str] = Counter()
    for need in needs:
        total.update(need.requested)
    for resource, needed in total.items():
        amount = available.get(resource, 0.0)
        if needed > amount + 1e-9:
            affected = [need for need in needs if need.all_resources.get(resource)]
            listed = ", ".join(f"{need.name} {need.all_resources[resource]:g}" for need in affected)
            needing = f"{needed:g} {resource} ({listed})"
            return f"the run needs {needing} but the cluster has {amount:g}: {affected[0].remedy}"
    return None


class Reservation:
    """Placement group with one bundle for each need, held until ``release``.

    Raises ``WaitTimeout``, with the requested and the free resources, if the cluster can't place all bundles in time.
    ``check_fit`` compares the needs with the whole cluster's resources beforehand.
    """

    def __init__(self, needs: Sequence[ResourceRequest], timeout_s: float) -> None:
        self._bundles = {need.name: need.requested for need in needs if need.requested}
        self._index = {name: index for index, name in enumerate(self._bundles)}
        self._group = placement_group(list(self._bundles.values())) if self._bundles else None
        if self._group is not None and not self._group.wait(timeout_s):
            timeout = insufficient_resources(self._bundles, timeout_s)
            self.release()
            raise timeout

    def options(self, name: str) -> dict[str, Any]:
        """Return the options that start an actor in the bundle of the need called ``name``."""
        if self._group is None or name not in self._index:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index[name])
        return {"scheduling_strategy": strategy}

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def placement_groups() -> set[str]:
    """Return the ids of the placement groups that this driver's job holds; an id ends with the job's."""
    job = ray.get_runtime_context().get_job_id()
    table = placement_group_table()
    return {group for group, entry in table.items() if group.endswith(job) and entry["state"] != "REMOVED"}


def release_placement_groups(ids: Set[str]) -> None:
    """Remove placement groups whose owner has died, which Ray would keep until the job ends."""
    for group in ids:
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def insufficient_resources(requested: Mapping[str, Mapping[str, float]], timeout_s: float) -> WaitTimeout:
    """Return the error for processes that were not placed in time; ``requested`` is what each of them requests."""
    return WaitTimeout(
        f"the cluster did not have {requested} free within cluster.schedule_timeout_s={timeout_s:g} seconds: it has "
        f"{_readable(ray.cluster_resources())}, of which {_readable(ray.available_resources())} are free; "
        "end other work, or request less"
    )


def start_actor(
    actor_class: type,
    need: ResourceRequest,
    *args: Any,
    reservation: Reservation | None = None,
    bundle: str | None = None,
    max_concurrency: int | None = None,
    concurrency_groups: Mapping[str, int] | None = None,
    restarts: bool = False,
    repeats_calls: bool = False,
    on_driver_host: bool = False,
    stage: str | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """Start an actor with the need's name, in the bundle reserved for it or as ``bundle``.

    ``concurrency_groups`` allow further concurrent calls, in addition to ``max_concurrency``. With ``restarts``, Ray
    replaces a dead process by a new one; with ``repeats_calls``, the new one also gets the calls that the dead one had
    not answered. ``on_driver_host`` places the actor on the driver's host, so that the death of another host does not
    affect it. ``stage`` is the stage of ``rlpipe.preload`` that a local process is forked from.
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
    if on_driver_host:
        # Ray ignores a NodeAffinitySchedulingStrategy if an actor requests no resources.
        options["label_selector"] = own_node()
    if reservation is not None:
        options |= reservation.options(bundle or need.name)
    remote: Any = ray.remote
    remote_class: Any = remote(concurrency_groups=dict(concurrency_groups or {}))(actor_class)
    try:
        actor: ActorHandle = remote_class.options(**options).remote(*args, **kwargs)
    except ActorAlreadyExistsError:
        raise ConfigError(
            f"another run has an actor named {need.name} in Ray's namespace {ray.get_runtime_context().namespace}: "
            "leave namespace out of ray.init, or give every program its own"
        ) from None
    return actor


def shares_gpus(config: Config) -> bool:
    """Return whether an engine and a learner rank may share a GPU, because both request a fraction of one."""
    return config.rollout.num_gpus % 1 > 0 and config.learner.num_gpus % 1 > 0


MAX_STARTS = 3
"""Attempts to start a process before the run fails."""
RESTART_PAUSE_S = 1.0
"""Seconds before the next attempt, because Ray may not know yet that the last process is dead."""


AT_ONCE_S = 2.0
"""Seconds within which a call fails that Ray does not send, because it restarts the actor."""


class DiedAtStart(RunError):
    """Error raised when an actor's process ends, or Ray can't reach it any more, before it is ready."""

    def __init__(self, message: str, *, may_live: bool = False) -> None:
        super().__init__(message)
        self.may_live = may_live
        """Whether Ray can't reach it, but may restart it."""


async def until_ready(
    name: str, start: ObjectRef, start_again: Callable[[], tuple[str, ObjectRef]], timeout_s: float
) -> None:
    """Wait for the ``start()`` of an actor; if its process dies, start another one, which may have a new name.

    Raises the actor's own error, ``WaitTimeout`` naming an actor that has not started within ``timeout_s``, or
    ``RunError`` after ``MAX_STARTS`` deaths. Calls that fail at once, as while Ray restarts the actor, count as none.
    """
    starts_left, deadline = MAX_STARTS - 1, time.monotonic() + timeout_s
    while True:
        called = time.monotonic()
        try:
            with _failures_at_start(name, timeout_s):
                await wait_within(timeout_s, start)
        except DiedAtStart as death:
            is_restarting = death.may_live and time.monotonic() - called < AT_ONCE_S
            if not is_restarting or time.monotonic() >= deadline:
                if not starts_left:
                    raise RunError(f"{MAX_STARTS} processes in a row died at their start, the last: {death}") from None
                starts_left -= 1
                logger.warning("%s; another replaces it", death)
            await asyncio.sleep(RESTART_PAUSE_S)
            name, start = start_again()
        else:
            return


def wait_started(name: str, start: ObjectRef, timeout_s: float) -> None:
    """Wait for the ``start()`` of an actor; raise its own error, ``DiedAtStart``, or ``WaitTimeout`` naming it."""
    with _failures_at_start(name, timeout_s):
        ray.get(start, timeout=timeout_s)


@contextmanager
def _failures_at_start(name: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:  # Ray's GetTimeoutError is a TimeoutError as well
        raise WaitTimeout(
            f"actor {name} has not started within cluster.start_timeout_s={timeout_s:g} seconds"
        ) from None
    except RayTaskError as error:
        raise root_cause(error, f"actor {name} failed at its start") from None
    except (RayActorError, OutOfMemoryError) as error:
        is_alive = isinstance(error, ActorUnavailableError)
        raise DiedAtStart(f"actor {name} died at its start: {describe_failure(error)}", may_live=is_alive) from None


def end_actors(kept: Set[str]) -> None:
    """Kill the named actors of this job except ``kept``, and wait until their names are free for the next run.

    Call it before the placement groups are released: if an actor dies with its placement group, Ray keeps its name for
    as long as this process holds a reference to it.
    """
    job, ended = ray.get_runtime_context().get_job_id(), set()
    for name in set(ray.util.list_named_actors()) - kept:
        with suppress(ValueError):
            actor = ray.get_actor(name)
            if actor._actor_id.hex().endswith(job):  # other jobs may share the namespace
                ray.kill(actor)
                ended.add(name)
    deadline = time.monotonic() + END_TIMEOUT_S
    while ended & set(ray.util.list_named_actors()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _readable(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the countable resources, without Ray's node and memory entries."""
    hidden = ("node:", "memory", "object_store_memory")
    return {name: amount for name, amount in sorted(resources.items()) if not name.startswith(hidden)}
