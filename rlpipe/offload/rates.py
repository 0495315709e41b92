"""What a device's rates mean to the search for a way to offload, and to the trace of a model."""

from __future__ import annotations

import math

from rlpipe.hardware.device import Device
from rlpipe.offload.profile import Rates
from rlpipe.offload.trace import Seconds
from rlpipe.offload.tracker import Operator

DEVICES_PER_MACHINE = 8
"""Ranks beyond so many are taken to run on further machines, each with the same host memory."""


def rates_of(device: Device, *, num_ranks: int = 1) -> Rates:
    """Those of one rank out of ``num_ranks``, which share the memory of their hosts, but no PCIe slot."""
    neighbours = min(num_ranks, DEVICES_PER_MACHINE)
    return Rates(
        host_to_device=device.host_to_device,
        device_to_host=device.device_to_host,
        both=device.both,
        device_adam=device.device_adam,
        host_adam=device.host_adam / neighbours,
        gather=device.exchange if num_ranks > 1 else math.inf,
        reduce=device.exchange if num_ranks > 1 else math.inf,
    )


def roofline(device: Device) -> Seconds:
    """An operator takes what its arithmetic or its memory takes, whichever is more."""
    slowest = min(device.matmul_flops.values())

    def seconds(operator: Operator) -> float:
        flops = device.matmul_flops.get(str(operator.dtype).removeprefix("torch."), slowest)
        return max(operator.flops / flops, operator.num_bytes / device.memory_bandwidth)

    return seconds
