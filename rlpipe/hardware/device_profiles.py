"""Devices known by name, and the profiles that were measured on this machine."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlpipe.common.atomic_io import user_cache, why_not_writable, write_whole
from rlpipe.common.formatting import GIB
from rlpipe.errors import ConfigError, did_you_mean
from rlpipe.hardware.device import ADAM_ACCESSES, ADDINGS, STATE_DTYPES, Curve, Device, Link, adding

logger = logging.getLogger(__name__)

KINDS = ("cuda", "cpu")
_TEXTS = ("name", "kind")
_TEXTS_OR_NONE = ("hardware", "measured_at")
_KEYS = {"device_adam": STATE_DTYPES, "host_adam": STATE_DTYPES, "host_adding": ADDINGS}


def machines_folder() -> Path:
    return user_cache() / "machines"


def own_name(kind: str) -> str:
    """Return the name under which this machine's measurement is stored, by the kind of device (``cuda`` or ``cpu``)."""
    return f"{platform.node() or 'localhost'}-{kind}"


def own_stored_names() -> list[str]:
    """Return the names of this machine's stored measurements, that of its GPUs first."""
    return [name for name in map(own_name, KINDS) if name in stored_names()]


def stored_names() -> list[str]:
    """Return the names of all stored measurements."""
    return sorted(path.stem for path in machines_folder().glob("*.json") if not path.name.startswith("."))


