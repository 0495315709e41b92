"""Measured devices, one JSON file for each machine in the user's cache."""

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

_TEXTS = ("name", "kind", "measured_at")


def machines_folder() -> Path:
    """Under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlpipe" / "machines"


def this_machine() -> str:
    """The name under which this machine's measurement is stored."""
    return platform.node() or "localhost"


def stored_names() -> list[str]:
    """Of all machines with a stored measurement."""
    return sorted(path.stem for path in machines_folder().glob("*.json") if not path.name.startswith("."))


def store(device: Device) -> Path:
    """Writes a measurement in place of the one of that name, and says where; ``ConfigError`` if that is impossible."""
    assert device.measured_at is not None, "only measurements are stored"
    folder = machines_folder()
    problem = why_not_writable(folder)
    if problem is not None:
        raise ConfigError(f"the measurement can't be stored: {problem}; set XDG_CACHE_HOME to another folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device.name}.json"
    write_whole(path, json.dumps(asdict(device), indent=2) + "\n")
    return path


def load_stored(name: str) -> Device:
    """The measurement of a machine; raises ``ConfigError`` if there is none, or its file is damaged."""
    path = machines_folder() / f"{name}.json"
    try:
        return _read_device(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: measure the machine, or give another --device") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it, and measure the machine again") from None


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
        right = isinstance(value, str) or (name == "measured_at" and value is None)
    elif name == "matmul_flops":
        right = isinstance(value, dict) and all(_is_number(rate) for rate in value.values())
    else:
        right = _is_number(value)
    if not right:
        raise TypeError(f"{name} is {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
