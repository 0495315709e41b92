"""Ray's own limit on the start of a local cluster is extended."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ray._private import services

from rlpipe.actors import ray_internals
from rlpipe.actors.ray_internals import private_services

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
