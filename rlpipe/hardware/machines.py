"""Measured devices, one JSON file for each in the user's cache."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError
from rlpipe.folders import why_not_writable, write_whole
from rlpipe.hardware.device import Device

KINDS = ("cuda", "cpu")
_TEXTS = ("name", "kind")
_TEXTS_OR_NONE = ("hardware", "measured_at")


def machines_folder() -> Path:
    """Under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlpipe" / "machines"


def own_name(kind: str) -> str:
    """The name under which this machine's measurement is stored: of its GPUs, or of itself as a device."""
    return f"{platform.node() or 'localhost'}-{kind}"


def own_stored_names() -> list[str]:
    """Of what is measured of this machine, its GPUs first."""
    return [name for name in map(own_name, KINDS) if name in stored_names()]


def stored_names() -> list[str]:
    """Of all stored measurements."""
    return sorted(path.stem for path in machines_folder().glob("*.json") if not path.name.startswith("."))


def store(device: Device) -> Path:
    """Writes a measurement in place of the one of that name, and says where; ``ConfigError`` if that is impossible."""
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
    """Of the file with the measurement of that name."""
    return machines_folder() / f"{name}.json"


def load_stored(name: str) -> Device:
    """The measurement of that name; raises ``ConfigError`` if there is none, or its file is damaged."""
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


def _read_device(content: Any) -> Device:
    """Raises ``ValueError`` or ``TypeError`` that says what is wrong."""
    if not isinstance(content, dict):
        raise TypeError("it holds no object")
    known = {entry.name for entry in fields(Device)}
    required = {entry.name for entry in fields(Device) if entry.default is MISSING}
    wrong = sorted((required - content.keys()) | (content.keys() - known))
    if wrong:
        raise ValueError(f"{wrong[0]} is {'unknown' if wrong[0] in content else 'missing'}")
    for name, value in content.items():
        _check(name, value)
    return Device(**content)


def _check(name: str, value: Any) -> None:
    if name in _TEXTS:
        right = isinstance(value, str)
    elif name in _TEXTS_OR_NONE:
        right = value is None or isinstance(value, str)
    elif name == "link":
        right = value is None or _is_number(value)
    elif name == "matmul_flops":
        right = isinstance(value, dict) and all(_is_number(rate) for rate in value.values())
    else:
        right = _is_number(value)
    if not right:
        raise TypeError(f"{name} is {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
