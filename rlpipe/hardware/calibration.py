"""The profile of this machine: loaded if it is stored, measured otherwise."""

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
    """Measure this machine's device and store the result; also forget the stored rates of models' matrix products.

    Raises ``ConfigError`` if measuring or storing is impossible.
    """
    forget_rates()
    measured = measure(device, name=own_name(device.type))
    store(measured)
    return measured


def own_device(device: torch.device, *, scale: float = 1.0) -> Device:
    """Return the stored measurement of this device; without one, measure it and try to store the result.

    In a process group of several ranks all of them must call this, and all get the same result: rank 0 loads or
    measures while the others wait (they get its error if it fails), then all measure the ``link`` together.
    ``scale`` is that of ``measure``.
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
        # Jobs on one machine may be given different shares of its memory.
        return replace(stored, host_memory_bytes=host_memory_bytes())
    logger.info("measuring %s", hardware_name(device))
    measured = measure(device, name=name, scale=scale)
    _try_to_store(measured)
    return measured


def _try_to_store(measured: Device) -> None:
    """Store the measurement; log a warning if that fails, because a run does not need the file."""
    try:
        store(measured)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
