"""A change with which an actor fits that does not, or with which it is faster, and the effect of the change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlpipe.common.formatting import gib


@dataclass(kw_only=True, slots=True, frozen=True)
class Remedy:
    """A change of the config or of the hardware, and its effect."""

    change: str
    seconds: float | None
    """Seconds of a step with the change; None if they are not known."""
    num_bytes: int | None = None
    """Bytes of a process with the change, on the device that it computes on; None if they are not predicted."""

    def describe(self) -> str:
        """Return the change with its effect in parentheses."""
        time = [] if self.seconds is None else [f"{self.seconds:.1f} s per step"]
        size = [] if self.num_bytes is None else [gib(self.num_bytes)]
        return f"{self.change} ({', '.join(time + size)})"

    def as_json(self, size_key: str | None = None) -> dict[str, Any]:
        """Return the change and its effect; ``size_key`` is the key of the bytes, which are left out without it."""
        size = {} if size_key is None else {size_key: self.num_bytes}
        return {"change": self.change, "seconds": self.seconds, **size}
