"""This machine's own measurement: read where it is stored, taken where it is not."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from rlpipe.errors import ConfigError
from rlpipe.hardware.arithmetic import product_flops
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtypes import WIDE, DeviceTypes
from rlpipe.hardware.first import ask_first, num_ranks
from rlpipe.hardware.limits import host_memory_bytes
from rlpipe.hardware.link import measure_link
from rlpipe.hardware.machines import load_stored, own_name, store, stored_names
from rlpipe.hardware.measure import hardware_name, measure
from rlpipe.hardware.timing import threads

logger = logging.getLogger(__name__)

QUICK = 0.1
"""The scale of a measurement that nobody should have to wait for."""


def calibrate(device: torch.device) -> Device:
    """Measures and stores; raises ``ConfigError`` if either is impossible."""
    measured = measure(device, name=own_name(device.type))
    store(measured)
    return measured


def own_device(device: torch.device, *, scale: float = 1.0) -> Device:
    """The stored measurement of this machine with this device; without one it is measured, and stored if that works.

    In a process group of several ranks all of them must call this, and get the same: what rank 0 finds, which measures
    while the others wait, or its error, with the ``link`` that they then measure together. ``scale`` is ``measure``'s.
    """
    if num_ranks() == 1:
        return _find_or_measure(device, scale)
    own = ask_first(lambda: _find_or_measure(device, scale))
    with_link = replace(own, link=measure_link(device, scale=scale))
    if own.link is None and dist.get_rank() == 0:
        _try_to_store(with_link)
    return with_link


def own_slowdown(types: DeviceTypes, kind: str, dtype: str) -> float | None:
    """Times as long as in float32 that matrix products take in ``dtype`` on this machine's device of a kind.

    As they were measured, else by small ones on the CPU, in a few tenths of a second; None for a GPU.
    """
    name = own_name(kind)
    stored = _load_usable(name) if name in stored_names() else None
    rates = stored.matmul_flops if stored is not None and types.device.startswith(stored.hardware or "?") else {}
    if dtype not in rates or types.switch:  # a machine may have been measured without the switch
        if kind != "cpu":
            return None
        try:
            with threads(1):  # others may be busy while a run starts, and what is in step with them is slow
                rates = {each: product_flops(torch.device(kind), each, QUICK) for each in (WIDE, dtype)}
        except RuntimeError:  # no such products
            return None
    return rates[WIDE] / rates[dtype]


def _find_or_measure(device: torch.device, scale: float) -> Device:
    name = own_name(device.type)
    stored = _load_usable(name) if name in stored_names() else None
    if stored is not None and (stored.kind, stored.hardware) == (device.type, hardware_name(device)):
        # Jobs of one machine may be given different shares of its memory.
        return replace(stored, host_memory_bytes=host_memory_bytes())
    logger.info("measuring %s", hardware_name(device))
    measured = measure(device, name=name, scale=scale)
    _try_to_store(measured)
    return measured


def _load_usable(name: str) -> Device | None:
    try:
        return load_stored(name)
    except ConfigError as error:
        logger.warning("the machine is measured again: %s", error)
        return None


def _try_to_store(measured: Device) -> None:
    """A run goes on without."""
    try:
        store(measured)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
