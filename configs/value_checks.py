"""Checks every value of a config against its option's choices, range and text rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rlpipe.configs.options import describe_range, describe_type, is_section
from rlpipe.configs.schema.option import CHARACTERS, NAME, PROSE, Freezable, TextRule
from rlpipe.errors import ConfigError


def find_out_of_range(section: Freezable, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for every option of a section with a wrong type or value; null is always valid."""
    hints = get_type_hints(type(section))
    for entry in fields(section):  # type: ignore[arg-type]
        value, name = getattr(section, entry.name), prefix + entry.name
        if is_section(hints[entry.name]):
            yield from find_out_of_range(value, f"{name}.")
        elif not entry.metadata:
            for key, child in value.items():
                yield from check_text(name, key, NAME)
                yield from find_out_of_range(child, f"{name}.{key}.")
        elif value is not None and not has_type(value, hints[entry.name]):
            yield ConfigError(f"{name}: {value!r:.200} is not {describe_type(hints[entry.name])}")
        elif value is not None:
            yield from check_range(name, value, entry.metadata)


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type; OmegaConf does not check what interpolations of lists refer to."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(has_type(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list | tuple) and all(has_type(child, parts[0]) for child in value)
    if kind is dict:
        return isinstance(value, Mapping) and all(has_type(child, parts[1]) for child in value.values())
    if hint in (int, float) and isinstance(value, bool):
        return False
    return hint is Any or isinstance(value, int | float if hint is float else hint)


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield errors of a value, and of those in a list or dictionary; ``metadata`` is that of the option."""
    choices = metadata["choices"]
    if choices is not None and value not in choices:
        nearest = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        yield ConfigError(f"{name}: {value!r:.200} is not {describe_range(metadata)}{hint}")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from check_range(f"{name}[{index}]", child, metadata)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from check_text(name, key, CHARACTERS)
            yield from check_range(f"{name}.{key}", child, {**metadata, "text": PROSE})
    elif isinstance(value, str):
        yield from check_text(name, value, metadata["text"])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from check_number(name, value, metadata)


def check_text(name: str, value: Any, rule: TextRule) -> Iterator[ConfigError]:
    if not isinstance(value, str) or not rule.accepts(value):
        yield ConfigError(f"{name}: {value!r:.80} is not {rule.words}")


def check_number(name: str, value: float, metadata: Mapping[str, Any]) -> Iterator[ConfigError]:
    minimum, above, maximum = (metadata[key] for key in ("minimum", "above", "maximum"))
    allowed = describe_range(metadata) or "an integer of at most 64 bits"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield ConfigError(f"{name}: a number of {value.bit_length()} bits is out of range; it must be {allowed}")
    elif not math.isfinite(value):
        yield ConfigError(f"{name}: {value} is not a finite number")
    elif (
        (minimum is not None and value < minimum)
        or (above is not None and value <= above)
        or (maximum is not None and value > maximum)
    ):
        yield ConfigError(f"{name}: {value} is out of range; it must be {allowed}")
