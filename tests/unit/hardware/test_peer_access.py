"""Tests that NCCL's direct transfers are turned off where GPUs do not reach each other, on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlpipe.hardware import peer_access
from rlpipe.hardware.peer_access import SWITCH, gpus_reach_each_other, settle_peer_access


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a machine with three GPUs that reach each other, to be changed."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(peer_access, "check_cuda_p2p_ib_support", lambda: True)
    monkeypatch.delenv(SWITCH, raising=False)
    return monkeypatch


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refuse(*_: int) -> bool:
    raise RuntimeError("invalid device ordinal")


def test_every_pair_must_have_access_in_both_directions(machine: pytest.MonkeyPatch) -> None:
    assert gpus_reach_each_other()
    machine.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) != (2, 1))
    assert not gpus_reach_each_other()


def test_an_error_counts_as_no_access(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "can_device_access_peer", refuse)
    assert not gpus_reach_each_other()


def test_a_driver_that_only_claims_it_counts_as_no_access(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(peer_access, "check_cuda_p2p_ib_support", lambda: False)
    assert not gpus_reach_each_other()


@pytest.mark.usefixtures("ranks")
def test_the_switch_is_set_only_where_access_is_missing(machine: pytest.MonkeyPatch) -> None:
    assert settle_peer_access() is None
    assert SWITCH not in os.environ
    machine.setattr(torch.cuda, "can_device_access_peer", refuse)
    note = settle_peer_access()
    assert note is not None
    assert "NCCL_P2P_DISABLE=1" in note
    assert os.environ[SWITCH] == "1"


@pytest.mark.usefixtures("ranks")
def test_a_switch_of_the_user_stays(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(SWITCH, "0")
    machine.setattr(torch.cuda, "can_device_access_peer", refuse)
    assert settle_peer_access() is None
    assert os.environ[SWITCH] == "0"
