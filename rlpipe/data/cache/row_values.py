"""Storage of a row's columns as bytes that are read back unchanged, by a pickle that allows plain values only."""

from __future__ import annotations

import io
import pickle
from typing import Any

from rlpipe.errors import DataError

ALLOWED = {
    ("collections", "OrderedDict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("rlpipe.types", "PlacedImage"),
    ("rlpipe.types", "Truth"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
"""Classes and functions that values may use beside Python's own; none of them runs code."""


def dump(value: Any, location: str) -> bytes:
    """Store ``value`` as bytes; raise ``DataError`` if it is, or holds, something that could not be read back."""
    try:
        stored = pickle.dumps(value, protocol=5)
        load(stored)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise DataError(
            f"{location}: its columns can't be stored ({error}); leave out the column with data.transform"
        ) from None
    return stored


def load(stored: bytes) -> Any:
    return _Reader(io.BytesIO(stored)).load()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
        return super().find_class(module, name)
