"""Watches a run's hosts and actors, and reports which are silent or dead."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RpcError

from rlpipe.actors.ray_internals import Host, query_head
from rlpipe.actors.remote import await_remote
from rlpipe.actors.step_server import SILENT_AFTER_S as SILENT_RANK_S
from rlpipe.actors.step_server import RunUpdates
from rlpipe.common.formatting import printable
from rlpipe.configs.schema.root_config import ClusterConfig, Config
from rlpipe.errors import HeadLost, WaitTimeout
from rlpipe.replay.step_queue import StepReport
from rlpipe.tracking.jsonl import StepLog
from rlpipe.tracking.outcome import record_error
from rlpipe.tracking.part_states import PartState, write_parts

PROBE_S = 1.0
"""Interval between two connection attempts to a host, and the limit of each, in seconds."""
LIST_S = 5.0
"""Interval between two queries of Ray's hosts and actors, and the limit of each, in seconds."""
SILENT_AFTER_S = 5.0
"""Seconds without an answer after which a host is reported as silent."""
HEAD_OPTION = "RAY_gcs_rpc_server_reconnect_timeout_s"
HEAD_LIMIT_S = 60.0
"""Ray's default of that option: seconds without the head after which Ray ends a process, without a message."""
LEAVE_S = 5.0
"""Seconds that a driver may take to leave a cluster that has lost its head, which it would usually wait for."""
TITLES = {"RayTrainWorker": "learner rank", "ServeReplica": "replica"}
"""Titles of a run's unnamed actors, by class name prefix; all other unnamed actors are Ray's own helpers."""

REPEATED_LINES = (
    r"^Task [\s\S]* failed\. There are .* retries remaining",
    r"^The node with node id: .* has been marked dead because the detector has missed too many heartbeats",
)
"""Patterns of Ray's own messages: those repeated many times while a host is silent, and that of a host's death."""


@dataclass(slots=True)
class _Contact:
    host: Host
    heard_at: float
    runs: str = ""
    since: float | None = None
    """Time (``time.time``) of the last answer of a host that was reported as silent; None for other hosts."""


