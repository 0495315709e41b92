"""Storage of measured devices: one JSON file each in the user's cache."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from rlpipe.common.atomic_io import user_cache, why_not_writable, write_whole
from rlpipe.errors import ConfigError
from rlpipe.hardware.curve import Curve, Link
from rlpipe.hardware.device import ADDINGS, STATE_DTYPES, Device

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
        raise TypeError("it holds no object")
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
    known = {entry.name for entry in fields(kind)}
    required = {entry.name for entry in fields(kind) if entry.default is MISSING}
    wrong = sorted((required - content.keys()) | (content.keys() - known))
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
