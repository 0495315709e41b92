"""Measurement of a device and its host, by small pieces of work that take about fifteen seconds together."""

from __future__ import annotations

from datetime import date

import torch

from rlpipe.hardware.arithmetic import adam_elements, added_elements, matmul_flops
from rlpipe.hardware.cgroup import host_memory_bytes
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtypes import cpu_name
from rlpipe.hardware.timing import all_cores
from rlpipe.hardware.transfers import measure_transfers, memory_bandwidth

CPU = torch.device("cpu")


def measure(device: torch.device, *, name: str, scale: float = 1.0) -> Device:
    """Measure the rates that the device reaches now; nothing else should run on it.

    Takes up to 3 GiB of the device's memory and 1 GiB of the host's. The host computes with all of its cores.
    ``link`` of the result is None, because measuring it takes several ranks (``rlpipe.hardware.link``).

    Args:
        name: Name of the result.
        scale: Factor on buffer sizes and times; below 1 the measurement is rougher and faster.

    Raises:
        ConfigError: A rate, which the message names, is 0 or not finite.
        RuntimeError: From torch, if there is not enough memory.
    """
    try:
        with all_cores():
            return _measure(device, name, scale)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(device: torch.device, name: str, scale: float) -> Device:
    transfers = measure_transfers(device, scale=scale)
    bandwidth = memory_bandwidth(device, scale=scale)
    host_adam = adam_elements(CPU, scale=scale)
    return Device(
        name=name,
        kind="cuda" if device.type == "cuda" else "cpu",
        memory_bytes=_memory_bytes(device),
        matmul_flops=matmul_flops(device, scale=scale),
        memory_bandwidth=bandwidth,
        host_to_device=transfers.host_to_device,
        device_to_host=transfers.device_to_host,
        both=transfers.both,
        link=None,
        device_adam=adam_elements(device, scale=scale) if device.type == "cuda" else host_adam,
        host_adam=host_adam,
        host_adding=added_elements(scale=scale),
        host_bandwidth=memory_bandwidth(CPU, scale=scale) if device.type == "cuda" else bandwidth,
        host_memory_bytes=host_memory_bytes(),
        hardware=hardware_name(device),
        measured_at=date.today().isoformat(),
    )


def hardware_name(device: torch.device) -> str:
    """Return the driver's name of the GPU, or the machine's name of its processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
