"""Tests of rlpipe's changes to Ray, and of what it reads there: the start of a local cluster, SIGTERM, stopped jobs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray._private import services, utils

from rlpipe.actors import ray_internals
from rlpipe.actors.ray_internals import is_killed_on_stop, own_sigterm_handler, private_services

NODE = {"node_id": "0"}


def ask_after(monkeypatch: pytest.MonkeyPatch, *, missing_s: float, limit_s: float) -> Any:
    """Ask for a node that Ray's head knows only after some time."""
    begin = time.monotonic()

    def get_node(gcs_address: str, node_id: str) -> Any:
        if time.monotonic() - begin < missing_s:
            raise RuntimeError(f"{node_id} at {gcs_address} has not registered")
        return NODE

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_internals, "RAY_START_S", limit_s)
    with private_services():
        return services.get_node("127.0.0.1:1", "0")


def test_a_node_that_registers_late_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_after(monkeypatch, missing_s=0.5, limit_s=60) == NODE


def test_a_node_that_does_not_register_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="has not registered"):
        ask_after(monkeypatch, missing_s=60, limit_s=0.5)


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    earlier = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, earlier)


def exit_at(number: int, frame: object) -> None:
    """Stand for the handler that Ray sets."""


def interrupt_at(number: int, frame: object) -> None:
    """Stand for a handler of this process."""


def test_a_handler_of_sigterm_is_kept_while_ray_starts(restored_sigterm: None) -> None:
    signal.signal(signal.SIGTERM, interrupt_at)
    with own_sigterm_handler():
        utils.set_sigterm_handler(exit_at)
        assert signal.getsignal(signal.SIGTERM) is interrupt_at
        signal.signal(signal.SIGTERM, exit_at)  # as Ray's core does
    assert signal.getsignal(signal.SIGTERM) is interrupt_at


def test_a_process_without_a_handler_of_sigterm_has_that_of_ray(restored_sigterm: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with own_sigterm_handler():
        utils.set_sigterm_handler(exit_at)
    assert signal.getsignal(signal.SIGTERM) is exit_at


def test_only_a_job_without_a_longer_wait_is_killed_when_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert not is_killed_on_stop()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert is_killed_on_stop()
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "1800")
    assert not is_killed_on_stop()
