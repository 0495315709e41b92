"""Building blocks of the schema's sections: options with a range and a doc line, and a freezable base class."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

MISSING = "???"
"""OmegaConf's marker of an option without a default."""


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare an option; ``minimum`` and ``maximum`` are inclusive, ``above`` is exclusive. None is always valid."""
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Freezable:
    """A config that refuses changes once it has been validated."""

    def freeze(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            for child in value.values() if isinstance(value, dict) else [value]:
                if isinstance(child, Freezable):
                    child.freeze()
            if isinstance(value, list):
                object.__setattr__(self, entry.name, tuple(value))
        object.__setattr__(self, "_frozen", True)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"the config is frozen: {type(self).__name__}.{name} can't be set after validation")
        object.__setattr__(self, name, value)
