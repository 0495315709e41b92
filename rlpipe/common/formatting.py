"""Numbers with their units, and texts of unknown origin, for people to read."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import IO, TextIO

JOINERS = "\u200c\u200d"
"""Zero-width characters that some scripts and emoji need inside words."""
URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
HIDDEN = "<hidden>"
KIB, MIB, GIB = 2**10, 2**20, 2**30


def printable(text: str) -> str:
    """Return a text with escapes for what would control a terminal or reorder its line; keep newlines and tabs."""
    return "".join(
        char
        if char.isprintable() or char in "\n\t" or not _is_control(char)
        else char.encode("unicode_escape").decode()
        for char in text
    )


def print_line(text: str, stream: TextIO, *, end: str = "\n") -> None:
    """Print a line; once nobody reads the stream any more, as behind ``| head``, drop it and all that follow."""
    try:
        print(text, end=end, file=stream, flush=True)
    except BrokenPipeError:
        drop_output(stream)


def drop_output(stream: IO[str]) -> None:
    """Send what is left of the output to ``/dev/null``, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_control(char: str) -> bool:
    """Return whether a character is a control, format or unassigned one, or separates lines."""
    category = unicodedata.category(char)
    return (category[0] == "C" and char not in JOINERS) or category in ("Zl", "Zp")


def storable(text: str) -> str:
    """Return a text without what UTF-8 can't express, lone surrogates, which become backslash escapes."""
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int) -> str:
    """Return the text, or its beginning with an ellipsis if it is longer than ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def gib(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in a smaller unit."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def count(number: float) -> str:
    """Format a number of parameters in billions or millions."""
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def duration(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def giga(rate: float) -> str:
    """Format a rate in billions, without its unit."""
    return f"{rate / 1e9:,.0f}" if rate >= 1e10 else f"{rate / 1e9:.1f}"


def without_password(text: str) -> str:
    """Return a text with the user and password of every URL in it hidden."""
    return URL_PASSWORD.sub(HIDDEN, text)
