"""This machine's own measurement: read where it is stored, taken where it is not."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from rlpipe.errors import ConfigError
from rlpipe.hardware.cgroup import host_memory_bytes
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtype_speed import forget_rates
from rlpipe.hardware.link import measure_link
from rlpipe.hardware.measure import hardware_name, measure
from rlpipe.hardware.profile_store import load_usable, own_name, store
from rlpipe.hardware.rank0 import ask_first, num_ranks

logger = logging.getLogger(__name__)


def calibrate(device: torch.device) -> Device:
    """Measures and stores; raises ``ConfigError`` if either is impossible. Rates of models' products are forgotten."""
    forget_rates()
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


def _find_or_measure(device: torch.device, scale: float) -> Device:
    name = own_name(device.type)
    stored = load_usable(name)
    if stored is not None and (stored.kind, stored.hardware) == (device.type, hardware_name(device)):
        # Jobs of one machine may be given different shares of its memory.
        return replace(stored, host_memory_bytes=host_memory_bytes())
    logger.info("measuring %s", hardware_name(device))
    measured = measure(device, name=name, scale=scale)
    _try_to_store(measured)
    return measured


def _try_to_store(measured: Device) -> None:
    """A run goes on without."""
    try:
        store(measured)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
