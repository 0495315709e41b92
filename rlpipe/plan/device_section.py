"""What a report says of the device and its machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rlpipe.hardware.device import Device
from rlpipe.plan.section import Section
from rlpipe.units import gib, giga


def device_section(device: Device, dtypes: Sequence[str]) -> Section:
    """With the arithmetic in these dtypes; ``ConfigError`` if the device has no rate for one."""
    data = {**asdict(device), "source": device.source}
    return Section(name="device", title=f"device {device.name}", rows=[*_rows(device, dtypes)], data=data)


def _rows(device: Device, dtypes: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "rates", device.source
    if device.hardware is not None:
        yield "hardware", device.hardware
    yield "memory", f"{gib(device.memory_bytes)}, {giga(device.memory_bandwidth)} GB/s"
    label = "arithmetic"
    for dtype in dtypes:
        rate = device.flops(dtype)
        yield label, f"{rate / 1e12:,.1f} TFLOP/s in {dtype}" if rate >= 1e12 else f"{giga(rate)} GFLOP/s in {dtype}"
        label = ""
    to_device, to_host, both = (giga(rate) for rate in (device.host_to_device, device.device_to_host, device.both))
    if device.kind == "cuda":
        yield "PCIe", f"{to_device} GB/s to the device, {to_host} back, {both} each way at once"
    else:
        yield "copies", f"{to_device} GB/s one at a time, {both} each of two at once"
    through = " (as both ways at once: no link is known)" if device.link is None else ""
    yield "between ranks", f"{giga(device.exchange)} GB/s{through}"
    yield "Adam", f"{giga(device.device_adam)} billion elements/s on the device, {giga(device.host_adam)} on the host"
    yield "host memory", gib(device.host_memory_bytes)
