"""Publishers, by which a learner rank sends its versions to the engines: through the object store, or directly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import ray
import torch
from ray.actor import ActorHandle

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.remote import get_answer
from rlpipe.learner.direct_broadcast import DirectSender
from rlpipe.learner.policy import Policy
from rlpipe.learner.publish import publish_weights
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.types import Transfer, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import BucketMemory


class Calls:
    """A rank's calls of other actors, each with a time limit, and one at a time for each kind."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._unanswered: dict[str, tuple[Any, float]] = {}

    def get(self, call: Any, what: str, *, more_s: float = 0.0) -> Any:
        limit = self._limit_s + more_s
        return get_answer(call, f"learner rank {self._rank}: {what}", within=limit, option="cluster.call_timeout_s")

    def in_order(self, kind: str, method: Any, *arguments: Any, more_s: float = 0.0) -> None:
        """Call an actor once the last call of the same kind has been answered.

        An actor may take calls that wait for it at the same time in any order.
        """
        self.await_answer(kind)
        self._unanswered[kind] = method.remote(*arguments), more_s

    def await_answer(self, kind: str) -> None:
        if kind in self._unanswered:
            call, more_s = self._unanswered.pop(kind)
            self.get(call, f"the answer to its last {kind}", more_s=more_s)

    def await_all(self) -> None:
        for kind in list(self._unanswered):
            self.await_answer(kind)


class Publisher(Protocol):
    """One rank's part in publishing; all ranks must make the same calls in the same order."""

    def publish(self, version: int, life: int) -> None:
        """Send the current weights to the engines; ``life`` counts the learner groups started so far."""

    def publish_again(self) -> None:
        """Publish the same version again if the weights actor was restarted and has none, or an engine needs it."""

    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for a call's answer, and return whether it has arrived."""


class NoPublisher:
    """Publisher of runs without engines, as in SFT."""

    def publish(self, version: int, life: int) -> None:
        pass

    def publish_again(self) -> None:
        pass

    def wait(self, call: Any, timeout_s: float) -> bool:
        return is_answered(call, timeout_s)


class StorePublisher:
    """Publisher that puts weights into Ray's object store, one object per bucket, and calls the weights actor."""

    def __init__(self, policy: Policy, setup: LearnerSetup, calls: Calls, weights: ActorHandle) -> None:
        self._policy, self._config, self._calls, self._weights = policy, setup.weights, calls, weights
        self._memory = BucketMemory()
        self._published: tuple[WeightsManifest, list[ray.ObjectRef], int] | None = None

    def publish(self, version: int, life: int) -> None:
        buckets: list[ray.ObjectRef] = []
        manifest = publish_weights(
            self._policy,
            version=version,
            bucket_bytes=self._config.bucket_bytes,
            emit=lambda bucket: buckets.append(ray.put(bucket)),
            memory=self._memory,
        )
        if manifest is not None:
            self._published = (manifest, buckets, life)
            self._tell()

    def publish_again(self) -> None:
        if self._published is not None and newest_version(self._calls, self._weights) < 0:
            self._tell()

    def _tell(self) -> None:
        """Send the version to the weights actor.

        The answer may take two load timeouts, because the load of a restarted engine may come first.
        """
        assert self._published is not None, "only the first rank has something to tell"
        self._calls.in_order("publish", self._weights.publish, *self._published, more_s=2 * self._config.timeout_s)

    def wait(self, call: Any, timeout_s: float) -> bool:
        return is_answered(call, timeout_s)


class DirectPublisher:
    """Publisher that has the engines wait, sends them the weights, and then has their digests checked.

    All ranks gather the weights that the first one sends, so they must agree on when to send, also while they wait
    for a batch.
    """

    def __init__(self, policy: Policy, setup: LearnerSetup, calls: Calls, weights: ActorHandle) -> None:
        self._policy, self._calls, self._weights = policy, calls, weights
        self._timeout_s, self._start_timeout_s = setup.weights.timeout_s, setup.start_timeout_s
        self._sender = DirectSender(policy, setup.weights)
        self._is_first = policy.sharding.rank == 0
        self._last = (0, 0)

    def publish(self, version: int, life: int) -> None:
        self._last = (version, life)
        transfer = self._offer(version, life) if self._is_first else None
        if not self._any(transfer is not None):
            return
        digest = self._sender.send(transfer if transfer is not None and transfer.num_processes > 1 else None)
        if self._is_first:
            call: Any = self._weights.publish.remote(self._describe(version, digest=digest), [], life)
            self._calls.get(call, "the engines to serve what was sent", more_s=self._timeout_s)

    def publish_again(self) -> None:
        if self._any(self._is_first and newest_version(self._calls, self._weights) < 0):
            self.publish(*self._last)

    def wait(self, call: Any, timeout_s: float) -> bool:
        return not self._any(not is_answered(call, timeout_s))

    def _offer(self, version: int, life: int) -> Transfer | None:
        """Offer a version to the engines; return the transfer that both sides join, or None if it is outdated."""
        transfer = self._sender.open(ray.util.get_node_ip_address())
        call: Any = self._weights.offer.remote(self._describe(version, transfer=transfer), life)
        num_processes = self._calls.get(call, "the engines to be ready", more_s=self._start_timeout_s)
        return replace(transfer, num_processes=num_processes) if num_processes else None

    def _describe(self, version: int, *, digest: str = "", transfer: Transfer | None = None) -> WeightsManifest:
        return WeightsManifest(
            version=version,
            kind=WeightsKind.FULL,
            digest=digest,
            num_buckets=0,
            num_bytes=self._sender.num_bytes,
            transfer=transfer,
        )

    def _any(self, flag: bool) -> bool:
        return bool(self._policy.sharding.reduce(torch.tensor(float(flag)), Reduce.MAX))


def is_answered(call: Any, timeout_s: float) -> bool:
    return bool(ray.wait([call], timeout=timeout_s)[0])


def newest_version(calls: Calls, weights: ActorHandle) -> int:
    version: int = calls.get(weights.newest.remote(), "the weights actor to say which version is the newest")
    return version


def make_publisher(policy: Policy, setup: LearnerSetup, calls: Calls) -> Publisher:
    if setup.weights_actor is None:
        return NoPublisher()
    kind = DirectPublisher if setup.weights.transport == "nccl" else StorePublisher
    return kind(policy, setup, calls, setup.weights_actor)
