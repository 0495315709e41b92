"""Human-readable numbers with their units."""

from __future__ import annotations


def gib(num_bytes: float) -> str:
    """Format a number of bytes in GiB, or in a smaller unit."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
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
