"""Tests that two gloo ranks measure their link, and agree on one machine."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_cases import Ranks

from rlpipe.errors import ModelError, RunError
from rlpipe.hardware import calibration
from rlpipe.hardware.calibration import TENSOR_BYTES, measured_device, on_rank0
from rlpipe.hardware.device_profiles import load_stored, own_name

CPU = torch.device("cpu")


def check_own_device(cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        first = measured_device(CPU, scale=0.01)
        assert first.link is not None
        curves = [first.link.all_gather, first.link.reduce_scatter, first.link.all_reduce]
        for curve, rounds in zip(curves, (1, 1, 2), strict=True):
            # Each of two ranks receives half of a tensor, and all_reduce takes two such rounds.
            assert curve.num_bytes == tuple(rounds * 4 * (int(0.01 * size) // 8) for size in TENSOR_BYTES)
            assert all(0 < seconds < 10 for seconds in curve.seconds)
            assert 1e6 < curve.rate(curve.num_bytes[-1]) < 1e12
        assert len(set(curves)) == 3
        found = [None, None]
        dist.all_gather_object(found, first)
        assert found == [first, first]
        stored = load_stored(own_name("cpu"))
        assert stored == first
        again = measured_device(CPU, scale=0.01)
        assert (again.measured_at, again.host_adam) == (first.measured_at, first.host_adam)


def test_ranks_are_given_one_machine_with_their_link(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_own_device, tmp_path)


def fail_to_find(error: Exception) -> None:
    raise error


def check_errors() -> None:
    is_first = dist.get_rank() == 0
    with pytest.raises(
        OSError if is_first else RunError, match="no space" if is_first else "rank 0 failed: OSError: no"
    ):
        on_rank0(lambda: fail_to_find(OSError("no space")))
    with pytest.raises(ModelError, match="too large"):
        on_rank0(lambda: fail_to_find(ModelError("too large")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_find_or_measure", lambda *_: fail_to_find(RuntimeError("no such clock")))
        with pytest.raises(RuntimeError if is_first else RunError, match="no such clock"):
            measured_device(CPU)
    assert on_rank0(dist.get_rank) == 0


def test_all_ranks_learn_what_fails_on_the_first(ranks: Ranks) -> None:
    ranks.run(check_errors)