def store(device: Device) -> Path:
    """Write a measurement, replacing any of that name, and return its path; raise ``ConfigError`` if that fails."""
    assert device.measured_at is not None, "only measurements are stored"
    folder = machines_folder()
    problem = why_not_writable(folder)
    if problem is not None:
        raise ConfigError(f"the measurement can't be stored: {problem}; set XDG_CACHE_HOME to another folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(device.name)
    write_whole(path, json.dumps(asdict(device), indent=2) + "\n")
    return path


def path_of(name: str) -> Path:
    """Return the path of the measurement of this name."""
    return machines_folder() / f"{name}.json"


def load_stored(name: str) -> Device:
    """Load the measurement of this name; raise ``ConfigError`` if there is none or its file is damaged."""
    path = path_of(name)
    try:
        return _read_device(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: measure that machine with rlpipe plan --calibrate, or give another --device"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        remedy = "remove it, and measure that machine again with rlpipe plan --calibrate"
        raise ConfigError(f"{path} is damaged ({error}): {remedy}") from None


def load_usable(name: str) -> Device | None:
    """Load the measurement of this name; return None if there is none or its file is damaged, which is logged."""
    if name not in stored_names():
        return None
    try:
        return load_stored(name)
    except ConfigError as error:
        logger.warning("the machine is measured again: %s", error)
        return None


def _read_device(content: Any) -> Device:
    """Build a device from parsed JSON; raise ``ValueError`` or ``TypeError`` with what is wrong."""
    if not isinstance(content, dict):
        raise TypeError("it is not a JSON object")
    _check_names(content, Device)
    for name, value in content.items():
        _check(name, value)
    link = content["link"]
    return Device(**{**content, "link": None if link is None else _read_link(link)})


def _read_link(content: Mapping[str, Any]) -> Link:
    _check_names(content, Link)
    return Link(**{name: _read_curve(name, curve) for name, curve in content.items()})


def _read_curve(name: str, content: Any) -> Curve:
    if not isinstance(content, dict):
        raise TypeError(f"link.{name} is {content!r}")
    _check_names(content, Curve)
    for key, values in content.items():
        if not (isinstance(values, list) and all(map(_is_number, values))):
            raise TypeError(f"link.{name}.{key} is {values!r}")
    return Curve(**{key: tuple(values) for key, values in content.items()})


def _check_names(content: Mapping[str, Any], kind: type[Device] | type[Link] | type[Curve]) -> None:
    names = {entry.name for entry in fields(kind)}
    required = {entry.name for entry in fields(kind) if entry.default is MISSING}
    wrong = sorted((required - content.keys()) | (content.keys() - names))
    if wrong:
        raise ValueError(f"{wrong[0]} is {'unknown' if wrong[0] in content else 'missing'}")


def _check(name: str, value: Any) -> None:
    if name in _TEXTS:
        right = isinstance(value, str)
    elif name in _TEXTS_OR_NONE:
        right = value is None or isinstance(value, str)
    elif name == "link":
        right = value is None or isinstance(value, dict)
    elif name == "matmul_flops":
        right = _are_rates(value)
    elif name in _KEYS:
        right = _are_rates(value) and sorted(value) == sorted(_KEYS[name])
    else:
        right = _is_number(value)
    if not right:
        raise TypeError(f"{name} is {value!r}")


def _are_rates(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MATMUL_SHARE = 0.55
"""Share of the peak that large bf16 matrix products of a training step or a prefill reach in common frameworks."""
MEMORY_SHARE = 0.8
"""Share of the device memory's peak that memory-bound kernels reach."""
LINK_SHARE = 0.8
"""Share of NVLink's peak in one direction that NCCL reaches with many megabytes."""
OWN_MACHINE = "this"
"""The name that stands for this machine's own measurement."""
_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class Transfers:
    """Transfer rates between host and device, in bytes per second."""

    host_to_device: float
    device_to_host: float
    both: float
    """Bytes per second in each direction while both are busy."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _Host:
    memory_bytes: int
    bandwidth: float
    """Bytes per second between its cores and its memory."""


_GEN5 = Transfers(host_to_device=55e9, device_to_host=50e9, both=45e9)
_GEN4 = Transfers(host_to_device=25e9, device_to_host=24e9, both=20e9)
_SERVER = _Host(memory_bytes=128 * GIB, bandwidth=150e9)
_DESKTOP = _Host(memory_bytes=64 * GIB, bandwidth=50e9)


def _assume(
    name: str,
    *,
    memory_gib: float,
    half: float,
    single: float,
    bandwidth: float,
    link: float | None,
    bus: Transfers,
    host: _Host,
) -> Device:
    """Return a device with rates assumed from data sheet peaks.

    ``half`` and ``single`` are in TFLOP/s, without sparsity, the rest is in GB/s. ``link`` is NVLink's rate in one
    direction; None if there is none.
    """
    reached = dict.fromkeys(("bfloat16", "float16"), half * 1e12 * MATMUL_SHARE)
    memory = bandwidth * 1e9 * MEMORY_SHARE
    return Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        # float32 without TF32, which neither torch nor rlpipe turns on.
        matmul_flops={**reached, "float32": single * 1e12 * MATMUL_SHARE},
        memory_bandwidth=memory,
        host_to_device=bus.host_to_device,
        device_to_host=bus.device_to_host,
        both=bus.both,
        link=None if link is None else Link.at_rate(link * 1e9 * LINK_SHARE),
        device_adam=_adam(memory),
        host_adam=_adam(host.bandwidth),
        host_adding={
            # The sum is read and written.
            adding(source, total): host.bandwidth / (_ITEMSIZES[source] + 2 * _ITEMSIZES[total])
            for total in STATE_DTYPES
            for source in STATE_DTYPES
        },
        host_bandwidth=host.bandwidth,
        host_memory_bytes=host.memory_bytes,
    )


def _adam(bandwidth: float) -> dict[str, float]:
    """Return AdamW's elements per second by dtype, as limited by memory bandwidth."""
    return {dtype: bandwidth / (ADAM_ACCESSES * _ITEMSIZES[dtype]) for dtype in STATE_DTYPES}


# Memory is what torch reports, less than the name says: a part is reserved for error correction and the driver.
_TABLE = [
    _assume("b200-180g", memory_gib=178.3, half=2250, single=75, bandwidth=8000, link=900, bus=_GEN5, host=_SERVER),
    _assume("h200-141g", memory_gib=139.7, half=989, single=67, bandwidth=4800, link=450, bus=_GEN5, host=_SERVER),
    _assume("h100-80g", memory_gib=79.1, half=989, single=67, bandwidth=3350, link=450, bus=_GEN5, host=_SERVER),
    _assume("a100-80g", memory_gib=79.2, half=312, single=19.5, bandwidth=2039, link=300, bus=_GEN4, host=_SERVER),
    _assume("a100-40g", memory_gib=39.4, half=312, single=19.5, bandwidth=1555, link=300, bus=_GEN4, host=_SERVER),
    _assume("l40s-48g", memory_gib=44.4, half=362, single=91.6, bandwidth=864, link=None, bus=_GEN4, host=_SERVER),
    _assume("rtx4090-24g", memory_gib=23.6, half=165, single=82.6, bandwidth=1008, link=None, bus=_GEN4, host=_DESKTOP),
    _assume("rtx3090-24g", memory_gib=23.6, half=71, single=35.6, bandwidth=936, link=None, bus=_GEN4, host=_DESKTOP),
]
DEVICES = {device.name: device for device in _TABLE}
"""Devices by name, those with the most memory first."""


def larger_devices(device: Device) -> list[Device]:
    """Return the GPUs of the table with clearly more memory than a GPU, the smallest first; none for a CPU."""
    if device.kind != "cuda":
        return []
    return [candidate for candidate in reversed(DEVICES.values()) if candidate.memory_bytes > 1.1 * device.memory_bytes]


def find_device(name: str | None = None) -> Device:
    """Return the device of this name from the table or the stored measurements.

    None or ``this`` stands for this machine's own measurement, that of its GPUs if there is one. Raises ``ConfigError``
    with the known names if the name is unknown or this machine was not measured yet.
    """
    stored = stored_names()
    if name is None or name == OWN_MACHINE:
        own_names = own_stored_names()
        if not own_names:
            names = ", ".join(_available_names(stored))
            raise ConfigError(
                f"this machine is not measured yet: measure it with rlpipe plan --calibrate, or set --device to "
                f"one of {names}"
            )
        return load_stored(own_names[0])
    if name in DEVICES:
        return DEVICES[name]
    if name in stored:
        return load_stored(name)
    available = _available_names(stored)
    raise ConfigError(
        f"--device: there is no {name}; it is one of {', '.join(available)}{did_you_mean(name, available)}"
    )


def _available_names(stored: list[str]) -> list[str]:
    return [*DEVICES, *stored, *([OWN_MACHINE] if own_stored_names() else [])]