class HostWatch:
    """State of each host of a run, whose changes are reported to ``show_message``; ``clock`` counts seconds.

    ``hosts`` and ``head_silent_s`` may be read in another thread.
    """

    def __init__(self, show_message: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show_message, self._clock = show_message, clock
        self._contacts: dict[str, _Contact] = {}

    @property
    def hosts(self) -> dict[str, Host]:
        """Hosts of the cluster, by Ray's node id."""
        return {node: contact.host for node, contact in list(self._contacts.items())}

    @property
    def head_silent_s(self) -> float:
        """Seconds since the head last answered."""
        heads = [contact.heard_at for contact in list(self._contacts.values()) if contact.host.is_head]
        return self._clock() - max(heads) if heads else 0.0

    def listed(self, hosts: Mapping[str, Host], actors: Mapping[str, Iterable[str]]) -> None:
        """Update the living hosts and the run's actors on each, as listed by the head."""
        for node in self._contacts.keys() - hosts.keys():
            self._report_lost(self._contacts.pop(node))
        for node, host in hosts.items():
            contact = self._contacts.setdefault(node, _Contact(host, self._clock()))
            if self._silence(contact) < 2 * PROBE_S:  # the actors of a silent host may already be lost
                contact.runs = describe_actors(actors.get(node, ()))

    def heard(self, node: str) -> None:
        contact = self._contacts.get(node)
        if contact is None:
            return
        if contact.since is not None:
            self._show_message(f"host {contact.host.address} answers again, after {self._silence(contact):.0f} s")
        contact.heard_at, contact.since = self._clock(), None

    def check(self) -> None:
        """Report the hosts that have become silent, except those that run nothing of this run."""
        for contact in self._contacts.values():
            is_relevant = contact.runs or contact.host.is_head
            if is_relevant and contact.since is None and self._silence(contact) >= SILENT_AFTER_S:
                contact.since = time.time() - self._silence(contact)
                self._show_message(
                    f"{_name(contact)} has been silent since {_time_of_day(contact.since)}{_running_note(contact)}"
                )

    def _silence(self, contact: _Contact) -> float:
        return self._clock() - contact.heard_at

    def _report_lost(self, contact: _Contact) -> None:
        if contact.runs:
            silence = f", after {self._silence(contact):.0f} s of silence" if contact.since is not None else ""
            self._show_message(
                f"{_name(contact)} is lost to Ray{silence}{_running_note(contact)}, now restarting elsewhere"
            )


def _name(contact: _Contact) -> str:
    return f"host {contact.host.address}" + (" (Ray's head)" if contact.host.is_head else "")


def _time_of_day(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _running_note(contact: _Contact) -> str:
    return f"; it ran {contact.runs}" if contact.runs else ""


def describe_actors(names: Iterable[str]) -> str:
    """Return each name once with its count, such as ``replay, rollout-0, 2 x learner rank``."""
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in sorted(Counter(names).items()))


async def watch_hosts(show_message: Callable[[str], None], config: Config) -> None:
    """Watch the hosts until cancelled; raise ``HeadLost`` after three quarters of Ray's limit for a silent head.

    ``LEAVE_S`` later the process ends with that error, whatever else of it hangs.
    """
    limit_s = 0.75 * float(os.environ.get(HEAD_OPTION, HEAD_LIMIT_S))
    lost = HeadLost(
        f"Ray's head at {ray.get_runtime_context().gcs_address} has not answered for {limit_s:.0f} s "
        f"(three quarters of {HEAD_OPTION}): it died or is cut off. Once the cluster has been started again, "
        f"{config.resume_command} continues from the newest checkpoint and the ledger"
    )
    watch, stopped = HostWatch(show_message), threading.Event()
    record = partial(record_error, Path(config.output), lost)
    guard = threading.Thread(target=_guard_head, args=(watch, limit_s + LEAVE_S, lost, record, stopped), daemon=True)
    guard.start()
    listing = asyncio.ensure_future(_list(watch))
    try:
        while True:
            began = time.monotonic()
            await asyncio.gather(asyncio.sleep(PROBE_S), *(_probe(watch, *entry) for entry in watch.hosts.items()))
            if time.monotonic() - began >= SILENT_AFTER_S:
                continue  # this process was suspended, so that it has heard nobody
            watch.check()
            if watch.head_silent_s >= limit_s:
                break
    except BaseException:
        stopped.set()
        raise
    finally:
        listing.cancel()
    raise lost


def _guard_head(
    watch: HostWatch, limit_s: float, lost: HeadLost, record: Callable[[], None], stopped: threading.Event
) -> None:
    """End this process once the head is silent for too long; leaving a lost cluster would hang, or hide the error.

    This runs in a thread, as calls of Ray may block the event loop then.
    """
    while not stopped.wait(PROBE_S):
        heads = [host for host in watch.hosts.values() if host.is_head]
        if watch.head_silent_s >= limit_s and not any(map(_answers, heads)):
            recording = threading.Thread(target=record, daemon=True)
            recording.start()
            recording.join(LEAVE_S)  # the disk may be one of the lost head's
            print(f"rlpipe: error: {printable(str(lost))}", file=sys.stderr, flush=True)
            os._exit(lost.exit_code)


def _answers(host: Host) -> bool:
    try:
        with socket.create_connection((host.address, host.port), timeout=PROBE_S):
            return True
    except OSError:
        return False


async def _list(watch: HostWatch) -> None:
    """Query the head every ``LIST_S`` seconds; while it does not answer, its last answer stays valid."""
    while True:
        with suppress(RpcError, TimeoutError):
            watch.listed(*await _list_actors())
        await asyncio.sleep(LIST_S)


async def _list_actors() -> tuple[dict[str, Host], dict[str, list[str]]]:
    """Return the hosts by node id, and the titles of the actors on each."""
    hosts, actors = await query_head(LIST_S)
    named: dict[str, list[str]] = {node: [] for node in hosts}
    for actor in actors:
        title = actor.name or next((text for start, text in TITLES.items() if actor.class_name.startswith(start)), "")
        if title:
            named.setdefault(actor.node_id, []).append(title)
    return hosts, named


async def _probe(watch: HostWatch, node: str, host: Host) -> None:
    """Mark the host as heard if it accepts a connection; nothing is sent."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host.address, host.port)
        writer.close()
        watch.heard(node)


RECORD_S = 5.0
"""Interval between two records of the parts' states, in seconds."""
POLL_S = 10.0
"""Seconds after which a request for news is repeated; news itself arrives without delay."""


class RunMonitor:
    """Forwarder of one run's reports and messages from the actor called ``name``; for one event loop."""

    def __init__(
        self,
        name: str,
        batches: ActorHandle,
        cluster: ClusterConfig,
        *,
        report: Callable[[StepReport], None],
        show_message: Callable[[str], None],
        first_step: int,
        last_event: int = 0,
        events: StepLog | None = None,
    ) -> None:
        """Create a monitor; ``events`` keeps events that are in no ledger."""
        self._events = events
        self._name, self._batches, self._cluster = name, batches, cluster
        self._report, self._show_message = report, show_message
        self._last_step, self._last_event = first_step - 1, last_event
        self._first_step = first_step
        self._stops = False
        self._evaluated_at = 0.0
        self.ended = asyncio.Event()
        """Set once the last step is reported."""

    async def follow(self) -> None:
        """Forward reports and messages until cancelled; raise the error with which a rank has ended the run."""
        while True:
            call: Any = self._batches.wait_updates.remote(self._last_step, self._last_event, POLL_S)
            updates: RunUpdates = await self.ask(call, "report updates", more_s=POLL_S)
            for event in updates.events:
                self._last_event = event.number
                self._show_message(event.message)
                if self._events is not None:
                    self._events.append(self._last_step + 1, [asdict(event)])
            for report in updates.reports:
                self._last_step = report.step
                self._report(report)
                if report.last:
                    self.ended.set()

    @property
    def has_steps(self) -> bool:
        """Whether a step has been reported since the run's start or resume."""
        return self._last_step >= self._first_step

    def evaluated(self) -> None:
        """Count the end of an evaluation's group as progress."""
        self._evaluated_at = time.monotonic()

    async def watch(self, describe: Callable[[], Any] = dict) -> None:
        """Watch the progress until cancelled; raise ``WaitTimeout`` if no step ends for ``cluster.step_timeout_s``.

        ``describe`` adds the state that only the driver knows to the error message.
        """
        limit, started = self._cluster.step_timeout_s, time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.sleep(min(POLL_S, limit / 4))
            if time.monotonic() - before > limit / 2:  # this process was suspended, and has passed on nothing
                started = time.monotonic()
            if self._stops:
                await self.stop_learner()  # again, because the actor may be a new process
            state = await self.ask(self._batches.describe.remote(), "describe its state")
            if self.ended.is_set():
                state["learner_group"] = "has reported its last step, but Ray Train has not ended it"
            idle_s = time.monotonic() - max(started, self._evaluated_at)
            if min(state["seconds_since_a_step"], idle_s) > limit:
                raise WaitTimeout(
                    f"no step has ended for cluster.step_timeout_s={limit:g} seconds: {state | describe()}"
                )

    async def record_parts(self, output: Path, describe: Callable[[], Iterable[PartState]] = tuple) -> None:
        """Write the states of the ranks, and of the parts that ``describe`` returns, to the output until cancelled."""
        while True:
            beats: dict[int, tuple[float, int]] = await self.ask(
                self._batches.heartbeats.remote(), "return the heartbeats"
            )
            ranks = [
                PartState(
                    kind="rank",
                    name=f"rank {rank}",
                    state="silent" if silence_s > SILENT_RANK_S else "in a step",
                    step=step,
                    heard_s=round(silence_s, 1),
                )
                for rank, (silence_s, step) in beats.items()
            ]
            write_parts(output, [*describe(), *ranks])
            await asyncio.sleep(RECORD_S)

    async def stop_learner(self) -> None:
        """Make the learner write a checkpoint and end after its current step."""
        self._stops = True
        await self.ask(self._batches.stop.remote(), "stop the learner")

    async def ask(self, call: Any, what: str, *, more_s: float = 0.0) -> Any:
        """Return the actor's answer; raise ``WaitTimeout`` after ``cluster.call_timeout_s`` plus ``more_s`` seconds."""
        limit = self._cluster.call_timeout_s + more_s
        return await await_remote(
            call, f"the {self._name} actor to {what}", within=limit, option="cluster.call_timeout_s"
        )
