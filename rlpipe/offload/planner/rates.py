"""A device's rates as the search for a plan and the trace of a model use them."""

from __future__ import annotations

from collections.abc import Mapping

from rlpipe.hardware.device import Device
from rlpipe.offload.planner.profile import FREE_LINK, Rates
from rlpipe.offload.planner.tensor_tracker import Operator
from rlpipe.offload.planner.trace import Seconds

DEVICES_PER_MACHINE = 8
"""Ranks per machine; further ranks count as running on other machines, each with the same host memory."""


def rates_of(device: Device, *, num_ranks: int = 1) -> Rates:
    """Return the rates of one of ``num_ranks`` ranks, which share their hosts' memory and cores, but no PCIe slot."""
    neighbours = min(num_ranks, DEVICES_PER_MACHINE)
    return Rates(
        host_to_device=device.host_to_device,
        device_to_host=device.device_to_host,
        both=device.both,
        device_adam=device.device_adam,
        host_adam=_share(device.host_adam, neighbours),
        host_adding=_share(device.host_adding, neighbours),
        device_bandwidth=device.memory_bandwidth,
        host_bandwidth=device.host_bandwidth / neighbours,
        link=device.exchange if num_ranks > 1 else FREE_LINK,
    )


def _share(rates: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: rate / count for name, rate in rates.items()}


def roofline(device: Device) -> Seconds:
    """Return a function for an operator's seconds: the time of its arithmetic or of its memory, whichever is longer."""
    slowest = min(device.matmul_flops.values())

    def seconds(operator: Operator) -> float:
        flops = device.matmul_flops.get(str(operator.dtype).removeprefix("torch."), slowest)
        return max(operator.flops / flops, operator.num_bytes / device.memory_bandwidth)

    return seconds
