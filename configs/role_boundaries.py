"""The entries of ``data.role_boundaries``: the markers that a chat template writes around a role's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any

from rlpipe.errors import ConfigError

OPTION = "data.role_boundaries"
END_TOKEN = "eos_token"
"""End marker that stands for the tokenizer's end token, whatever its text is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleMarkers:
    """Texts around each turn of a role, as the chat template renders them."""

    role: str
    start: str
    end: str | None
    """End marker; None if the turn goes to the end of the sequence."""
    include_start: bool = False
    """True if the start marker belongs to the turn."""
    include_end: bool = True
    """True if the end marker belongs to the turn; if False, it may also be the start marker of the next turn."""
    interrupts: bool = False
    """True if the turn may also stand within a turn of another role, which continues after it."""


def read_role_boundaries(entries: Sequence[Any]) -> list[RoleMarkers]:
    """Read the entries of ``data.role_boundaries``; raise ``ConfigError`` with the entry and the key that is wrong."""
    markers = [_read(entry, f"{OPTION}[{index}]") for index, entry in enumerate(entries)]
    places: dict[str, int] = {}
    for index, marker in enumerate(markers):
        first = places.setdefault(marker.start, index)
        if first != index:
            role = markers[first].role
            raise ConfigError(f"{OPTION}[{index}].start: {marker.start!r} starts turns of {role} already, in [{first}]")
    return markers


def _read(entry: Any, name: str) -> RoleMarkers:
    keys = {field.name: field for field in fields(RoleMarkers)}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{name}: {entry!r} is no mapping with the keys {', '.join(keys)}")
    for key in entry:
        if key not in keys:
            nearest = get_close_matches(str(key), keys, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(keys)}"
            raise ConfigError(f"{name}: no such key {key!r}; {hint}")
    for key, field in keys.items():
        if key not in entry:
            if field.default is MISSING:
                raise ConfigError(f"{name}: {key} is missing{'; null if there is no marker' if key == 'end' else ''}")
            continue
        value, is_flag = entry[key], field.default is False or field.default is True
        if is_flag and not isinstance(value, bool):
            raise ConfigError(f"{name}.{key}: {value!r} is not true or false")
        if not is_flag and not (isinstance(value, str) and value) and (key, value) != ("end", None):
            raise ConfigError(f"{name}.{key}: {value!r} is not a text of at least one character")
    return RoleMarkers(**{str(key): value for key, value in entry.items()})
