"""One rank's share of its machine's rates, and the times of a chunk at these rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from offload_cases import arrange_all
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.hardware.device import Curve, Device, Link, adding
from rlpipe.hardware.device_profiles import find_device
from rlpipe.offload.decision import Knobs, Mode
from rlpipe.offload.planner.cost import (
    FREE_LINK,
    ChunkProfile,
    Profile,
    Rates,
    StageProfile,
    activation_peak,
    chunk_times,
    device_update_s,
    encode,
    host_adding_s,
    host_update_s,
    predict,
    rate_of,
    reduce_s,
)
from rlpipe.offload.planner.fake_trace import trace_model
from rlpipe.offload.planner.profiler import make_profile, rates_of, roofline
from rlpipe.offload.planner.trace import Operator
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision
from rlpipe.offload.units import find_units

CPU = torch.device("cpu")
WIDTH = 32


def h100() -> Device:
    return find_device("h100-80g")


def test_one_rank_gathers_nothing_and_several_share_the_hosts_memory() -> None:
    device, one, four = h100(), rates_of(h100()), rates_of(h100(), num_ranks=4)
    assert one.link == FREE_LINK
    assert (one.host_adam, one.host_adding) == (device.host_adam, device.host_adding)
    assert (one.device_bandwidth, one.host_bandwidth) == (device.memory_bandwidth, device.host_bandwidth)
    assert four.link == device.link
    assert four.host_adam == {name: rate / 4 for name, rate in device.host_adam.items()}
    assert four.host_adding == {name: rate / 4 for name, rate in device.host_adding.items()}
    assert four.host_bandwidth == device.host_bandwidth / 4
    assert (four.host_to_device, four.device_adam) == (device.host_to_device, device.device_adam)
    assert rates_of(device, num_ranks=16).host_bandwidth == device.host_bandwidth / 8  # spread over two machines


def test_a_dtype_that_was_not_measured_is_taken_for_the_slowest() -> None:
    assert rate_of({"float32": 2.0, "bfloat16": 3.0}, "bfloat16") == 3.0
    assert rate_of({"float32": 2.0, "bfloat16": 3.0}, "float64") == 2.0


CHUNK = ChunkProfile(
    stages={0: 1.0},
    num_bytes=2_000_000,
    gathered_bytes=2_000_000,
    gather_bytes=1_000_000,
    scatter_bytes=2_000_000,
    gradient_bytes=2_000_000,
    adding="bfloat16 to float32",
    num_trained=1_000_000,
    state_dtype="bfloat16",
    cast_bytes=3_000_000,
)


def test_an_update_takes_adam_of_its_type_and_the_copies_alongside_it() -> None:
    rates = rates_of(h100(), num_ranks=2)
    adam_s, copies_s = 1e6 / (150e9 / 2 / 14), 3e6 / (150e9 / 2)
    assert host_update_s(rates, CHUNK) == pytest.approx(adam_s + copies_s)
    memory = 0.8 * 3.35e12
    assert device_update_s(rates, CHUNK) == pytest.approx(1e6 * 14 / memory + 3e6 / memory + 1e6 / (0.8 * 450e9))
    assert device_update_s(rates, replace(CHUNK, num_trained=0, cast_bytes=0)) == 0  # no new weights to gather


def test_an_exchange_takes_what_one_of_its_size_does() -> None:
    slow = Curve(num_bytes=(1e6, 3e6), seconds=(1.0, 2.0))
    rates = replace(rates_of(h100()), link=Link(all_gather=FREE_LINK.all_gather, reduce_scatter=slow, all_reduce=slow))
    assert reduce_s(rates, CHUNK) == pytest.approx(1.5)
    assert reduce_s(rates, replace(CHUNK, scatter_bytes=0, reduce_bytes=6_000_000)) == pytest.approx(4)


def stage_of(**sizes: float) -> StageProfile:
    names = ("forward_s", "backward_s", "saved_bytes", "swapped_bytes", "input_bytes", "forward_peak", "backward_peak")
    return StageProfile(**{"is_block": True, **dict.fromkeys(names, 0), **sizes})


def test_a_backward_pass_waits_for_the_host_where_that_adds_slowly() -> None:
    """Check that all micro batches wait; copying the first gradients takes as long as adding the others."""
    stage = stage_of(backward_s=1e-6)
    rates = replace(rates_of(h100()), host_adding={"bfloat16 to float32": 1e9, "float32 to float32": 1e12})
    assert host_adding_s(rates, CHUNK) == pytest.approx(1e6 / 1e9)
    profile = Profile(stages=[stage], chunks=[CHUNK], num_micro_batches=4)
    moving = Knobs(num_persistent=0, num_slots=1)
    assert predict(profile, moving, rates).backward_s == pytest.approx(4 * 1e6 / 1e9)
    assert predict(profile, replace(moving, num_persistent=1, num_slots=0), rates).backward_s < 1e-4  # by the device


def test_a_chunk_takes_the_longest_of_computing_transfers_exchange_and_adding() -> None:
    rates = Rates(
        host_to_device=10,
        device_to_host=5,
        both=5,
        device_adam={"float32": 1},
        host_adam={"float32": 1},
        host_adding={"float32 to float32": 1},
        device_bandwidth=1,
        host_bandwidth=1,
        link=Link(all_gather=Curve.at_rate(2), reduce_scatter=Curve.at_rate(4), all_reduce=Curve.at_rate(4)),
    )
    chunk = ChunkProfile(
        stages={0: 1.0},
        num_bytes=20,
        gathered_bytes=20,
        gather_bytes=6,
        scatter_bytes=8,
        gradient_bytes=10,
        num_trained=4,
    )
    profile = Profile(stages=[stage_of(forward_s=1, backward_s=2, swapped_bytes=30)], chunks=[chunk])
    modes = (Mode.KEEP, Mode.CHECKPOINT, Mode.SWAP)
    times = chunk_times(profile, rates, np.concatenate([encode([mode]) for mode in modes]))
    assert times.forward_stays.tolist() == [[1], [1], [6]], "computing, or sending swapped activations"
    assert times.forward_loads.tolist() == [[3], [3], [6]], "gathering, or both transfers"
    assert times.forward_kept.tolist() == times.forward_loads.tolist(), "the update has changed it"
    assert times.backward_stays.tolist() == [[2], [3], [3]], "computing once more, or fetching activations"
    assert times.backward_cached.tolist() == [[4], [4], [4]], "adding gradients"
    assert times.backward_loads.tolist() == [[5], [5], [6]], "gathering and reducing, or both transfers"
    frozen = replace(profile, chunks=[replace(chunk, num_trained=0)])
    assert chunk_times(frozen, rates, encode([Mode.KEEP])).forward_kept.tolist() == [[1]]


def test_swapped_activations_are_in_flight_while_the_next_stage_runs() -> None:
    stages = [
        stage_of(is_block=False, saved_bytes=1),
        stage_of(saved_bytes=10, swapped_bytes=12, forward_peak=2, backward_peak=3),
        stage_of(saved_bytes=8, input_bytes=2, entering_bytes=1, forward_peak=4, backward_peak=3),
        stage_of(saved_bytes=6, forward_peak=1, backward_peak=5),
        stage_of(is_block=False, saved_bytes=2, backward_peak=4),
    ]
    keep = [Mode.KEEP] * 3
    assert activation_peak(stages, [*keep, *keep[:2]]) == 1 + 10 + 8 + 6 + 2 + 4
    assert activation_peak(stages, [*keep[:2], Mode.CHECKPOINT, *keep[:2]]) == 1 + 10 + 2 + 6 + 2 + 4
    assert activation_peak(stages, [Mode.KEEP, Mode.SWAP, Mode.CHECKPOINT, *keep[:2]]) == 1 + 12 + 8 + 4 + 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().sum()


class Copies(TorchDispatchMode):
    """A mode that counts the bytes that copies read and write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.num_bytes += args[0].nbytes + result.nbytes
        elif func is torch.ops.aten.copy_.default:
            self.num_bytes += args[0].nbytes + args[1].nbytes
        return result


