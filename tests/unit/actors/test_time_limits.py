"""Waits of actors for others end, however silent those are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from rlpipe.actors import served
from rlpipe.actors.learner import LearnerLoop
from rlpipe.actors.served import ServedScorer
from rlpipe.errors import WaitTimeout


class Silent:
    """Waiter whose call is never answered."""

    def wait(self, call: Any, timeout_s: float) -> bool:
        return False


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> LearnerLoop:
    loop = object.__new__(LearnerLoop)
    loop._setup = MagicMock(start_timeout_s=0.05, step_timeout_s=0.05)
    loop._rank, loop._publisher, loop._features = 3, MagicMock(), Silent()  # type: ignore[assignment]
    monkeypatch.setattr(loop, "_describe_batches", lambda: "2 groups are due")
    return loop


def test_a_rank_does_not_wait_for_ever_for_a_batch(loop: LearnerLoop) -> None:
    with pytest.raises(WaitTimeout, match=r"rank 3 has waited 0\.1 seconds .* for the batch of step 7; .*2 groups"):
        loop._next_batch(7)


def test_a_rank_does_not_wait_for_ever_for_evaluations(loop: LearnerLoop) -> None:
    with pytest.raises(WaitTimeout, match=r"rank 3 has waited .* for the end of the evaluations; .*2 groups are due"):
        loop._score_remaining()


def test_a_replica_outlasts_a_silent_lease_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, GetTimeoutError(), GetTimeoutError(), None, ActorDiedError()])
    limits = []

    def get(call: Any, timeout: float) -> None:
        limits.append(timeout)
        if (answer := next(answers)) is not None:
            raise answer

    deleted = MagicMock()
    monkeypatch.setattr(served, "LEASE_POLL_S", 0)
    monkeypatch.setattr(served.ray, "get", get)
    monkeypatch.setattr(served.serve, "delete", deleted)
    replica: Any = SimpleNamespace(_setup=MagicMock(app="judge"))
    ServedScorer._watch_lease(replica)
    assert limits == [served.LEASE_TIMEOUT_S] * 5
    deleted.assert_called_once_with("judge", _blocking=False)
