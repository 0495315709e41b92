"""Building blocks of the schema's sections: options with a range and a doc line, and the sections' base classes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

MISSING = "???"
"""OmegaConf's marker of an option without a default."""
MAX_PROCESSES = 10_000
"""Upper bound of processes, CPUs and GPUs, beyond any cluster."""
MAX_STEPS = 10**9
MAX_TOKENS = 2**30
"""Upper bound of a length in tokens; the sum of two fits into an int32."""
MAX_SECONDS = 1_000_000
"""Upper bound of a timeout; ``poll``, which waits for sockets and pipes, takes at most 2**31 ms."""
MAX_GIB = 1_000_000
MAX_WEIGHT = 1_000_000
"""Upper bound of coefficients and rewards; float32 still tells all integers below it apart."""
DTYPES = ("float32", "bfloat16", "float16")
"""Types that models can compute in; every device has the first."""


@dataclass(kw_only=True, frozen=True)
class TextRule:
    """Texts that an option accepts."""

    pattern: str
    words: str
    max_bytes: int | None = None
    """Bytes of the longest part between slashes; file systems accept no more in a file's name."""

    def accepts(self, text: str) -> bool:
        parts = text.encode("utf-8", "replace").split(b"/")
        fits = self.max_bytes is None or max(map(len, parts)) <= self.max_bytes
        return fits and re.fullmatch(self.pattern, text) is not None


CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
LINE = TextRule(
    pattern=rf"(?!~[^/])(?=.*\S)[^{CONTROL}]{{1,4000}}",
    words="a non-empty line of text without control characters, ~user or parts of over 255 bytes",
    max_bytes=255,
)
"""Paths, columns, hub ids, functions."""
NAME = TextRule(
    pattern=rf"(?!\.\.?$)(?=.*\S)[^/\\{CONTROL}]+",
    words=r"a name of 1 to 200 bytes without control characters, / or \, other than . and ..",
    max_bytes=200,
)
"""Names that become part of a file's name."""
PROSE = TextRule(pattern=r"[^\x00\ud800-\udfff]*", words="a string without NUL or unpaired surrogates")
CHARACTERS = TextRule(pattern=r"[^\x00\ud800-\udfff]+", words="a non-empty string without NUL or unpaired surrogates")


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    text: TextRule = LINE,
) -> Any:
    """Declare an option; ``minimum`` and ``maximum`` are inclusive, ``above`` is exclusive. None is always valid.

    The range, and the rule of texts, apply to the values in a list or dictionary, too.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum, "text": text}
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


@dataclass(kw_only=True)
class UserFunction(Freezable):
    """A section that may name a function of the user's own in place of a built-in one."""

    path: str | None = option(
        None,
        "Your own function in place of the built-in one, as file.py:function or package.module:function; null: the "
        "built-in one.",
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the function at path.")
    digest: str | None = option(
        None, "SHA-256 of the file in path, which the run fills in; a run rejects a file with another digest."
    )
