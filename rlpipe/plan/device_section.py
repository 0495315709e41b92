"""The report's section on the device and its machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from rlpipe.common.formatting import gib, giga
from rlpipe.hardware.device import STATE_DTYPES, Device, adding
from rlpipe.plan.section import Section


def device_section(device: Device, dtypes: Sequence[str]) -> Section:
    """Return the section, with the FLOP/s in ``dtypes``; raise ``ConfigError`` if the device has no rate for one."""
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
    yield from _link_rows(device)
    yield from _state_rows(device)
    yield "host memory", f"{gib(device.host_memory_bytes)}, {giga(device.host_bandwidth)} GB/s"


def _state_rows(device: Device) -> Iterator[tuple[str, str]]:
    """Yield the rates of Adam and of gradient accumulation, by dtype."""
    label = "Adam"
    for dtype in STATE_DTYPES:
        on_device, on_host = giga(device.device_adam[dtype]), giga(device.host_adam[dtype])
        yield label, f"{on_device} billion elements/s on the device, {on_host} on the host in {dtype}"
        label = ""
    label = "adding"
    for total in STATE_DTYPES:
        parts = ", ".join(f"{giga(device.host_adding[adding(part, total)])} of {part}" for part in STATE_DTYPES)
        yield label, f"billion elements/s on the host: {parts}, to {total}"
        label = ""


def _link_rows(device: Device) -> Iterator[tuple[str, str]]:
    """Yield one rate at a gigabyte if all collectives are alike; otherwise the rates of each by the bytes received."""
    label = "between ranks"
    if device.link is None:
        yield label, f"{giga(device.both)} GB/s (as both ways at once: no link is known)"
        return
    curves = {entry.name.replace("_", "-"): getattr(device.link, entry.name) for entry in fields(device.link)}
    if len(set(curves.values())) == 1:
        yield label, f"{giga(device.link.all_gather.rate(1e9))} GB/s"
        return
    for name, curve in curves.items():
        rates = ", ".join(f"{gib(size)} at {curve.rate(size) / 1e9:,.3g}" for size in curve.num_bytes)
        yield label, f"{name} of {rates} GB/s"
        label = ""