def test_a_stage_takes_at_least_the_time_in_which_the_host_starts_its_operators() -> None:
    model, hidden = Layers(), torch.ones(4, WIDTH)

    def trace(work_s: float, start_s: float) -> list[tuple[float, float]]:
        units = find_units(model)
        found = trace_model(model, units, lambda _: model(hidden), lambda _: work_s, start_s=start_s)
        return [(stage.forward_s, stage.backward_s) for stage in found.stages if stage.unit is not None]

    # A layer has one product; its backward pass also multiplies for the input's gradient, but not in the first layer.
    assert trace(0.0, 1.0) == [(1.0, 1.0), (1.0, 2.0)]
    assert trace(2.0, 0.0) == trace(2.0, 1.0), "views take the work's time here, so that work is longer"


def test_operators_without_products_do_not_reach_the_rate_of_copies_on_a_gpu() -> None:
    gpu = h100()
    adding_up = Operator(name="add", flops=0, num_bytes=10**9, dtype=torch.bfloat16)
    product = replace(adding_up, name="mm", flops=1)
    assert roofline(gpu)(adding_up) == pytest.approx(10**9 / (0.7 * gpu.memory_bandwidth))
    assert roofline(gpu)(product) == pytest.approx(10**9 / gpu.memory_bandwidth)
    assert roofline(replace(gpu, kind="cpu"))(adding_up) == pytest.approx(10**9 / gpu.memory_bandwidth)


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_copies_are_those_that_the_host_moves(
    dtype: torch.dtype, state: torch.dtype | None, gradient: torch.dtype
) -> None:
    model, precision = Layers().to(dtype), Precision(state=state, gradient=gradient)
    hidden = torch.ones(4, WIDTH, dtype=dtype)
    trace = trace_model(model, find_units(model), lambda _: model(hidden), lambda _: 1e-5)
    with OffloadedModel(
        model,
        arrange_all(model, Mode.KEEP),
        device=CPU,
        optimizer=OptimizerConfig(),
        precision=precision,
        sizes=[WIDTH * WIDTH * dtype.itemsize],
    ) as offloaded:
        chunk = make_profile(model, offloaded.inventory, offloaded.layout, trace, precision=precision).chunks[0]
        adam = offloaded.optimizer.adams[0]
        sent = torch.ones(WIDTH * WIDTH, dtype=dtype)
        assert chunk.gradient_bytes == sent.nbytes
        assert chunk.adding == adding(_name(sent.dtype), _name(adam.gradient.dtype))
        adam.add(sent, is_first=adam.expect(adam.memory.names))
        with Copies() as updating:
            adam.update(adam.take(), 1e-3, 1.0)
        assert chunk.cast_bytes == updating.num_bytes
        assert chunk.state_dtype == _name(adam.memory.master.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
