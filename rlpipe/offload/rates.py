"""A machine's measured rates, as the search and the trace of a model want them."""

from __future__ import annotations

from rlpipe.offload.profile import Rates
from rlpipe.offload.tracker import Operator
from rlpipe.offload.trace import Seconds
from rlpipe.plan.device import Device


def rates_of(device: Device, *, num_ranks: int = 1) -> Rates:
    return device.rates(num_ranks)


def roofline(device: Device) -> Seconds:
    """An operator takes what its arithmetic or its memory takes, whichever is more."""
    slowest = min(device.matmul_flops.values())

    def seconds(operator: Operator) -> float:
        flops = device.matmul_flops.get(str(operator.dtype).removeprefix("torch."), slowest)
        return max(operator.flops / flops, operator.num_bytes / device.memory_bandwidth)

    return seconds
